"""Check a rewrite on this machine: run pattern and replacement on kinds of random data with the shapes of the site.

Reduction orders differ between devices, sizes and torch versions. Therefore an Exact rewrite that was correct elsewhere
is checked again before it is used here; if a single bit differs, the site keeps the unfused operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from h3opt._torch_private import size_hint
from h3opt.graph.matcher import Match, parameters
from h3opt.graph.nodes import value
from h3opt.kernels.data_kinds import FINITE_KINDS, draw
from h3opt.metrics.bits import bits_equal, row_ulps
from h3opt.pass_api.promises import Exact, Promise, Rounding

_SPREAD = 2.0  # factor of the random data, large enough to reach difficult ranges of exp and division


EXACT_KINDS = (*FINITE_KINDS, "nan_row")  # bits must be equal for every input


def probe(match: Match, promise: Promise, kinds: Sequence[str] = EXACT_KINDS, seed: int = 0) -> str | None:
    """Compare pattern and replacement of ``match`` on random data.

    Args:
        match: the site; the random data has the same shapes, strides, dtypes and device, and the same literals.
        promise: Exact asks for equal bits, Rounding for a limit in ulps; Perceptual is not probed.
        kinds: kinds of data, each in a run of its own; the first that differs ends the probe. Rounding is promised for
            finite data alone, so ``nan_row`` is left out for it.
        seed: seed of the random data; the global generators stay untouched.

    Returns:
        ``None`` if the promise holds, else a sentence about the difference.
    """
    if not isinstance(promise, (Exact, Rounding)):
        return None
    if isinstance(promise, Rounding):
        kinds = [kind for kind in kinds if kind != "nan_row"]
    differences = (_difference(match, promise, kind, seed) for kind in kinds)
    return next((difference for difference in differences if difference is not None), None)


def _difference(match: Match, promise: Exact | Rounding, kind: str, seed: int) -> str | None:
    """What differs on data of one kind."""
    on_kind = "" if kind == "zero_mean" else f", on data of kind {kind}"
    arguments = _random_arguments(match, kind, seed)
    with torch.no_grad():
        expected = _as_tuple(match.rule.pattern(**arguments))
        actual = _as_tuple(match.rule.replacement(**arguments))
    for reference, candidate in zip(expected, actual, strict=True):
        comparison = bits_equal(reference, candidate)
        if isinstance(promise, Rounding) and (distance := row_ulps(reference, candidate)) > (promise.ulps or 0):
            return (
                f"the probe found {distance:.1f} ulps of a row between this and the unfused operators on this device"
                f"{on_kind}"
            )
        if isinstance(promise, Exact) and not comparison.equal:
            return (
                f"the probe found {comparison.differing} of {reference.numel()} elements different from the unfused "
                f"operators on this device{on_kind}"
            )
    return None


def signature(match: Match) -> tuple[Any, ...]:
    """Everything that the result of a probe depends on; sites with equal signatures share a probe."""
    parts: list[Any] = [match.rule.pattern, match.rule.replacement]
    for name in parameters(match.rule):
        tensor = match.tensor(name)
        if tensor is None:
            parts.append(repr(match.bound[name]))
        else:
            shape = tuple(size_hint(size) for size in tensor.shape)
            stride = tuple(size_hint(step) for step in tensor.stride())
            parts.append((shape, stride, tensor.dtype, tensor.device))
    return tuple(parts)


def _random_arguments(match: Match, kind: str, seed: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in parameters(match.rule):
        bound = match.bound[name]
        tensor = value(bound)
        if tensor is None:
            arguments[name] = _literal(bound)
            continue
        generator = torch.Generator(tensor.device).manual_seed(seed + len(arguments))
        full = [size_hint(size) for size in tensor.shape]
        strides = [size_hint(step) for step in tensor.stride()]
        shape = [size if step else 1 for size, step in zip(full, strides, strict=True)]  # stride 0: expanded below
        real = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        if tensor.dtype.is_floating_point:
            real.copy_((draw(kind, shape, generator) * _SPREAD).to(tensor.dtype))
        else:
            table = match.tensor(match.rule.index_into[name]) if name in match.rule.index_into else None
            rows = size_hint(table.shape[0]) if table is not None else 2
            real.copy_(torch.randint(0, rows, shape, generator=generator, device=tensor.device))
        arguments[name] = real.expand(full)
    return arguments


def _literal(bound: Any) -> Any:
    if isinstance(bound, (list, tuple)):
        return [_literal(item) for item in bound]
    if isinstance(bound, Node):
        return size_hint(bound.meta["val"])
    return bound


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
