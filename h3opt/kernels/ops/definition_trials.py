"""Data on which the operators of libraries are held to their definitions: long sums in full, a few rows compared.

A library sums in its own order and with its own accumulator. What that costs shows at the length of the real sum only,
so operators run at the real number of keys or inputs; the definition is evaluated for sampled queries, rows and
outputs. Heads and rows are independent of one another, so a few of them stand for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h3opt.kernels.data_kinds import ATTENTION_KINDS, FINITE_KINDS, draw_attention, draw_linear
from h3opt.kernels.ops.registry import OPERATORS, DefinitionCheck, TensorSpec, Trial

_HEADS, _QUERIES = 4, 128
_ROWS, _SAMPLED_ROWS, _SAMPLED_OUTPUTS = 2048, 64, 256


def attention_exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention in float64: q ``[batch, queries, heads, D]``, k and v ``[batch, keys, heads, D]``."""
    out = []
    for head in range(q.shape[2]):
        query, key, value = (one[:, :, head].double() for one in (q, k, v))
        logits = query @ key.transpose(-1, -2) * q.shape[-1] ** -0.5
        out.append(logits.softmax(-1) @ value)
    return torch.stack(out, 2)


def quantized_operands(q: Tensor, k: Tensor, v: Tensor, per_head: bool, chunk: int | None) -> dict[str, Tensor]:
    """Operands of FP8 attention by the names of its schema; with ``chunk``, V is smoothed and scaled per chunk."""
    found: dict[str, Tensor] = {}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if name == "v" and chunk is not None:
            found["v"], found["v_scale"], found["v_mean"] = OPERATORS["quantize_values"](v, chunk)
            continue
        found[f"{name}_scale"] = OPERATORS["dynamic_head_scale"](tensor, per_head)
        found[name] = OPERATORS["quantize_heads"](tensor, found[f"{name}_scale"])
    return found


def _draw_fp8_attention(names: Sequence[str], site: Sequence[Any], kind: str, generator: torch.Generator) -> Trial:
    given = dict(zip(names, site, strict=True))
    shape, heads = _attention_shape(given["q"])
    q, k, v = (one.bfloat16() for one in draw_attention(kind, shape, generator))
    # a chunk of keys is what V's smoothing works on; cuDNN takes one scale per tensor
    operands = quantized_operands(q, k, v, given["backend"] != "cudnn", given.get("chunk"))
    rows = _evenly(shape[1], _QUERIES, q.device)
    sampled = {**operands, "q": operands["q"].view(torch.uint8)[:, rows].view(operands["q"].dtype)}
    exact = attention_exact(q[:, rows], k, v)

    def read(result: Any, whole: bool) -> Tensor:
        if isinstance(result, tuple):  # quantized: codes [batch, tokens, heads · D] with a scale per token
            codes, scale = result
            result = (codes.double() * scale.double()).unflatten(-1, (heads, shape[-1]))
        return result[:, rows].double() if whole else result.double()

    return Trial(_ordered(names, given, operands), _ordered(names, given, sampled), exact, read)


def _draw_attention(names: Sequence[str], site: Sequence[Any], kind: str, generator: torch.Generator) -> Trial:
    given = dict(zip(names, site, strict=True))
    shape, _ = _attention_shape(given["q"])
    q, k, v = (one.to(given["q"].dtype) for one in draw_attention(kind, shape, generator))
    rows = _evenly(shape[1], _QUERIES, q.device)
    exact = attention_exact(q[:, rows], k, v)
    arguments = _ordered(names, given, {"q": q, "k": k, "v": v})
    sampled = _ordered(names, given, {"q": q[:, rows], "k": k, "v": v})
    return Trial(arguments, sampled, exact, lambda out, whole: (out[:, rows] if whole else out).double())


def _draw_scaled_linear(names: Sequence[str], site: Sequence[Any], kind: str, generator: torch.Generator) -> Trial:
    given = dict(zip(names, site, strict=True))
    outputs, inputs = min(given["weight_q"].shape[0], _ROWS), given["weight_q"].shape[1]
    tokens = min(math.prod(given["q"].shape[:-1]), _ROWS)
    x, weight = (one.bfloat16() for one in draw_linear(kind, tokens, inputs, outputs, generator))
    operands: dict[str, Any] = {"bias": None}
    operands["q"], operands["q_scale"] = OPERATORS["quantize_rows"](x)
    operands["weight_q"], operands["weight_scale"] = OPERATORS["quantize_rows"](weight)
    rows, columns = _evenly(tokens, _SAMPLED_ROWS, x.device), _evenly(outputs, _SAMPLED_OUTPUTS, x.device)
    picks = {"q": rows, "q_scale": rows, "weight_q": columns, "weight_scale": columns}
    sampled = {name: _pick(one, picks[name]) if name in picks else one for name, one in operands.items()}
    exact = x[rows].double() @ weight[columns].double().t()
    return Trial(
        _ordered(names, given, operands),
        _ordered(names, given, sampled),
        exact,
        lambda out, whole: (out[rows][:, columns] if whole else out).double(),
    )


def _attention_shape(q: TensorSpec) -> tuple[tuple[int, int, int, int], int]:
    """The site's shape with one sample and a few heads, and the number of these heads."""
    _, tokens, heads, head_dim = q.shape
    heads = min(heads, _HEADS)
    return (1, tokens, heads, head_dim), heads


def _ordered(names: Sequence[str], given: dict[str, Any], drawn: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(drawn.get(name, given[name]) for name in names)


def _evenly(length: int, count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, max(length - 1, 0), min(length, count), device=device).long()


def _pick(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor: not every device can index 8-bit floating point, so it is viewed as integers."""
    return tensor.view(torch.uint8)[rows].view(tensor.dtype) if tensor.element_size() == 1 else tensor[rows]


# The definition rounds operands, probabilities and output as the operator must: what is left is how sums are kept.
FP8_ATTENTION_CHECK = DefinitionCheck(1.15, ATTENTION_KINDS, _draw_fp8_attention)
# The definition is torch's own library: others round at the same points, but take maxima over blocks of other sizes.
ATTENTION_CHECK = DefinitionCheck(1.5, ATTENTION_KINDS, _draw_attention)
# cuBLASLt's precise accumulation measured 1.11 on an H200 with both operands off zero; the fast one 8 and more.
SCALED_LINEAR_CHECK = DefinitionCheck(1.25, FINITE_KINDS, _draw_scaled_linear)
