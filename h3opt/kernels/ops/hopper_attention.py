"""FP8 attention of our own for Hopper: V packed as tiles, then `cuda_kernels/fp8_attention_sm90.cu`.

Hopper's FP8 tensor cores keep about 14 bits of a sum. This kernel lets them sum 512 keys at most and adds those sums in
float32, so all keys are one chunk: V enters as what differs from its mean over all keys, and the mean is added to the
result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from h3opt.device import Device
from h3opt.errors import DeviceError
from h3opt.kernels.cuda_kernels.nvrtc import Kernel, RowsOfHeads
from h3opt.kernels.ops.registry import E4M3, launch

HEAD_DIM = 128


QUERIES = 192
"""Query rows of a block of threads: 64 for each of three groups of threads."""


KEYS = 128
"""Keys that a block of threads loads at a time."""


KERNEL = Kernel("fp8_attention_sm90.cu", "fp8_attention", "sm_90a", threads=512, shared_bytes=225_384)


def missing(device: Device) -> str | None:
    """Why :func:`hopper_fp8_attention` cannot run on ``device``; ``None`` if it can. Compiles the kernel once."""
    if device.capability != (9, 0):
        major, minor = device.capability
        return f"hopper attention needs Hopper (SM90), and {device.name} is SM{major}{minor}"
    return KERNEL.missing


def hopper_fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax attention on e4m3 codes: q [batch, queries, heads, 128], k and v [batch, keys, heads, 128] -> q's shape.

    The result is bf16. q and k were multiplied by q_scale and k_scale, float32 [heads]. v, v_scale [batch, 1, heads]
    and v_mean [batch, 1, heads, 128] are those of `quantize_values` with all keys as one chunk. What is added to the
    result is the mean over keys of v - codes / v_scale: the mean that was subtracted, and that of the rounding errors.
    Without the latter, a mean that is smaller than a rounding step would count twice.

    A NaN in a query stays in that row and head; a NaN in k makes the results of the head NaN, a NaN in v those of the
    channel of that head. ``out`` is a contiguous result to write into. The work is put on torch's current stream, and
    the host waits for nothing.

    Raises:
        DeviceError: operands of another dtype or shape, no keys, or a GPU or driver that cannot run the kernel.
        MissingDependencyError: the kernel cannot be compiled, because a package is missing.
    """
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    code, scale = (E4M3, (batch, keys, heads, HEAD_DIM)), (torch.float32, (heads,))
    _check("q", q, E4M3, (batch, queries, heads, HEAD_DIM))
    _check("k", k, *code)
    _check("v", v, *code)
    _check("q_scale", q_scale, *scale)
    _check("k_scale", k_scale, *scale)
    _check("v_scale", v_scale, torch.float32, (batch, 1, heads))
    _check("v_mean", v_mean, torch.float32, (batch, 1, heads, HEAD_DIM))
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    if not q.numel():
        return out
    if not keys:
        raise DeviceError("Attention over no keys has no value. Give k and v at least one token.")
    q, k, v_tiles = q.contiguous(), k.contiguous(), launch("attention_tiles", "value_tiles", v)
    v_mean = v_mean - (launch("attention_tiles", "code_sums", v) / keys)[:, None] / v_scale[..., None]
    floats = [operand.contiguous() for operand in (q_scale, k_scale, v_scale, v_mean)]
    grid = (-(-queries // QUERIES), heads, batch)
    KERNEL.launch(grid, RowsOfHeads(q, QUERIES), RowsOfHeads(k, KEYS), v_tiles, *floats, out, queries, keys)
    return out


def _check(name: str, operand: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse what the kernel would read past its end or misread: it takes pointers alone."""
    if operand.dtype != dtype or operand.shape != shape:
        found = f"{operand.dtype} {list(operand.shape)}"
        raise DeviceError(f"hopper attention takes {name} as {dtype} {list(shape)}, not {found}. Name another backend.")


def value_tiles_definition(v: Tensor) -> Tensor:
    """Tiles of 128 keys of v: codes [batch, keys, heads, 128] -> uint8 [batch, heads, tiles, 128, 128].

    Rows are channels, swizzled in pieces of 16 keys. Keys past the last one are zero. Within a piece, byte
    4·q + 2·b + e is key 8·b + 2·q + e (q < 4; b, e < 2): the order in which threads hold the probabilities that the
    tensor cores multiply these with.
    """
    codes = v.view(torch.uint8).permute(0, 2, 3, 1)
    channels = F.pad(codes, (0, -codes.shape[-1] % KEYS)).unflatten(-1, (-1, KEYS)).transpose(2, 3)
    keys = channels.unflatten(-1, (KEYS // 16, 2, 4, 2))  # [..., 16 keys, b, q, e]
    pieces = keys.transpose(-2, -3).flatten(-3)  # [..., channel, 8 pieces, 16]: piece p goes to p ^ (channel mod 8)
    source = torch.arange(8, device=v.device) ^ torch.arange(HEAD_DIM, device=v.device)[:, None] % 8
    return pieces.gather(-2, source[..., None].expand(pieces.shape)).flatten(-2)
