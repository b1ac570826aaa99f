"""Attention operators: FP8 attention and bf16 attention, each from the library that the caller names.

A library is a *backend*: what is installed and what this GPU can run differs, so :func:`missing` says in words why a
backend cannot be used, and a pass declines with that. Nothing falls back to another backend by itself.

All take ``[batch, tokens, heads, head_dim]``, the layout projections write, so nothing is transposed in between.

Hopper's FP8 tensor cores keep about 14 bits of a sum: over many thousand terms of one sign, the sum stops growing. FP8
attention therefore works on *chunks* of keys: V enters as what differs from the mean of its chunk, each chunk is summed
alone, and the partial results are merged in float32 through their log-sum-exp, where the means are added.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3opt.device import Device
from h3opt.errors import DeviceError
from h3opt.kernels.ops import hopper_attention
from h3opt.kernels.ops.definition_trials import ATTENTION_CHECK, FP8_ATTENTION_CHECK
from h3opt.kernels.ops.registry import DTYPES, E4M3, E4M3_MAX, SCALE_AMAX_MIN, launch, register_op

PROBABILITY_SCALE = 256.0
"""Probabilities are at most 1: times 2⁸ they use e4m3's range, as FlashAttention-3 and cuDNN have it too."""


FP8_BACKENDS = ("hopper", "fa3", "cudnn", "triton")


BF16_BACKENDS = ("fa3", "cudnn", "flash")


CHUNK = 2464
"""Keys that FP8 tensor cores sum before float32 takes over: 11 of FlashAttention-3's blocks of 224 keys."""


ALL_KEYS = 1 << 30
"""A chunk that holds all keys: the hopper kernel adds up in float32 by itself, so it needs none."""


VALUE_ROWS = 32
"""Tokens whose sums `quantize_values` keeps apart until the end of a piece: part of the definition's order of sums."""


VALUE_PIECE = 1024
"""Tokens of a piece of a chunk; pieces are summed apart, so that a long chunk is work for the whole GPU."""


PARTIAL_BYTES = 1 << 30
"""Memory for partial results of chunks: query rows are processed in blocks that stay below it."""


_SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


_PACKAGES = {"fa3": ("fa3_fwd_interface", "fa3-fwd")}


_QUERY_ROWS = 1024


def missing(backend: str, device: Device, fp8: bool) -> str | None:
    """Why ``backend`` cannot be used on ``device``; ``None`` if it can.

    On the CPU every FP8 backend is emulated by one definition, so none is missing there.
    """
    if device.type == "cpu":
        return None if fp8 or backend == "flash" else f"{backend} attention needs a CUDA device"
    if backend == "fa3" and device.capability[0] != 9:
        return f"FlashAttention-3 needs Hopper (SM90), and {device.name} is SM{device.capability[0]}"
    if fp8 and device.capability < (8, 9):
        return f"{device.name} has no FP8; SM89 or newer does"
    if fp8 and backend == "cudnn":
        return "cuDNN's FP8 attention sums all keys in the tensor cores, which is not accurate; fa3 and triton are"
    if backend == "hopper":
        return hopper_attention.missing(device)
    module, package = _PACKAGES.get(backend, ("torch", "torch"))
    if (backend == "fa3" or fp8) and importlib.util.find_spec(module) is None:
        return f"{backend} attention needs the package {package}; run `pip install {package}`"
    return None


def default_chunk(backend: str) -> int:
    """Keys of a chunk for ``backend``: all where the backend sums accurately over any number of keys."""
    return ALL_KEYS if backend == "hopper" else CHUNK


def norm_head_scale_definition(x: Tensor, weight: Tensor) -> Tensor:
    """What to multiply RMS-normed and rotated heads by so that none can leave e4m3: ``448 / (√D · max|weight|)``.

    x [..., heads, D] gives the number of heads only; weight [D] is that of the norm -> float32 [heads]. RMSNorm bounds
    a head's length by √D before the weight, and a rotation keeps the length of each pair: no data has to be seen. No
    entry exceeds the length of its head, so the same bound holds after `hadamard`, which keeps that length as well.
    """
    heads, head_dim = x.shape[-2:]
    bound = torch.linalg.vector_norm(weight.float(), float("inf")) * head_dim**0.5
    return (E4M3_MAX / bound.clamp(min=SCALE_AMAX_MIN)).expand(heads).contiguous()


