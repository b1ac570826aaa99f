"""Guards that several passes share: each returns why a matched site must be left unchanged, or ``None``."""

from __future__ import annotations

import torch

from h3opt.graph.matcher import Match
from h3opt.graph.nodes import value

_FLOATING_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def check_modulation(match: Match, *per_token: str) -> str | None:
    """Reject a modulation with mixed dtypes, a norm over more than channels, or an index that broadcasts.

    Args:
        match: binds ``index``, and to each name in ``per_token`` a ``[..., tokens, channels]`` tensor or a
            ``[rows, channels]`` table; ``shape`` if there is a norm.
        per_token: names of the tensors that must share a dtype; the index selects a table row for each token of the
            first.
    """
    missing = [name for name in per_token if match.tensor(name) is None]
    if missing:
        return f"{missing[0]} is no tensor"
    if len(match.dtypes(*per_token)) != 1:
        return f"{', '.join(per_token)} have different dtypes: {sorted(map(str, match.dtypes(*per_token)))}"
    if not next(iter(match.dtypes(*per_token))).is_floating_point:
        return f"{per_token[0]} is not real floating point"
    if (reason := check_contiguous(match)) is not None:
        return reason
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


def check_wide_norm(match: Match) -> str | None:
    """Reject a norm that is not computed in float32 over channels, with a weight and a contiguous result.

    ``match`` binds ``x`` (unless the norm reads a value computed inside the pattern), ``shape``, ``weight`` and, where
    the pattern casts, ``wide`` and ``own``.
    """
    weight = match.tensor("weight")
    if weight is None or weight.dtype != torch.float32:
        return "the norm has no float32 weight"
    if list(match.literal("shape")) != list(weight.shape) or weight.ndim != 1:
        return f"the norm runs over {list(match.literal('shape'))}, not over the last dimension alone"
    wide = match.bound.get("wide", torch.float32)
    dtypes = match.dtypes("x") if "x" in match.bound else {torch.float32}
    if wide != torch.float32 or ("wide" not in match.bound and dtypes != {torch.float32}):
        return f"the norm is computed in {wide if 'wide' in match.bound else next(iter(dtypes), None)}, not in float32"
    if not dtypes <= _FLOATING_DTYPES or match.bound.get("own", torch.float32) not in _FLOATING_DTYPES:
        return f"x is {next(iter(dtypes))} and its norm is rounded to {match.bound.get('own')}"
    return check_contiguous(match)


def check_layer_scale(match: Match) -> str | None:
    """Reject a sum that is not in float32 with an addend that has one scale per channel.

    ``match`` binds ``residual``, ``y`` and ``scale``.
    """
    residual, y, scale = (match.tensor(name) for name in ("residual", "y", "scale"))
    if residual is None or y is None or scale is None or str(residual.shape) != str(y.shape):
        return "residual and addend are not two tensors of one shape"
    if scale.ndim != 1 or y.ndim < 2 or str(scale.shape[0]) != str(y.shape[-1]):
        return f"the addend is scaled by {list(scale.shape)}, not by one number per channel"
    if scale.dtype != torch.float32 or not match.dtypes("residual", "y") <= _FLOATING_DTYPES:
        return f"{residual.dtype} + {y.dtype} · {scale.dtype} is not a sum in float32"
    return check_contiguous(match)


def check_contiguous(match: Match) -> str | None:
    """Reject a result that is not contiguous in the model: the result of a kernel is."""
    if any(out is not None and not out.is_contiguous() for out in map(value, match.outputs)):
        return "its result is not contiguous, as a kernel's is, and who reads it may sum in the order of memory"
    return None


def check_swiglu_halves(match: Match) -> str | None:
    """Reject a product of two slices that are not the two halves of the last dimension."""
    x = match.tensor("x")
    if x is None or match.literal("dim") != x.ndim - 1:
        return "the slices are not along the last dimension"
    if not all(isinstance(match.literal(bound), int) for bound in ("middle", "end")):
        return "the slices have bounds that are not known"
    if match.literal("end") != x.shape[-1] or match.literal("middle") * 2 != x.shape[-1]:
        return f"the slices are not the two halves of {x.shape[-1]} channels"
    return None


def check_head_norm_rope(match: Match) -> str | None:
    """Reject a norm and rotary embedding that are not per head, or that have no weight or mixed dtypes."""
    if match.tensor("weight") is None:
        return "the norm has no weight"
    reason = check_rope(match)
    if reason is None and len(match.dtypes("x", "weight", "cos", "sin")) != 1:
        reason = "heads, weight and angles have different dtypes"
    return reason


def check_rope(match: Match, per_sample: bool = False) -> str | None:
    """Reject a norm, slices or angles that do not fit ``[batch, tokens, heads, head_dim]``.

    Args:
        match: binds ``x``, ``cos``, ``sin`` and the literals of :func:`~h3opt.pass_api.patterns.rotate_half`.
        per_sample: whether angles may differ between the samples of a batch.
    """
    x, cos, sin = (match.tensor(name) for name in ("x", "cos", "sin"))
    if x is None or cos is None or sin is None or x.ndim != 4 or cos.ndim != 4:
        return "it is not [batch, tokens, heads, head_dim] with one angle per token and channel"
    half, rotary, end = (match.literal(name) for name in ("half", "rotary", "end"))
    head_dim = x.shape[-1]
    if match.literal("dim") != 3 or end != head_dim or 2 * half != rotary or list(match.literal("shape")) != [head_dim]:
        return f"norm, halves or rotary part do not fit a head of {head_dim} channels"
    expected = [1, x.shape[1], 1, rotary]
    allowed = {str(expected), str([x.shape[0], *expected[1:]])} if per_sample else {str(expected)}
    if str(list(cos.shape)) != str(list(sin.shape)) or str(list(cos.shape)) not in allowed:
        return f"there are angles {list(cos.shape)}, not {expected}"
    return None


def check_attention(match: Match, *names: str) -> str | None:
    """Reject attention in which Q, K and V, bound by ``names``, differ in tokens, heads or dtype."""
    tensors = [tensor for name in names if (tensor := match.tensor(name)) is not None and tensor.ndim == 4]
    if len(tensors) < len(names) or len({str(tensor.shape) for tensor in tensors}) != 1:
        return "Q, K and V are not [batch, tokens, heads, head_dim] of one shape"
    if len(match.dtypes(*names)) != 1:
        return "Q, K and V have different dtypes"
    if list(match.literal("swap")) != [0, 2, 1, 3]:
        return "what is swapped around attention is not tokens and heads"
    return None
