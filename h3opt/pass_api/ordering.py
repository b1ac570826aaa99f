"""The order in which a chosen set of passes runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from h3opt.errors import (
    PassConflictError,
    PassOrderError,
)
from h3opt.pass_api.base import Pass
from h3opt.pass_api.promises import Exact, Perceptual
from h3opt.pass_api.registry import _STAGES


def in_order(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Sort passes so that each comes after those it names in ``after``; ties go by kind, then name.

    Raises:
        PassConflictError: one pass twice, or two that exclude each other.
        PassOrderError: the ``after`` declarations form a cycle.
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
    waiting = {name: {other for other in instance.after if other in chosen} for name, instance in chosen.items()}
    ordered: list[Pass] = []
    while waiting:
        ready = [name for name, before in waiting.items() if not before]
        if not ready:
            circle = " → ".join(sorted(waiting))
            raise PassOrderError(f"These passes each wait for another: {circle}. Remove one of their `after` entries.")
        first = min(ready, key=lambda name: (_STAGES[chosen[name].kind], name))
        ordered.append(chosen[first])
        del waiting[first]
        for before in waiting.values():
            before.discard(first)
    return tuple(ordered)


def strictest_first(passes: Sequence[Pass]) -> tuple[list[Pass], list[Pass], list[Pass]]:
    """Exact passes, Rounding ones and the rest, each in running order; one counts with the loosest that it builds on.

    A Rounding pass has to be judged before a Perceptual one is on: FP8 turns a last bit into a whole step of its own.
    """
    inexact = {one.name for one in passes if not isinstance(one.promise, Exact)}
    perceptual = {one.name for one in passes if isinstance(one.promise, Perceptual)}
    exact = [one for one in passes if one.name not in inexact and not inexact.intersection(one.builds_on)]
    others = [one for one in passes if one.name in perceptual or perceptual.intersection(one.builds_on)]
    return exact, [one for one in passes if one not in exact and one not in others], others
