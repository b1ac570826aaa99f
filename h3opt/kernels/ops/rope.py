"""Per-head RMSNorm and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from h3opt.kernels.ops.attention import hadamard_definition
from h3opt.kernels.ops.norm import norm_is_vectorized
from h3opt.kernels.ops.registry import DTYPES, E4M3, E4M3_MAX, launch, promoted_dtype, register_op


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
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, head_scale: Tensor, eps: float, rotate: bool
) -> Tensor:
    """`head_norm_rope` times a static scale per head, clamped to +-448 and cast to e4m3 (NaN stays NaN).

    With rotate, `attention.hadamard` of the rotated heads is cast instead. head_scale float32 [heads] multiplies: the
    attention's descale is its reciprocal. -> e4m3 of x's shape.
    """
    out = head_norm_rope_definition(x, weight, cos, sin, eps)
    wide = (hadamard_definition(out) if rotate else out).float() * head_scale[:, None]
    return wide.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).contiguous()


def _head_norm_rope_fake(x, weight, cos, sin, eps):
    return x.new_empty(x.shape, dtype=promoted_dtype(x, weight))


def _unweighted_norm_rope_fake(x, cos, sin, eps):
    return x.new_empty(x.shape)


def _head_norm_rope_quantize_fake(x, weight, cos, sin, head_scale, eps, rotate):
    return x.new_empty(x.shape, dtype=E4M3)


def _rope_served(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        x.ndim >= 3
        and x.shape[-1] <= 128
        and norm_is_vectorized(x, weight)
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


def _head_norm_rope_cuda(x, weight, cos, sin, eps):
    if not _rope_served(x, weight, cos, sin):
        return head_norm_rope_definition(x, weight, cos, sin, eps)
    return launch("rope", "head_norm_rope", x, weight, cos, sin, eps)


def _unweighted_norm_rope_cuda(x, cos, sin, eps):
    if not _unweighted_rope_served(x, cos, sin):
        return unweighted_norm_rope_definition(x, cos, sin, eps)
    return launch("rope", "unweighted_norm_rope", x, cos, sin, eps)


def _head_norm_rope_quantize_cuda(x, weight, cos, sin, head_scale, eps, rotate):
    fits = head_scale.dtype == torch.float32 and head_scale.shape == x.shape[-2:-1]
    rotates = not rotate or x.shape[-1].bit_count() == 1
    if not (fits and rotates and _rope_served(x, weight, cos, sin)):
        return head_norm_rope_quantize_definition(x, weight, cos, sin, head_scale, eps, rotate)
    return launch("rope", "head_norm_rope_quantize", x, weight, cos, sin, head_scale, eps, rotate)


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
    "(Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor head_scale, float eps, bool rotate) -> Tensor",
    head_norm_rope_quantize_definition,
    _head_norm_rope_quantize_cuda,
    _head_norm_rope_quantize_fake,
    "head_norm_rope_quantize_kernel",
    version=2,
)
