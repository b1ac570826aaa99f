"""Check a rewrite on this machine: run pattern and replacement on random data with the shapes of the site.

Reduction orders differ between devices, sizes and torch versions. Therefore an Exact rewrite that was correct elsewhere
is checked again before it is used here; if a single bit differs, the site keeps the unfused operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from h3opt._torch_private import size_hint
from h3opt.graph.matcher import Match, parameters
from h3opt.graph.nodes import value
from h3opt.metrics.bits import bits_equal, row_ulps
from h3opt.pass_api.promises import Exact, Promise, Rounding

_SPREAD = 2.0  # standard deviation of the random data, large enough to reach difficult ranges of exp and division


def probe(match: Match, promise: Promise, seed: int = 0) -> str | None:
    """Compare pattern and replacement of ``match`` on random data.

    Args:
        match: the site; the random data has the same shapes, strides, dtypes and device, and the same literals.
        promise: Exact asks for equal bits, Rounding for a limit in ulps; Perceptual is not probed.
        seed: seed of the random data; the global generators stay untouched.

    Returns:
        ``None`` if the promise holds, else a sentence about the difference.
    """
    if not isinstance(promise, (Exact, Rounding)):
        return None
    arguments = _random_arguments(match, seed)
    with torch.no_grad():
        expected = _as_tuple(match.rule.pattern(**arguments))
        actual = _as_tuple(match.rule.replacement(**arguments))
    for reference, candidate in zip(expected, actual, strict=True):
        comparison = bits_equal(reference, candidate)
        if isinstance(promise, Rounding) and (distance := row_ulps(reference, candidate)) > (promise.ulps or 0):
            return f"the probe found {distance:.1f} ulps of a row between this and the unfused operators on this device"
        if isinstance(promise, Exact) and not comparison.equal:
            return (
                f"the probe found {comparison.differing} of {reference.numel()} elements different from the unfused "
                f"operators on this device"
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


def _random_arguments(match: Match, seed: int) -> dict[str, Any]:
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
            noise = torch.randn(shape, generator=generator, device=tensor.device) * _SPREAD
            real.copy_(noise.to(tensor.dtype))
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
