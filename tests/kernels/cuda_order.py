"""Plain-torch references that spell out the arithmetic of ATen's CUDA kernels; they share nothing with the kernels.

On the CPU, `h3opt.kernels.DEFINITIONS` runs ATen's CPU kernels, whose sums have another order: the Triton kernels under
the interpreter are compared with these instead, and on the GPU the kernels are compared with ATen itself.
`exp` and `1 / sqrt` are numpy's, as in triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def fused_multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """float32 x*y+z with the product exact (float64 holds it) and the sum rounded once more than a real fma's."""
    return (x.double() * y.double() + z.double()).float()


def sum_of_squares(x: Tensor) -> Tensor:
    """ATen's vectorized layer norm, float32 [rows, D] -> [rows]: 128 threads, four columns each per step."""
    rows, columns = x.shape
    steps = -(-columns // 512)
    padded = torch.zeros(rows, steps * 512)
    padded[:, :columns] = x
    padded = padded.view(rows, steps, 128, 4)
    total = torch.zeros(rows, 128)
    for step in range(steps):
        for element in range(4):
            value = padded[:, step, :, element]
            total = fused_multiply_add(value, value, total)
    warps = total.view(rows, 4, 32)
    for offset in (16, 8, 4, 2, 1):
        warps = warps[..., :offset] + warps[..., offset : 2 * offset]
    w0, w1, w2, w3 = warps[..., 0].unbind(1)
    return (w0 + w2) + (w1 + w3)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.reshape(-1, x.shape[-1]).float()
    mean = sum_of_squares(wide) / torch.full((wide.shape[0],), float(x.shape[-1]))
    # numpy's square root: torch's on the CPU is an ulp off now and then.
    rstd = torch.from_numpy(1 / np.sqrt((mean + torch.tensor(eps, dtype=torch.float32)).numpy()))
    return (weight.float() * (rstd[:, None] * wide)).to(x.dtype).view(x.shape)


def norm_modulate(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, index: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps) * (scale[index] + 1.0) + shift[index]


def residual_norm_modulate(residual, y, gate, weight, scale, shift, index, eps):
    hidden = gate[index] * y + residual
    return hidden, norm_modulate(hidden, weight, scale, shift, index, eps)


def scaled_residual_norm(residual, y, scale, weight, eps, dtype):
    hidden = residual.float() + y.float() * scale
    return hidden, rms_norm(hidden, weight, eps).to(dtype)


def silu(x: Tensor) -> Tensor:
    wide = x.float()
    with np.errstate(over="ignore", invalid="ignore"):
        exp = torch.from_numpy(np.exp(-wide.numpy()))
    return (wide / (exp + 1.0)).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    columns = x.shape[-1] // 2
    return x[..., :columns] * silu(x[..., columns:].contiguous())


def head_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rotate_half(rms_norm(x.contiguous(), weight, eps), cos, sin)


def rotate_half(normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    half = rotary // 2
    cos, sin = cos.to(normed.dtype)[:, None], sin.to(normed.dtype)[:, None]
    out = normed.clone()
    left, right = normed[..., :half], normed[..., half:rotary]
    out[..., :half] = left * cos[..., :half] + -right * sin[..., :half]
    out[..., half:rotary] = right * cos[..., half:] + left * sin[..., half:]
    return out


def round_e4m3(x: Tensor) -> Tensor:
    """float32 in [-448, 448] or NaN -> e4m3, from the list of its values: nearest, ties to the even code."""
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(E4M3).double()
    magnitude = x.double().abs().nan_to_num(0.0)
    above = torch.searchsorted(values, magnitude).clamp(max=126)
    below = (above - 1).clamp(min=0)
    to_above, to_below = values[above] - magnitude, magnitude - values[below]
    even = above % 2 == 0
    code = torch.where((to_above < to_below) | ((to_above == to_below) & even), above, below)
    code = torch.where(x.isnan(), torch.tensor(127), code) + 128 * torch.signbit(x)
    return code.to(torch.uint8).view(E4M3)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    amax = torch.where(wide.isnan().any(-1), torch.nan, wide.abs().nan_to_num(0.0, posinf=torch.inf).amax(-1))
    scale = torch.where(amax < 1e-12, torch.tensor(1e-12), amax) / torch.full_like(amax, 448.0)
    codes = round_e4m3((wide * (torch.ones_like(scale) / scale)[..., None]).clamp(-448, 448))
    return codes, scale[..., None]


def quantize_heads(x: Tensor, head_scale: Tensor) -> Tensor:
    return round_e4m3((x.float() * head_scale[:, None]).clamp(-448, 448))


def hadamard(x: Tensor) -> Tensor:
    """Channel by channel: at distance 1, 2, 4, ... each becomes the sum with its partner, or the partner less it."""
    wide, step = x.float(), 1
    channel = torch.arange(x.shape[-1])
    while step < x.shape[-1]:
        partner = wide[..., channel ^ step]
        wide = torch.where(channel & step == 0, wide + partner, partner - wide)
        step *= 2
    return (wide * torch.tensor(x.shape[-1] ** -0.5)).to(x.dtype)


def numpy_sine(x: Tensor) -> Tensor:
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sin(x.numpy()))


def upsample_snake(x: Tensor, taps: Tensor, frequency: Tensor, magnitude: Tensor, sine=numpy_sine) -> Tensor:
    """The transposed convolution itself, sample by sample of the stuffed signal, in the order of its input."""
    length = x.shape[-1]
    up = torch.zeros(*x.shape[:-1], 2 * length, device=x.device)
    for start in range(-3, 4):  # x[m + start] meets tap n + 5 - 2 (m + start), of sample n = 2m or 2m + 1
        shifted = x[..., (torch.arange(length, device=x.device) + start).clamp(0, length - 1)]
        for phase in (0, 1):
            tap = phase + 5 - 2 * start
            if 0 <= tap < 12:
                up[..., phase::2] += shifted * taps[tap]
    wave = sine(frequency[:, None] * up)
    up = up + magnitude[:, None] * (wave * wave)
    return up.unflatten(-1, (length, 2)).transpose(-1, -2).contiguous()


def downsample(x: Tensor, taps: Tensor, sine=None) -> Tensor:
    signal = x.transpose(-1, -2).flatten(-2)
    n = torch.arange(0, signal.shape[-1], 2, device=x.device)
    total = torch.zeros(*signal.shape[:-1], len(n), device=x.device)
    for k in range(12):
        total += signal[..., (n - 5 + k).clamp(0, signal.shape[-1] - 1)] * taps[k]
    return total
