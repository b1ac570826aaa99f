"""The operators `torch.ops.h3opt.*`: what each computes, its CUDA kernel, and its fake implementation.

An op's *definition* below is the exact ATen chain of the unfused model. It is the CPU implementation, and what the
Triton kernel on CUDA equals bit for bit (NaN payloads aside). Every intermediate rounds to the tensor's dtype where
the chain rounds. Outputs are contiguous. Dtypes are bfloat16, float16 and float32.

On CUDA an input that a kernel does not serve runs the definition instead, so the result is the same and only the
speed differs: mixed dtypes, a width that is not a multiple of 4 in a norm (ATen itself then sums in another order),
a misaligned pointer in a norm (likewise), rows wider than a kernel holds, resampling in 16 bit. Shapes that do not fit
together reach the definition too, whose ATen calls raise. Index values out of range raise on the CPU and are undefined
on CUDA.

The ops are opaque to ahead-of-time caches: whoever changes what an op computes bumps the version in its name.
They have no derivative: call them under `torch.no_grad()` or `torch.inference_mode()`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from h3opt.errors import MissingDependencyError

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SCALE_AMAX_MIN = 1e-12
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

CLOSE = ("scaled_linear", "upsample_snake", "downsample")
"""Operators whose CUDA side is close to the definition, not equal: a library's order of summation is its own."""

_NORM_MAX_COLUMNS = 16384


# --- definitions -----------------------------------------------------------------------------------------------


def quantize_rows_definition(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic per-row quantize to e4m3. x [..., D] -> (q e4m3 [..., D], scale float32 [..., 1]); x ~ q * scale.

    scale = clamp(amax|x|, min=1e-12) / 448 and q = clamp(x * (1 / scale), -448, 448), in float32: one division per
    row and a product per element, as in PyTorch's row-wise float8. A NaN makes its whole row NaN and an inf makes its
    row 0 with NaN at the inf; other rows do not change. Numbers divide as tensors: ATen on CUDA multiplies by the
    reciprocal of a Python number.
    """
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = amax.clamp(min=SCALE_AMAX_MIN) / torch.full_like(amax, E4M3_MAX)
    q = (wide * (torch.ones_like(scale) / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return q.contiguous(), scale.contiguous()


def scaled_linear_definition(
    q: Tensor, q_scale: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Linear layer on e4m3 operands with row-wise scales.

    q e4m3 [..., in], q_scale float32 [..., 1], weight_q e4m3 [out, in], weight_scale float32 [out, 1], bias [out] or
    None -> [..., out] in out_dtype. The bias is added in float32 before the one rounding, as `F.linear` does.

    On CUDA this is `torch._scaled_mm` with row-wise scales and `use_fast_accum=True` (Hopper's tensor cores keep
    about 14 bits of the sum between promotions; the slow accumulation costs a third of the GEMM's speed): close to
    this definition, not equal to it. It serves sizes in and out that are multiples of 16, out_dtype bfloat16 and
    compute capability 8.9 or newer; anything else runs the definition.
    """
    out = (q.float() * q_scale) @ (weight_q.float() * weight_scale).t()
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype).contiguous()


def norm_modulate_definition(
    x: Tensor, weight: Tensor, scale_table: Tensor, shift_table: Tensor, index: Tensor, eps: float
) -> Tensor:
    """RMSNorm and AdaLN modulation: rms_norm(x) * (1 + scale[index]) + shift[index].

    x [..., tokens, D], weight [D], tables [rows, D], index int64 [tokens] shared by all batch items -> x's shape.
    Source: diffusers' MiniMaxH3TransformerBlock.forward.
    """
    normed = torch.rms_norm(x, (x.shape[-1],), weight, eps)
    return (normed * (1.0 + scale_table.index_select(0, index)) + shift_table.index_select(0, index)).contiguous()


