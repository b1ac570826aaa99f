"""Patterns that several passes share: sequences of operators as MiniMax-H3 writes them.

The parameters of a pattern match tensors or literals (:class:`~h3opt.graph.matcher.Rule`): names such as ``shape``,
``eps``, ``dim`` and the bounds of slices stand for literals.
"""

from __future__ import annotations

from typing import Any

import torch

from h3opt.kernels import ops

aten = torch.ops.aten


def modulated_norm(x: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    """RMSNorm and AdaLN modulation by a table row per token: ``norm(x) · (1 + scale[index]) + shift[index]``."""
    normed = aten.rms_norm(x, shape, weight, eps)
    return normed * (1.0 + aten.index_select(scale, 0, index)) + aten.index_select(shift, 0, index)


def gated_residual(residual: Any, y: Any, gate: Any, index: Any) -> Any:
    """Gated residual sum: ``residual + gate[index] · y``."""
    return residual + aten.index_select(gate, 0, index) * y


def scaled_residual(residual: Any, y: Any, scale: Any) -> Any:
    """LayerScale and residual sum: ``residual + y · scale``, with a scale per channel."""
    return residual + y * scale


def widened_norm(x: Any, shape: Any, weight: Any, eps: Any, wide: Any, own: Any) -> Any:
    """RMSNorm of 16-bit data, computed in ``wide`` (float32) and rounded to the dtype ``own`` of the data."""
    return aten.to.dtype(aten.rms_norm(aten.to.dtype(x, wide), shape, weight, eps), own)


def narrowed_norm(x: Any, shape: Any, weight: Any, eps: Any, own: Any) -> Any:
    """RMSNorm of float32 data, rounded to the 16-bit dtype ``own``."""
    return aten.to.dtype(aten.rms_norm(x, shape, weight, eps), own)


def swiglu(x: Any, dim: Any, middle: Any, end: Any) -> Any:
    """SwiGLU of the halves of ``x``: ``first · silu(second)``."""
    return aten.slice.Tensor(x, dim, 0, middle) * aten.silu(aten.slice.Tensor(x, dim, middle, end))


def norm_rope(
    x: Any, shape: Any, weight: Any, eps: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any
) -> Any:
    """RMSNorm over each head of ``[batch, tokens, heads, head_dim]``, then :func:`rotate_half`."""
    return rotate_half(aten.rms_norm(x, shape, weight, eps), cos, sin, dim, half, rotary, end)


def rotate_half(normed: Any, cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any) -> Any:
    """Rotary embedding of the first ``rotary`` channels of each head, in the rotate-half layout."""
    rotated, passed = aten.slice.Tensor(normed, dim, 0, rotary), aten.slice.Tensor(normed, dim, rotary, end)
    first, second = aten.slice.Tensor(rotated, dim, 0, half), aten.slice.Tensor(rotated, dim, half, rotary)
    quarter_turn = aten.cat([aten.neg(second), first], dim)
    return aten.cat([rotated * cos + quarter_turn * sin, passed], dim)


def unmasked_attention(query: Any, key: Any, value: Any, swap: Any) -> Any:
    """Softmax attention over ``[batch, tokens, heads, head_dim]``; ``swap`` exchanges tokens and heads and back."""
    query, key, value = (aten.permute(tensor, swap) for tensor in (query, key, value))
    return aten.permute(aten.scaled_dot_product_attention(query, key, value), swap)


def per_token(angles: Any) -> Any:
    """View the angles ``[1, tokens, 1, rotary]`` that Q and K share as ``[tokens, rotary]``."""
    return aten.squeeze.dims(angles, [0, 2])


def quantized(activation: Any) -> tuple[Any, Any]:
    """Per-row FP8 quantization of an activation: codes and scales."""
    return results(ops.quantize_rows(activation), 2)


def results(output: Any, count: int) -> tuple[Any, ...]:
    """Take the results of an operator that returns ``count`` tensors: a traced value cannot be unpacked."""
    return tuple(output[number] for number in range(count))
