"""The captured graphs that run while a CUDA graph is recorded.

A replayed CUDA graph runs the kernels of captured graphs without calling them, so each replay adds to their counts.
Captured graphs report their calls here, and code that records a CUDA graph collects them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class CountsCalls(Protocol):
    """A captured graph that counts how often it ran."""

    calls: int


_recorded: ContextVar[list[CountsCalls] | None] = ContextVar("recorded", default=None)


@contextmanager
def record_graph_calls() -> Iterator[list[CountsCalls]]:
    """Collect the graphs that run in the body, one entry per call."""
    calls: list[CountsCalls] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def note_graph_call(graph: CountsCalls) -> None:
    """Report to a surrounding :func:`record_graph_calls` that ``graph`` runs."""
    calls = _recorded.get()
    if calls is not None:
        calls.append(graph)