def norm_modulate_quantize_definition(
    x: Tensor, weight: Tensor, scale_table: Tensor, shift_table: Tensor, index: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `norm_modulate`: (q e4m3 [..., tokens, D], scale float32 [..., tokens, 1])."""
    return quantize_rows_definition(norm_modulate_definition(x, weight, scale_table, shift_table, index, eps))


def gated_residual_definition(residual: Tensor, y: Tensor, gate_table: Tensor, index: Tensor) -> Tensor:
    """residual + gate[index] * y: residual, y [..., tokens, D], gate_table [rows, D], index int64 [tokens].

    Source: diffusers' MiniMaxH3TransformerBlock.
    """
    return (residual + gate_table.index_select(0, index) * y).contiguous()


def residual_norm_modulate_definition(
    residual: Tensor,
    y: Tensor,
    gate_table: Tensor,
    weight: Tensor,
    scale_table: Tensor,
    shift_table: Tensor,
    index: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """hidden = residual + gate[index] * y, and `norm_modulate` of hidden. Returns (hidden, normed).

    residual, y [..., tokens, D]; the rest as in `norm_modulate`. Source: diffusers' MiniMaxH3TransformerBlock.
    """
    hidden = gated_residual_definition(residual, y, gate_table, index)
    return hidden, norm_modulate_definition(hidden, weight, scale_table, shift_table, index, eps)


def residual_norm_modulate_quantize_definition(
    residual: Tensor,
    y: Tensor,
    gate_table: Tensor,
    weight: Tensor,
    scale_table: Tensor,
    shift_table: Tensor,
    index: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `residual_norm_modulate`, the normed output quantized: (hidden, q e4m3, scale float32 [..., tokens, 1])."""
    hidden, normed = residual_norm_modulate_definition(
        residual, y, gate_table, weight, scale_table, shift_table, index, eps
    )
    return hidden, *quantize_rows_definition(normed)


def scaled_residual_definition(residual: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """residual + y * scale, the video decoder's LayerScale and residual sum, in the dtype all three promote to.

    residual, y [..., D], scale [D]. With a float32 scale the sum is float32 whatever the others are.
    Source: diffusers' MiniMaxH3VideoTransformerBlock.
    """
    return (residual + y * scale).contiguous()


def wide_norm_definition(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm in float32 of x [..., D] in any dtype, weight float32 [D]; rounded to `dtype` once, at the end.

    Source: diffusers' MiniMaxH3VideoTransformerBlock.
    """
    return torch.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(dtype).contiguous()


def wide_norm_quantize_definition(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `wide_norm`, which is rounded to `dtype` first: (e4m3 [..., D], scale float32 [..., 1])."""
    return quantize_rows_definition(wide_norm_definition(x, weight, eps, dtype))


def scaled_residual_norm_definition(
    residual: Tensor, y: Tensor, scale: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """hidden = `scaled_residual`, and `wide_norm` of it: (hidden [..., D], normed [..., D] in `dtype`)."""
    hidden = scaled_residual_definition(residual, y, scale)
    return hidden, wide_norm_definition(hidden, weight, eps, dtype)


def scaled_residual_norm_quantize_definition(
    residual: Tensor, y: Tensor, scale: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `scaled_residual_norm`, the normed output quantized: (hidden, q e4m3 [..., D], scale float32 [..., 1])."""
    hidden, normed = scaled_residual_norm_definition(residual, y, scale, weight, eps, dtype)
    return hidden, *quantize_rows_definition(normed)


def swiglu_definition(x: Tensor) -> Tensor:
    """x [..., 2F] -> first half * silu(second half), [..., F]. Source: diffusers' SwiGLU activation."""
    value, gate = x.chunk(2, dim=-1)
    return (value * F.silu(gate)).contiguous()


def swiglu_quantize_definition(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `swiglu`: x [..., 2F] -> (q e4m3 [..., F], scale float32 [..., 1])."""
    return quantize_rows_definition(swiglu_definition(x))


def head_norm_rope_definition(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head, then the rotary embedding of its first `rotary` channels (rotate-half).

    x [..., tokens, heads, head_dim], weight [head_dim], cos and sin [tokens, rotary] (cast to x's dtype first) -> x's
    shape. Source: diffusers' MiniMaxH3AttnProcessor and _apply_rotary_emb.
    """
    return _rotate_half(torch.rms_norm(x, (x.shape[-1],), weight, eps), cos, sin)


def unweighted_norm_rope_definition(x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head in float32 and without weight, rounded to x's dtype, then rotate-half of its first part.

    x [batch, tokens, heads, head_dim], cos and sin [1 or batch, tokens, rotary] (cast to x's dtype first) -> x's shape.
    Source: diffusers' MiniMaxH3VideoAttnProcessor.
    """
    return _rotate_half(torch.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype), cos, sin)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first channels of each head turned by the angles of its token; contiguous."""
    rotary = cos.shape[-1]
    rotated, passed = x[..., :rotary], x[..., rotary:]
    cos, sin = cos.to(x.dtype)[..., None, :], sin.to(x.dtype)[..., None, :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, passed), dim=-1).contiguous()


def head_norm_rope_quantize_definition(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, head_scale: Tensor, eps: float
) -> Tensor:
    """`head_norm_rope` times a static scale per head, clamped to +-448 and cast to e4m3 (NaN stays NaN).

    head_scale float32 [heads] multiplies: the attention's descale is its reciprocal. -> e4m3 of x's shape.
    """
    wide = head_norm_rope_definition(x, weight, cos, sin, eps).float() * head_scale[:, None]
    return wide.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).contiguous()


def upsample_snake_definition(x: Tensor, taps: Tensor, frequency: Tensor, magnitude: Tensor) -> Tensor:
    """Twice upsampled, then x + magnitude * sin(frequency * x)^2, both phases apart: no zero is stuffed or multiplied.

    x [batch, channels, length], taps [12] of the upsampling filter times 2, frequency and magnitude [channels]
    -> [batch, channels, 2, length], where [:, :, p, m] is sample 2m + p of the upsampled signal. Past its ends x keeps
    its first and last value. Source: diffusers' MiniMaxH3AudioUpSample1d and MiniMaxH3AudioSnakeBeta (frequency is
    exp(alpha) and magnitude 1 / (exp(beta) + 1e-9) there).

    Sample 2m + p reads x[m-3+p .. m+2+p] through the odd taps (p = 0) or the even ones (p = 1), last tap first. The
    CUDA kernel sums in that order, every product and sum rounded; this definition sums as the CPU's convolution does.
    """
    if not x.numel():
        return x.new_empty((*x.shape[:-1], 2, x.shape[-1]))
    channels, padded = x.shape[1], F.pad(x, (3, 3), mode="replicate")
    phases = [
        F.conv1d(padded[..., p : p + x.shape[-1] + 5], taps.flip(0)[p::2].expand(channels, 1, -1), groups=channels)
        for p in (0, 1)
    ]
    up = torch.stack(phases, dim=2)
    wave = frequency[:, None, None] * up
    return wave.sin_().square_().mul_(magnitude[:, None, None]).add_(up)  # in place: fresh memory costs more than sines


def downsample_definition(x: Tensor, taps: Tensor) -> Tensor:
    """Every second sample of the filtered signal, from the signal's two phases.

    x [batch, channels, 2, length] as `upsample_snake` gives it, taps [12] -> [batch, channels, length]. Sample m is
    the sum over k of taps[k] * signal[2m - 5 + k], summed in this order by the CUDA kernel; past its ends the signal
    keeps its first and last value. Source: diffusers' MiniMaxH3AudioLowPassFilter1d.
    """
    channels, length = x.shape[1], x.shape[3]
    if not x.numel():
        return x.new_empty((*x.shape[:2], length))
    padded = F.pad(x.transpose(2, 3).flatten(2), (5, 6), mode="replicate")
    return F.conv1d(padded, taps.expand(channels, 1, -1), stride=2, groups=channels)


# --- fakes -----------------------------------------------------------------------------------------------------


def _empty_quantized(x: Tensor, columns: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], columns), dtype=E4M3), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _quantize_rows_fake(x):
    return _empty_quantized(x, x.shape[-1])


def _scaled_linear_fake(q, q_scale, weight_q, weight_scale, bias, out_dtype):
    return q.new_empty((*q.shape[:-1], weight_q.shape[0]), dtype=out_dtype)


def _norm_modulate_fake(x, weight, scale_table, shift_table, index, eps):
    return x.new_empty(x.shape, dtype=_promoted(x, weight, scale_table, shift_table))


def _norm_modulate_quantize_fake(x, weight, scale_table, shift_table, index, eps):
    return _empty_quantized(x, x.shape[-1])


def _gated_residual_fake(residual, y, gate_table, index):
    return y.new_empty(y.shape, dtype=_promoted(residual, gate_table, y))


def _residual_norm_modulate_fake(residual, y, gate_table, weight, scale_table, shift_table, index, eps):
    hidden = y.new_empty(y.shape, dtype=_promoted(residual, gate_table, y))
    return hidden, y.new_empty(y.shape, dtype=_promoted(hidden, weight, scale_table, shift_table))


def _residual_norm_modulate_quantize_fake(residual, y, gate_table, weight, scale_table, shift_table, index, eps):
    return y.new_empty(y.shape, dtype=_promoted(residual, gate_table, y)), *_empty_quantized(y, y.shape[-1])


def _scaled_residual_fake(residual, y, scale):
    return y.new_empty(y.shape, dtype=_promoted(residual, y, scale))


def _wide_norm_fake(x, weight, eps, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _wide_norm_quantize_fake(x, weight, eps, dtype):
    return _empty_quantized(x, x.shape[-1])


def _scaled_residual_norm_fake(residual, y, scale, weight, eps, dtype):
    return _scaled_residual_fake(residual, y, scale), y.new_empty(y.shape, dtype=dtype)


def _scaled_residual_norm_quantize_fake(residual, y, scale, weight, eps, dtype):
    return _scaled_residual_fake(residual, y, scale), *_empty_quantized(y, y.shape[-1])


def _swiglu_fake(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _swiglu_quantize_fake(x):
    return _empty_quantized(x, x.shape[-1] // 2)


def _head_norm_rope_fake(x, weight, cos, sin, eps):
    return x.new_empty(x.shape, dtype=_promoted(x, weight))


def _unweighted_norm_rope_fake(x, cos, sin, eps):
    return x.new_empty(x.shape)


def _head_norm_rope_quantize_fake(x, weight, cos, sin, head_scale, eps):
    return x.new_empty(x.shape, dtype=E4M3)


def _upsample_snake_fake(x, taps, frequency, magnitude):
    return x.new_empty((*x.shape[:-1], 2, x.shape[-1]))


def _downsample_fake(x, taps):
    return x.new_empty((*x.shape[:2], x.shape[3]))


def _promoted(*tensors: Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors))


# --- CUDA ------------------------------------------------------------------------------------------------------


@functools.cache
def _kernels(family: str) -> Any:
    """The module of a kernel family, imported (and triton with it) on first use."""
    try:
        return importlib.import_module(f"h3opt.kernels.{family}")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"h3opt's CUDA kernels need the package {error.name!r}, which is not installed. Run `pip install triton`."
        ) from error


def launch(family: str, name: str, x: Tensor, *args: Any) -> Any:
    """Call the launcher `name` of a kernel family with x's device current, which is where triton launches."""
    function = getattr(_kernels(family), name)
    if x.device.index == torch.cuda.current_device():
        return function(x, *args)
    with torch.cuda.device(x.device):
        return function(x, *args)


def _norm_is_vectorized(x: Tensor, weight: Tensor) -> bool:
    """Whether ATen's norm reads x and weight as aligned vectors of four: the order of summation the kernels have."""
    aligned = 4 * x.element_size()
    return (
        x.dtype in DTYPES
        and x.shape[-1] % 4 == 0
        and x.shape[-1] > 0
        and weight.shape == x.shape[-1:]
        and weight.dtype == x.dtype
        and not (x.is_contiguous() and x.data_ptr() % aligned)
        and not (weight.is_contiguous() and weight.data_ptr() % aligned)
    )


def _norm_served(x: Tensor, weight: Tensor, index: Tensor, *tables: Tensor) -> bool:
    return (
        x.ndim >= 2
        and x.shape[-1] <= _NORM_MAX_COLUMNS
        and _norm_is_vectorized(x, weight)
        and index.dtype == torch.int64
        and index.shape == x.shape[-2:-1]
        and all(t.ndim == 2 and t.shape[1] == x.shape[-1] and t.dtype == x.dtype for t in tables)
    )


def _rope_served(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        x.ndim >= 3
        and x.shape[-1] <= 128
        and _norm_is_vectorized(x, weight)
        and cos.ndim == 2
        and cos.shape == sin.shape
        and cos.shape[0] == x.shape[-3]
        and cos.shape[1] % 2 == 0
        and 0 < cos.shape[1] <= x.shape[-1]
        and cos.dtype in DTYPES
        and sin.dtype in DTYPES
    )


def _unweighted_rope_served(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    # ATen norms a float32 copy of 16-bit heads, which is fresh and aligned whatever x is.
    aligned = x.dtype != torch.float32 or not (x.is_contiguous() and x.data_ptr() % 16)
    return (
        x.ndim == 4
        and x.dtype in DTYPES
        and aligned
        and 0 < x.shape[-1] <= 128
        and x.shape[-1] % 4 == 0
        and cos.ndim == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] == x.shape[1]
        and cos.shape[2] % 2 == 0
        and 0 < cos.shape[2] <= x.shape[-1]
        and cos.dtype in DTYPES
        and sin.dtype in DTYPES
    )


def _quantize_rows_cuda(x):
    if x.dtype not in DTYPES or not 0 < x.shape[-1] <= 32768:
        return quantize_rows_definition(x)
    return launch("quantize", "quantize_rows", x)


def _scaled_linear_cuda(q, q_scale, weight_q, weight_scale, bias, out_dtype):
    served = (
        out_dtype == torch.bfloat16
        and q.dtype == weight_q.dtype == E4M3
        and q.shape[-1] == weight_q.shape[1]
        and q.shape[-1] % 16 == 0
        and weight_q.shape[0] % 16 == 0
        and (bias is None or bias.dtype == torch.bfloat16)
        and torch.cuda.get_device_capability(q.device) >= (8, 9)
    )
    if not served:
        return scaled_linear_definition(q, q_scale, weight_q, weight_scale, bias, out_dtype)
    rows = q.reshape(-1, q.shape[-1]).contiguous()
    if not rows.shape[0]:
        return q.new_empty((*q.shape[:-1], weight_q.shape[0]), dtype=out_dtype)

    def multiply(bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(
            rows,
            weight_q.contiguous().t(),
            scale_a=q_scale.reshape(-1, 1),
            scale_b=weight_scale.reshape(1, -1),
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=True,
        )

    try:
        out = multiply(bias)
    except RuntimeError as error:
        if bias is None or "NOT_SUPPORTED" not in str(error):
            raise
        out = multiply(None).add_(bias)  # cuBLASLt refuses a bias for some shapes; this rounds once more
    return out.view(*q.shape[:-1], weight_q.shape[0])


def _norm_modulate_cuda(x, weight, scale_table, shift_table, index, eps):
    if not _norm_served(x, weight, index, scale_table, shift_table):
        return norm_modulate_definition(x, weight, scale_table, shift_table, index, eps)
    return launch("norm", "norm_modulate", x, weight, scale_table, shift_table, index, eps)


def _norm_modulate_quantize_cuda(x, weight, scale_table, shift_table, index, eps):
    if not _norm_served(x, weight, index, scale_table, shift_table):
        return norm_modulate_quantize_definition(x, weight, scale_table, shift_table, index, eps)
    return launch("norm", "norm_modulate_quantize", x, weight, scale_table, shift_table, index, eps)


def _residual_served(residual, y, gate_table, weight, scale_table, shift_table, index) -> bool:
    # The norm reads hidden, which is fresh and aligned whatever y is: y's alignment costs speed only.
    return (
        residual.shape == y.shape
        and residual.dtype == y.dtype
        and _norm_served(y, weight, index, gate_table, scale_table, shift_table)
    )


def _gated_residual_cuda(residual, y, gate_table, index):
    args = (residual, y, gate_table, index)
    if not (
        residual.shape == y.shape
        and residual.dtype == y.dtype == gate_table.dtype
        and y.dtype in DTYPES
        and y.ndim >= 2
        and y.shape[-1] <= _NORM_MAX_COLUMNS
        and index.dtype == torch.int64
        and index.shape == y.shape[-2:-1]
        and gate_table.ndim == 2
        and gate_table.shape[1] == y.shape[-1]
    ):
        return gated_residual_definition(*args)
    return launch("norm", "gated_residual", *args)


def _residual_norm_modulate_cuda(residual, y, gate_table, weight, scale_table, shift_table, index, eps):
    args = (residual, y, gate_table, weight, scale_table, shift_table, index)
    if not _residual_served(*args):
        return residual_norm_modulate_definition(*args, eps)
    return launch("norm", "residual_norm_modulate", *args, eps)


def _residual_norm_modulate_quantize_cuda(residual, y, gate_table, weight, scale_table, shift_table, index, eps):
    args = (residual, y, gate_table, weight, scale_table, shift_table, index)
    if not _residual_served(*args):
        return residual_norm_modulate_quantize_definition(*args, eps)
    return launch("norm", "residual_norm_modulate_quantize", *args, eps)


def _norm_of_fresh_served(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether ATen norms a fresh float32 tensor of x's shape as vectors of four, and the kernel holds a row."""
    return (
        x.ndim >= 1
        and x.dtype in DTYPES
        and dtype in DTYPES
        and 0 < x.shape[-1] <= _NORM_MAX_COLUMNS
        and x.shape[-1] % 4 == 0
        and weight.dtype == torch.float32
        and weight.shape == x.shape[-1:]
        and not (weight.is_contiguous() and weight.data_ptr() % 16)
    )


def _wide_norm_served(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    # A float32 copy of 16-bit x is fresh and aligned whatever x is.
    misaligned = x.dtype == torch.float32 and x.is_contiguous() and x.data_ptr() % 16
    return _norm_of_fresh_served(x, weight, dtype) and not misaligned


def _scaled_residual_served(residual: Tensor, y: Tensor, scale: Tensor) -> bool:
    return (
        residual.shape == y.shape
        and residual.dtype in DTYPES
        and y.dtype in DTYPES
        and y.ndim >= 1
        and 0 < y.shape[-1] <= _NORM_MAX_COLUMNS
        and scale.dtype == torch.float32
        and scale.shape == y.shape[-1:]
    )


def _scaled_residual_cuda(residual, y, scale):
    if not _scaled_residual_served(residual, y, scale):
        return scaled_residual_definition(residual, y, scale)
    return launch("wide_norm", "scaled_residual", residual, y, scale)


def _wide_norm_cuda(x, weight, eps, dtype):
    if not _wide_norm_served(x, weight, dtype):
        return wide_norm_definition(x, weight, eps, dtype)
    return launch("wide_norm", "wide_norm", x, weight, eps, dtype)


def _wide_norm_quantize_cuda(x, weight, eps, dtype):
    if not _wide_norm_served(x, weight, dtype):
        return wide_norm_quantize_definition(x, weight, eps, dtype)
    return launch("wide_norm", "wide_norm_quantize", x, weight, eps, dtype)


def _scaled_residual_norm_cuda(residual, y, scale, weight, eps, dtype):
    args = (residual, y, scale, weight, eps, dtype)
    if not (_scaled_residual_served(residual, y, scale) and _norm_of_fresh_served(y, weight, dtype)):
        return scaled_residual_norm_definition(*args)
    return launch("wide_norm", "scaled_residual_norm", *args)


def _scaled_residual_norm_quantize_cuda(residual, y, scale, weight, eps, dtype):
    args = (residual, y, scale, weight, eps, dtype)
    if not (_scaled_residual_served(residual, y, scale) and _norm_of_fresh_served(y, weight, dtype)):
        return scaled_residual_norm_quantize_definition(*args)
    return launch("wide_norm", "scaled_residual_norm_quantize", *args)


def _swiglu_cuda(x):
    if x.dtype not in DTYPES or x.shape[-1] % 2:
        return swiglu_definition(x)
    return launch("swiglu", "swiglu", x)


def _swiglu_quantize_cuda(x):
    if x.dtype not in DTYPES or x.shape[-1] % 2 or not 0 < x.shape[-1] // 2 <= 32768:
        return swiglu_quantize_definition(x)
    return launch("swiglu", "swiglu_quantize", x)


def _head_norm_rope_cuda(x, weight, cos, sin, eps):
    if not _rope_served(x, weight, cos, sin):
        return head_norm_rope_definition(x, weight, cos, sin, eps)
    return launch("rope", "head_norm_rope", x, weight, cos, sin, eps)


def _unweighted_norm_rope_cuda(x, cos, sin, eps):
    if not _unweighted_rope_served(x, cos, sin):
        return unweighted_norm_rope_definition(x, cos, sin, eps)
    return launch("rope", "unweighted_norm_rope", x, cos, sin, eps)


def _head_norm_rope_quantize_cuda(x, weight, cos, sin, head_scale, eps):
    fits = head_scale.dtype == torch.float32 and head_scale.shape == x.shape[-2:-1]
    if not (fits and _rope_served(x, weight, cos, sin)):
        return head_norm_rope_quantize_definition(x, weight, cos, sin, head_scale, eps)
    return launch("rope", "head_norm_rope_quantize", x, weight, cos, sin, head_scale, eps)


def _resampling_served(x: Tensor, ndim: int, taps: Tensor, *per_channel: Tensor) -> bool:
    return (
        x.ndim == ndim
        and all(t.dtype == torch.float32 for t in (x, taps, *per_channel))
        and taps.shape == (12,)
        and all(t.shape == x.shape[1:2] for t in per_channel)
        and x.numel() > 0
    )


def _upsample_snake_cuda(x, taps, frequency, magnitude):
    if not _resampling_served(x, 3, taps, frequency, magnitude):
        return upsample_snake_definition(x, taps, frequency, magnitude)
    return launch("resample", "upsample_snake", x, taps, frequency, magnitude)


def _downsample_cuda(x, taps):
    if not _resampling_served(x, 4, taps) or x.shape[2] != 2:
        return downsample_definition(x, taps)
    return launch("resample", "downsample", x, taps)


# --- registration ----------------------------------------------------------------------------------------------

DEFINITIONS: dict[str, Callable] = {}
OPERATORS: dict[str, Any] = {}
kernel_names: dict[str, str] = {}
_LIBRARY = torch.library.Library("h3opt", "DEF")


def register_op(
    name: str,
    schema: str,
    definition: Callable,
    cuda: Callable,
    fake: Callable,
    kernel: str | None,
    cpu: Callable | None = None,
    version: int = 1,
) -> Any:
    """Define `h3opt::{name}_v{version}`: on the CPU its definition, unless `cpu` is given; returns the op."""
    versioned = f"{name}_v{version}"
    _LIBRARY.define(versioned + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(versioned, cpu or definition, "CPU")
    _LIBRARY.impl(versioned, cuda, "CUDA")
    torch.library.register_fake(f"h3opt::{versioned}", fake, lib=_LIBRARY)
    DEFINITIONS[name] = definition
    OPERATORS[name] = getattr(torch.ops.h3opt, versioned).default
    if kernel is not None:
        kernel_names[name] = kernel
    return OPERATORS[name]


_NORM = "Tensor weight, Tensor scale_table, Tensor shift_table, Tensor index, float eps)"
_WIDE_NORM = "Tensor weight, float eps, ScalarType dtype)"
_GATED = "(Tensor residual, Tensor y, Tensor gate_table, " + _NORM

quantize_rows = register_op(
    "quantize_rows",
    "(Tensor x) -> (Tensor, Tensor)",
    quantize_rows_definition,
    _quantize_rows_cuda,
    _quantize_rows_fake,
    "quantize_rows_kernel",
    version=2,
)
scaled_linear = register_op(
    "scaled_linear",
    "(Tensor q, Tensor q_scale, Tensor weight_q, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
    scaled_linear_definition,
    _scaled_linear_cuda,
    _scaled_linear_fake,
    None,
)
norm_modulate = register_op(
    "norm_modulate",
    f"(Tensor x, {_NORM} -> Tensor",
    norm_modulate_definition,
    _norm_modulate_cuda,
    _norm_modulate_fake,
    "norm_modulate_kernel",
)
norm_modulate_quantize = register_op(
    "norm_modulate_quantize",
    f"(Tensor x, {_NORM} -> (Tensor, Tensor)",
    norm_modulate_quantize_definition,
    _norm_modulate_quantize_cuda,
    _norm_modulate_quantize_fake,
    "norm_modulate_quantize_kernel",
    version=2,
)
gated_residual = register_op(
    "gated_residual",
    "(Tensor residual, Tensor y, Tensor gate_table, Tensor index) -> Tensor",
    gated_residual_definition,
    _gated_residual_cuda,
    _gated_residual_fake,
    "gated_residual_kernel",
)
residual_norm_modulate = register_op(
    "residual_norm_modulate",
    f"{_GATED} -> (Tensor, Tensor)",
    residual_norm_modulate_definition,
    _residual_norm_modulate_cuda,
    _residual_norm_modulate_fake,
    "residual_norm_modulate_kernel",
)
residual_norm_modulate_quantize = register_op(
    "residual_norm_modulate_quantize",
    f"{_GATED} -> (Tensor, Tensor, Tensor)",
    residual_norm_modulate_quantize_definition,
    _residual_norm_modulate_quantize_cuda,
    _residual_norm_modulate_quantize_fake,
    "residual_norm_modulate_quantize_kernel",
    version=2,
)
scaled_residual = register_op(
    "scaled_residual",
    "(Tensor residual, Tensor y, Tensor scale) -> Tensor",
    scaled_residual_definition,
    _scaled_residual_cuda,
    _scaled_residual_fake,
    "scaled_residual_kernel",
)
wide_norm = register_op(
    "wide_norm",
    f"(Tensor x, {_WIDE_NORM} -> Tensor",
    wide_norm_definition,
    _wide_norm_cuda,
    _wide_norm_fake,
    "wide_norm_kernel",
)
wide_norm_quantize = register_op(
    "wide_norm_quantize",
    f"(Tensor x, {_WIDE_NORM} -> (Tensor, Tensor)",
    wide_norm_quantize_definition,
    _wide_norm_quantize_cuda,
    _wide_norm_quantize_fake,
    "wide_norm_quantize_kernel",
    version=2,
)
scaled_residual_norm = register_op(
    "scaled_residual_norm",
    f"(Tensor residual, Tensor y, Tensor scale, {_WIDE_NORM} -> (Tensor, Tensor)",
    scaled_residual_norm_definition,
    _scaled_residual_norm_cuda,
    _scaled_residual_norm_fake,
    "scaled_residual_norm_kernel",
)
scaled_residual_norm_quantize = register_op(
    "scaled_residual_norm_quantize",
    f"(Tensor residual, Tensor y, Tensor scale, {_WIDE_NORM} -> (Tensor, Tensor, Tensor)",
    scaled_residual_norm_quantize_definition,
    _scaled_residual_norm_quantize_cuda,
    _scaled_residual_norm_quantize_fake,
    "scaled_residual_norm_quantize_kernel",
    version=2,
)
swiglu = register_op("swiglu", "(Tensor x) -> Tensor", swiglu_definition, _swiglu_cuda, _swiglu_fake, "swiglu_kernel")
swiglu_quantize = register_op(
    "swiglu_quantize",
    "(Tensor x) -> (Tensor, Tensor)",
    swiglu_quantize_definition,
    _swiglu_quantize_cuda,
    _swiglu_quantize_fake,
    "swiglu_quantize_kernel",
    version=2,
)
head_norm_rope = register_op(
    "head_norm_rope",
    "(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor",
    head_norm_rope_definition,
    _head_norm_rope_cuda,
    _head_norm_rope_fake,
    "head_norm_rope_kernel",
)
unweighted_norm_rope = register_op(
    "unweighted_norm_rope",
    "(Tensor x, Tensor cos, Tensor sin, float eps) -> Tensor",
    unweighted_norm_rope_definition,
    _unweighted_norm_rope_cuda,
    _unweighted_norm_rope_fake,
    "unweighted_norm_rope_kernel",
)
head_norm_rope_quantize = register_op(
    "head_norm_rope_quantize",
    "(Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor head_scale, float eps) -> Tensor",
    head_norm_rope_quantize_definition,
    _head_norm_rope_quantize_cuda,
    _head_norm_rope_quantize_fake,
    "head_norm_rope_quantize_kernel",
)
upsample_snake = register_op(
    "upsample_snake",
    "(Tensor x, Tensor taps, Tensor frequency, Tensor magnitude) -> Tensor",
    upsample_snake_definition,
    _upsample_snake_cuda,
    _upsample_snake_fake,
    "upsample_snake_kernel",
)
downsample = register_op(
    "downsample",
    "(Tensor x, Tensor taps) -> Tensor",
    downsample_definition,
    _downsample_cuda,
    _downsample_fake,
    "downsample_kernel",
)
