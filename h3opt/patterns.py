"""Chains of operators that several passes look for, as MiniMax-H3 spells them, and the conditions they share."""

from __future__ import annotations

from typing import Any

import torch

from h3opt.rewrite import Match

aten = torch.ops.aten


def modulated_norm(x: Any, shape: Any, weight: Any, eps: Any, scale: Any, shift: Any, index: Any) -> Any:
    """RMSNorm, then one row of the AdaLN tables per token: ``norm(x) · (1 + scale[index]) + shift[index]``."""
    normed = aten.rms_norm(x, shape, weight, eps)
    return normed * (1.0 + aten.index_select(scale, 0, index)) + aten.index_select(shift, 0, index)


def gated_residual(residual: Any, y: Any, gate: Any, index: Any) -> Any:
    """``residual + gate[index] · y``."""
    return residual + aten.index_select(gate, 0, index) * y


def swiglu(x: Any, dim: Any, middle: Any, end: Any) -> Any:
    """``first · silu(second)`` for the halves of ``x``; the sliced dimension and bounds are literals."""
    return aten.slice.Tensor(x, dim, 0, middle) * aten.silu(aten.slice.Tensor(x, dim, middle, end))


def tables_line_up(match: Match, *per_token: str) -> str | None:
    """Why a modulation cannot be fused: mixed dtypes, a norm over more than channels, an index that broadcasts.

    Args:
        match: binds ``index``, and to each name in ``per_token`` a ``[..., tokens, channels]`` tensor or a
            ``[rows, channels]`` table; ``shape`` if there is a norm.
        per_token: the tensors that must share a dtype; the first is indexed per token.
    """
    missing = [name for name in per_token if match.tensor(name) is None]
    if missing:
        return f"{missing[0]} is no tensor"
    if len(match.dtypes(*per_token)) != 1:
        return f"{', '.join(per_token)} have different dtypes: {sorted(map(str, match.dtypes(*per_token)))}"
    if not next(iter(match.dtypes(*per_token))).is_floating_point:
        return f"{per_token[0]} is not real floating point"
    x, index = match.tensor(per_token[0]), match.tensor("index")
    if x is None or index is None or x.ndim < 2 or index.ndim != 1:
        return f"{per_token[0]} is not [..., tokens, channels] with one index per token"
    if str(x.shape[-2]) != str(index.shape[0]):
        return f"the index has {index.shape[0]} entries for {x.shape[-2]} tokens"
    if "shape" in match.bound and list(match.literal("shape")) != [x.shape[-1]]:
        return f"the norm runs over {list(match.literal('shape'))}, not over the last dimension alone"
    for name in per_token[1:]:
        other = match.tensor(name)
        if other is None or str(other.shape[-1]) != str(x.shape[-1]):
            return f"{name} does not have the channels of {per_token[0]}"
        if name in ("scale", "shift", "gate") and other.ndim != 2:
            return f"{name} is not a [rows, channels] table"
        if name == "y" and str(other.shape) != str(x.shape):
            return f"y is broadcast to the shape of {per_token[0]}"
    return None


def halves_of_channels(match: Match) -> str | None:
    """Why a product of two slices is not a SwiGLU: not the last dimension, or not its two halves."""
    x = match.tensor("x")
    if x is None or match.literal("dim") != x.ndim - 1:
        return "the slices are not along the last dimension"
    if not all(isinstance(match.literal(bound), int) for bound in ("middle", "end")):
        return "the slices have bounds that are not known"
    if match.literal("end") != x.shape[-1] or match.literal("middle") * 2 != x.shape[-1]:
        return f"the slices are not the two halves of {x.shape[-1]} channels"
    return None
