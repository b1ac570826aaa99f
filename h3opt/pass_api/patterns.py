"""Chains of operators that several passes look for, as MiniMax-H3 spells them."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def modulated_norm(x: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    """RMSNorm, then one row of the AdaLN tables per token: ``norm(x) · (1 + scale[index]) + shift[index]``."""
    normed = aten.rms_norm(x, shape, weight, eps)
    return normed * (1.0 + aten.index_select(scale, 0, index)) + aten.index_select(shift, 0, index)


def gated_residual(residual: Any, y: Any, gate: Any, index: Any) -> Any:
    """``residual + gate[index] · y``."""
    return residual + aten.index_select(gate, 0, index) * y


def widened_norm(x: Any, shape: Any, weight: Any, eps: Any, wide: Any, own: Any) -> Any:
    """RMSNorm in float32 of 16-bit data, rounded to 16 bits afterwards."""
    return aten.to.dtype(aten.rms_norm(aten.to.dtype(x, wide), shape, weight, eps), own)


def narrowed_norm(x: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    """RMSNorm of float32 data, rounded to 16 bits afterwards."""
    return aten.to.dtype(aten.rms_norm(x, shape, weight, eps), own)


def swiglu(x: Any, dim: Any, middle: Any, end: Any) -> Any:
    """``first · silu(second)`` for the halves of ``x``; the sliced dimension and bounds are literals."""
    return aten.slice.Tensor(x, dim, 0, middle) * aten.silu(aten.slice.Tensor(x, dim, middle, end))


def norm_rope(
    x: Any, shape: Any, weight: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any
) -> Any:
    """RMSNorm over each head of ``[batch, tokens, heads, head_dim]``, then rotate-half of its first channels."""
    return rotate_half(aten.rms_norm(x, shape, weight, eps), cos, sin, dim, half, rotary, end)


def rotate_half(normed: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any) -> Any:
    """Rotate-half of the first channels of each head."""
    turned, passed = aten.slice.Tensor(normed, dim, 0, rotary), aten.slice.Tensor(normed, dim, rotary, end)
    first, second = aten.slice.Tensor(turned, dim, 0, half), aten.slice.Tensor(turned, dim, half, rotary)
    quarter_turn = aten.cat([aten.neg(second), first], dim)
    return aten.cat([turned * cos + quarter_turn * sin, passed], dim)


def unmasked_attention(query: Any, key: Any, value: Any, swap: Any) -> Any:
    """Softmax attention over ``[batch, tokens, heads, head_dim]``, tokens and heads swapped around it."""
    query, key, value = (aten.permute(one, swap) for one in (query, key, value))
    return aten.permute(aten.scaled_dot_product_attention(query, key, value), swap)


def per_token(angles: Any) -> Any:
    """``[1, tokens, 1, rotary]``, as Q and K share it, → ``[tokens, rotary]``; a view."""
    return aten.squeeze.dims(angles, [0, 2])