def dynamic_head_scale_definition(x: Tensor, per_head: bool) -> Tensor:
    """``448 / amax|x|`` for each head, or one for all: x [batch, tokens, heads, D] -> float32 [heads].

    NaN and infinities are left out: one bad token must not take the scale of all others.
    """
    if not x.numel():
        return x.new_ones(x.shape[2:3], dtype=torch.float32)
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    return scale_from(torch.linalg.vector_norm(finite, float("inf"), dim=(0, 1, 3)).float(), per_head)


def quantize_heads_definition(x: Tensor, head_scale: Tensor) -> Tensor:
    """x [..., heads, D] times head_scale float32 [heads], clamped to ±448 (infinities too), as e4m3; NaN stays NaN."""
    return (x.float() * head_scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).contiguous()


def hadamard_definition(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of each head: x [..., D], D a power of two -> the same shape and dtype.

    Float32 butterflies of channels at distance 1, 2, 4, ..., then one product with D^-½ and one rounding. Applied to
    Q and K alike it leaves their products unchanged, and it spreads a channel that is larger than the rest over all.
    """
    width = x.shape[-1]
    if width & (width - 1) or not width:
        raise DeviceError(f"A Hadamard transform needs a power of two, not {width} channels. Turn the rotation off.")
    wide, step = x.float(), 1
    while step < width:
        first, second = wide.unflatten(-1, (width // (2 * step), 2, step)).unbind(-2)
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return (wide * torch.full((), width**-0.5, device=x.device)).to(x.dtype).contiguous()


def quantize_values_definition(v: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """V minus the mean of its chunk of keys, as e4m3 with one scale per chunk and head.

    v [batch, tokens, heads, D]; chunk c holds the tokens from ``c · chunk`` on, the last one what is left. Returns the
    codes, e4m3 of v's shape, the scale that they were multiplied by (448 over the largest magnitude), float32 [batch,
    chunks, heads], and the mean, float32 [batch, chunks, heads, D]. A channel with a NaN or an infinity has no finite
    mean, NaN among its codes, and no part in the scale: attention makes that channel NaN, and no other.

    The order of the sum is fixed: in each piece of 1024 tokens every 32nd token in sequence, then these 32 sums in
    halves; then the pieces in sequence.
    """
    batch, tokens, heads, width = v.shape
    chunks = -(-tokens // chunk)
    if not v.numel():
        scale = v.new_ones((batch, chunks, heads), dtype=torch.float32)
        return v.new_empty(v.shape, dtype=E4M3), scale, v.new_zeros((*scale.shape, width), dtype=torch.float32)
    length = min(chunk, tokens)
    wide = F.pad(v.float(), (0, 0, 0, 0, 0, chunks * length - tokens)).unflatten(1, (chunks, length))
    present = (torch.arange(chunks * length, device=v.device) < tokens).view(chunks, length, 1, 1)
    pieces = F.pad(wide, (0, 0, 0, 0, 0, -length % VALUE_PIECE)).unflatten(
        2, (-1, VALUE_PIECE // VALUE_ROWS, VALUE_ROWS)
    )
    sums = torch.zeros_like(pieces[:, :, :, 0])
    for tile in pieces.unbind(3):
        sums = sums + tile
    while sums.shape[3] > 1:
        first, second = sums.chunk(2, dim=3)
        sums = first + second
    total = torch.zeros_like(sums[:, :, 0, 0])
    for piece in sums[:, :, :, 0].unbind(2):
        total = total + piece
    mean = total / present.sum(1).float()
    largest = wide.masked_fill(~present, -torch.inf).amax(2)
    smallest = wide.masked_fill(~present, torch.inf).amin(2)
    spread = torch.maximum(largest - mean, mean - smallest)
    spread = torch.where(spread.isfinite(), spread, torch.zeros_like(spread)).amax(-1).clamp(min=SCALE_AMAX_MIN)
    scale = torch.full_like(spread, E4M3_MAX) / spread
    codes = ((wide - mean[:, :, None]) * scale[:, :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.flatten(1, 2)[:, :tokens].contiguous(), scale, mean


def merge_chunks_definition(partial: Tensor, lse: Tensor, mean: Tensor) -> Tensor:
    """Attention over all keys from attention over each chunk of them, in float32.

    partial [chunks, batch, tokens, heads, D] on V minus ``mean`` [batch, chunks, heads, D], with the logarithm of each
    chunk's sum of exponentials, lse float32 [chunks, batch, heads, tokens] -> float32 [batch, tokens, heads, D].
    """
    weight = lse.softmax(0).transpose(2, 3)[..., None]
    return (weight * (partial.float() + mean.transpose(0, 1)[:, :, None])).sum(0)


def fp8_attention_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    chunk: int,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """Softmax attention on e4m3 operands: q [batch, queries, heads, D], k and v [batch, tokens, heads, D] -> q's shape.

    q and k were multiplied by q_scale and k_scale, float32 [heads]; v, v_scale and v_mean are of `quantize_values` with
    the same ``chunk``. Logits and sums are float32. Probabilities are taken relative to the largest of their row and
    chunk, times 256, and rounded to e4m3 before they meet v; the row's sum is that of the unrounded ones. Libraries do
    the same in blocks with a running maximum: close to this, not equal to it.
    """
    query, key = ((one.float() / scale[:, None]).transpose(1, 2) for one, scale in ((q, q_scale), (k, k_scale)))
    value, descale = v.float().transpose(1, 2), 1.0 / v_scale[..., None, None]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for start in range(0, query.shape[2], _QUERY_ROWS):  # a whole [tokens, tokens] would not fit for long sequences
        rows, partials, sums = query[:, :, start : start + _QUERY_ROWS], [], []
        for number in range(v_scale.shape[1]):
            keys = slice(number * chunk, (number + 1) * chunk)
            logits = rows @ key[:, :, keys].transpose(-1, -2) * q.shape[-1] ** -0.5
            highest = logits.amax(-1, keepdim=True)
            weights = (logits - highest).exp()
            rounded = (weights * PROBABILITY_SCALE).to(E4M3).float()
            total = weights.sum(-1, keepdim=True)
            partial = (rounded @ value[:, :, keys]) / (total * PROBABILITY_SCALE) * descale[:, number]
            partials.append(partial.transpose(1, 2))
            sums.append((highest + total.log())[..., 0])
        if partials:
            merged = merge_chunks_definition(torch.stack(partials), torch.stack(sums), v_mean)
            out[:, start : start + _QUERY_ROWS] = merged
    return out.to(out_dtype)


def fp8_attention_quantized_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    chunk: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """As ``fp8_attention``, rounded to e4m3 with one scale: (e4m3 [batch, queries, heads·D], float32 [.., 1]).

    An output is an average of v's rows, so what no v exceeds, no output exceeds: the scale needs no second pass.
    """
    operands = (q, k, v, q_scale, k_scale, v_scale, v_mean, chunk)
    out = fp8_attention_definition(*operands, torch.float32, backend).flatten(2)
    scale = _output_scale(v_scale, v_mean)
    quantized = (out * scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return quantized, (1.0 / scale).expand(*out.shape[:2], 1).contiguous()


def _output_scale(v_scale: Tensor, v_mean: Tensor) -> Tensor:
    """448 over the largest magnitude of V that its codes can say; means that are not finite left out: float32 []."""
    if not v_mean.numel():
        return v_mean.new_ones(())
    means = torch.where(v_mean.isfinite(), v_mean, torch.zeros_like(v_mean)).abs().amax(-1)
    return E4M3_MAX / (means + E4M3_MAX / v_scale).amax().clamp(min=SCALE_AMAX_MIN)


def attention_definition(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    """Softmax attention without a mask: q, k, v [batch, tokens, heads, D] -> contiguous, the same shape and dtype."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def scale_from(amax: Tensor, per_head: bool) -> Tensor:
    """``448 / amax`` of each head, or of the largest: float32 [heads] -> float32 [heads]."""
    if not per_head:
        amax = amax.amax().expand(amax.shape)
    return (E4M3_MAX / amax.clamp(min=SCALE_AMAX_MIN)).contiguous()


