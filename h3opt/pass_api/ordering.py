"""The order in which the chosen passes run, and their classes by promise."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterable, Mapping, Sequence

from h3opt.errors import PassConflictError, PassOrderError
from h3opt.pass_api.base import Pass
from h3opt.pass_api.promises import Exact, Perceptual
from h3opt.pass_api.registry import sort_key


def in_order(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Sort passes so that each comes after those that its ``after`` names; ties go by kind, then name.

    Raises:
        PassConflictError: a pass is given twice, or two passes exclude each other.
        PassOrderError: the ``after`` declarations form a cycle; the message shows the cycle.
    """
    chosen: dict[str, Pass] = {}
    for instance in passes:
        if instance.name in chosen:
            raise PassConflictError(f"Pass {instance.name!r} is given twice. Keep one of the two.")
        chosen[instance.name] = instance
    for instance in chosen.values():
        for other in instance.conflicts:
            if other in chosen:
                raise PassConflictError(f"Passes {instance.name!r} and {other!r} exclude each other. Turn one off.")
    # Sorted, so that the cycle in the message does not depend on the order in which the passes are given.
    predecessors = {name: sorted(set(chosen[name].after) & chosen.keys()) for name in sorted(chosen)}
    return tuple(chosen[name] for name in _topological_order(predecessors, chosen))


def strictest_first(passes: Sequence[Pass]) -> tuple[list[Pass], list[Pass], list[Pass]]:
    """Split passes into Exact ones, Rounding ones and the rest, each in running order.

    A pass counts with the loosest pass that it builds on. A Rounding pass must be judged before a Perceptual pass is
    on: FP8 quantization can turn a difference in the last bit into a whole step of FP8.
    """
    inexact = {item.name for item in passes if not isinstance(item.promise, Exact)}
    perceptual = {item.name for item in passes if isinstance(item.promise, Perceptual)}
    exact = [item for item in passes if item.name not in inexact and not inexact.intersection(item.builds_on)]
    others = [item for item in passes if item.name in perceptual or perceptual.intersection(item.builds_on)]
    return exact, [item for item in passes if item not in exact and item not in others], others


def _topological_order(predecessors: Mapping[str, Sequence[str]], chosen: Mapping[str, Pass]) -> list[str]:
    sorter = graphlib.TopologicalSorter(predecessors)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = error.args[1][:0:-1]  # without the repeated first name, and each waits for the next
        start = cycle.index(min(cycle))
        cycle = [*cycle[start:], *cycle[:start], cycle[start]]
        raise PassOrderError(
            f"These passes each wait for another: {' → '.join(cycle)}. Remove one of their `after` entries."
        ) from error
    ready: list[tuple[tuple[int, str], str]] = []
    ordered = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (sort_key(chosen[name]), name))
        _, name = heapq.heappop(ready)
        ordered.append(name)
        sorter.done(name)
    return ordered