def _dynamic_head_scale_cuda(x: Tensor, per_head: bool) -> Tensor:
    if not x.numel() or x.dtype not in DTYPES:
        return dynamic_head_scale_definition(x, per_head)
    return scale_from(launch("quantize", "heads_amax", x), per_head)


def _quantize_heads_cuda(x: Tensor, head_scale: Tensor) -> Tensor:
    if x.ndim < 2 or not x.numel() or x.dtype not in DTYPES:
        return quantize_heads_definition(x, head_scale)
    return launch("quantize", "quantize_heads", x, head_scale)


def _hadamard_cuda(x: Tensor) -> Tensor:
    if not x.numel() or x.dtype not in DTYPES or x.ndim < 2 or x.shape[-1] not in (8, 16, 32, 64, 128):
        return hadamard_definition(x)
    return launch("rope", "hadamard", x)


def _quantize_values_cuda(v: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    if not v.numel() or v.dtype not in DTYPES:
        return quantize_values_definition(v, chunk)
    return launch("quantize", "quantize_values", v, chunk)


def _fp8_attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    chunk: int,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    _must_have(backend, q.device, fp8=True)
    out = q.new_empty(q.shape, dtype=out_dtype)
    if q.numel():
        _FP8[backend](q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, out, None)
    return out


def _fp8_attention_quantized_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    chunk: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _must_have(backend, q.device, fp8=True)
    scale, out = _output_scale(v_scale, v_mean), q.new_empty(q.shape, dtype=E4M3)
    if q.numel():
        _FP8[backend](q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, out, scale)
    return out.flatten(2), (1.0 / scale).expand(*q.shape[:2], 1).contiguous()


def _fp8_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    chunk: int,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    launch("attention", "fp8_attention", q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, out, out_scale)


def _fp8_attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    chunk: int,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    """h3opt's own kernel, which writes bf16; another result dtype is a cast of it."""
    if v_scale.shape[1] > 1:
        raise DeviceError(f"hopper attention takes all keys as one chunk, not {chunk}. Leave the option chunk out.")
    direct = out_scale is None and out.dtype == torch.bfloat16
    operands = (q, k, v, q_scale, k_scale, v_scale, v_mean)
    attended = hopper_attention.hopper_fp8_attention(*operands, out=out if direct else None)
    if out_scale is not None:
        out.copy_((attended.float() * out_scale).clamp(-E4M3_MAX, E4M3_MAX))
    elif not direct:
        out.copy_(attended)


def _fp8_attention_fa3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    chunk: int,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    """One call of FlashAttention-3 for each chunk of keys, then the merge, for a block of query rows at a time."""
    batch, tokens, heads, width = q.shape
    chunks, forward = v_scale.shape[1], _fa3_forward()
    q_descale, k_descale = ((1.0 / one).expand(batch, -1).contiguous() for one in (q_scale, k_scale))
    v_descale = (1.0 / v_scale).transpose(0, 1).contiguous()
    step = _query_block(tokens, chunks * batch * heads * (2 * width + 4), batch * heads, q.device)
    for start in range(0, tokens, step):
        rows, sums = q[:, start : start + step], []
        partial = q.new_empty((chunks, *rows.shape), dtype=torch.bfloat16)
        for number in range(chunks):
            keys = slice(number * chunk, (number + 1) * chunk)
            _, lse, *_ = forward(
                rows,
                k[:, keys],
                v[:, keys],
                out=partial[number],
                q_descale=q_descale,
                k_descale=k_descale,
                v_descale=v_descale[number],
                softmax_scale=width**-0.5,
                num_splits=1,
            )
            sums.append(lse)
        merged = out[:, start : start + step]
        launch("attention", "merge_chunks", partial, torch.stack(sums), v_mean, merged, out_scale)


def _query_block(tokens: int, bytes_per_row: int, tiles_per_row: int, device: torch.device) -> int:
    """Query rows at a time: as many as keep partial results below PARTIAL_BYTES, in whole waves of tiles of 128."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    wave = 128 * multiprocessors // math.gcd(multiprocessors, tiles_per_row)
    most = PARTIAL_BYTES // bytes_per_row
    unit = wave if most >= wave else 128
    return min(max(most // unit * unit, unit), tokens)


_FP8 = {"hopper": _fp8_attention_hopper, "fa3": _fp8_attention_fa3, "triton": _fp8_attention_triton}


def _attention_cuda(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    _must_have(backend, q.device, fp8=False)
    if backend == "fa3":
        out = _fa3()(q, k, v)
        return out[0] if isinstance(out, tuple) else out
    return _attention_sdpa(q, k, v, backend)


def _attention_sdpa(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))  # all fused kernels ask for it
    with sdpa_kernel(_SDPA[backend]):
        return attention_definition(q, k, v, backend)


def _must_have(backend: str, device: torch.device, fp8: bool) -> None:
    reason = missing(backend, Device.of(device), fp8)
    if reason is not None:
        raise DeviceError(f"{reason}. Or name another backend.")


@functools.cache
def _fa3() -> Any:
    return importlib.import_module("fa3_fwd_interface").flash_attn_func


@functools.cache
def _fa3_forward() -> Any:
    """The operator below `flash_attn_func`: it writes into a given result and returns the log-sum-exp."""
    importlib.import_module("fa3_fwd_interface")
    return torch.ops.fa3_fwd.fwd.default


def _norm_head_scale_fake(x, weight):
    return x.new_empty(x.shape[-2:-1], dtype=torch.float32)


def _dynamic_head_scale_fake(x, per_head):
    return x.new_empty(x.shape[2:3], dtype=torch.float32)


def _quantize_heads_fake(x, head_scale):
    return x.new_empty(x.shape, dtype=E4M3)


def _hadamard_fake(x):
    return x.new_empty(x.shape)


def _quantize_values_fake(v, chunk):
    batch, tokens, heads, width = v.shape
    chunks = (tokens + chunk - 1) // chunk
    scale = v.new_empty((batch, chunks, heads), dtype=torch.float32)
    return v.new_empty(v.shape, dtype=E4M3), scale, v.new_empty((batch, chunks, heads, width), dtype=torch.float32)


def _fp8_attention_fake(q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, out_dtype, backend):
    return q.new_empty(q.shape, dtype=out_dtype)


def _fp8_attention_quantized_fake(q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, backend):
    batch, tokens, heads, width = q.shape
    return q.new_empty((batch, tokens, heads * width)), q.new_empty((batch, tokens, 1), dtype=torch.float32)


def _attention_fake(q, k, v, backend):
    return q.new_empty(q.shape)


_OPERANDS = (
    "(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor v_mean, SymInt chunk, "
)


norm_head_scale = register_op(
    "norm_head_scale",
    "(Tensor x, Tensor weight) -> Tensor",
    norm_head_scale_definition,
    norm_head_scale_definition,
    _norm_head_scale_fake,
    None,
)


dynamic_head_scale = register_op(
    "dynamic_head_scale",
    "(Tensor x, bool per_head) -> Tensor",
    dynamic_head_scale_definition,
    _dynamic_head_scale_cuda,
    _dynamic_head_scale_fake,
    "heads_amax_kernel",
    version=2,
)


quantize_heads = register_op(
    "quantize_heads",
    "(Tensor x, Tensor head_scale) -> Tensor",
    quantize_heads_definition,
    _quantize_heads_cuda,
    _quantize_heads_fake,
    "quantize_heads_kernel",
)


hadamard = register_op(
    "hadamard",
    "(Tensor x) -> Tensor",
    hadamard_definition,
    _hadamard_cuda,
    _hadamard_fake,
    "hadamard_kernel",
)


quantize_values = register_op(
    "quantize_values",
    "(Tensor v, SymInt chunk) -> (Tensor, Tensor, Tensor)",
    quantize_values_definition,
    _quantize_values_cuda,
    _quantize_values_fake,
    "quantize_values_kernel",
)


fp8_attention = register_op(
    "fp8_attention",
    _OPERANDS + "ScalarType out_dtype, str backend) -> Tensor",
    fp8_attention_definition,
    _fp8_attention_cuda,
    _fp8_attention_fake,
    None,
    version=2,
    check=FP8_ATTENTION_CHECK,
)


fp8_attention_quantized = register_op(
    "fp8_attention_quantized",
    _OPERANDS + "str backend) -> (Tensor, Tensor)",
    fp8_attention_quantized_definition,
    _fp8_attention_quantized_cuda,
    _fp8_attention_quantized_fake,
    None,
    version=2,
    check=FP8_ATTENTION_CHECK,
)


attention = register_op(
    "attention",
    "(Tensor q, Tensor k, Tensor v, str backend) -> Tensor",
    attention_definition,
    _attention_cuda,
    _attention_fake,
    None,
    cpu=_attention_sdpa,
    check=ATTENTION_CHECK,
)
