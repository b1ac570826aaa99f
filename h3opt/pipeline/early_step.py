"""A pipeline step that runs ahead of its turn, on a CUDA stream of its own, beside another step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from h3opt.pipeline.staleness import TensorSnapshot
from h3opt.pipeline.steps import copy_state


@dataclass
class EarlyResult:
    """What a step made ahead of its turn.

    Attributes:
        snapshot: of the tensor that the step read, from when it ran.
        values: the state values that the step changed.
    """

    snapshot: TensorSnapshot
    values: dict[str, Any]


class EarlyStep:
    """Runs ``step`` when another step starts, and hands the result over when it is the turn of ``step``.

    :meth:`launch` wraps the other step and :meth:`hand_over` wraps ``step``. Where the tensor that was read has been
    replaced or modified in between, ``step`` runs again. On a CPU the order of the two steps changes and nothing else.

    Attributes:
        step: the step.
        source: the state value that the step reads.
        may_run: tells from the pipeline's components whether the step may run ahead of its turn.
        pending: the result that was not handed over yet.
        stream: the side stream; ``None`` before the first run on a GPU.
    """

    def __init__(self, step: Any, source: str, may_run: Callable[[Any], bool] = lambda components: True) -> None:
        self.step, self.source, self.may_run = step, source, may_run
        self.pending: EarlyResult | None = None
        self.stream: torch.cuda.Stream | None = None

    def launch(self, proceed: Any, components: Any, state: Any) -> Any:
        """Run the step on the side stream, then go on to the other step."""
        self.pending = None  # the run below goes through hand_over, which must let it pass
        source = state.get(self.source)
        if source is not None and self.may_run(components):
            ahead = copy_state(state)
            with self._on_side_stream(source):
                self.step(components, ahead)
            made = {name: value for name, value in ahead.values.items() if value is not state.get(name)}
            self.pending = EarlyResult(TensorSnapshot([source]), made)
        try:
            return proceed(components, state)
        except BaseException:
            self.pending = None
            self.join()
            raise

    def hand_over(self, proceed: Any, components: Any, state: Any) -> Any:
        """Put the pending result into the state, or run the step if there is none or it is outdated."""
        pending, self.pending = self.pending, None
        self.join()
        if pending is None or not pending.snapshot.matches([state.get(self.source)]):
            return proceed(components, state)
        for value in pending.values.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(torch.cuda.current_stream(value.device))
        state.values.update(pending.values)
        return components, state

    def join(self) -> None:
        """Let the main stream wait for the side stream; the host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    @contextmanager
    def _on_side_stream(self, source: torch.Tensor) -> Iterator[None]:
        """Queue the work of the body on the side stream, after everything that the main stream was given so far."""
        if not source.is_cuda:
            yield
            return
        if self.stream is None or self.stream.device != source.device:
            self.stream = torch.cuda.Stream(source.device)
        self.stream.wait_stream(torch.cuda.current_stream(source.device))
        source.record_stream(self.stream)
        try:
            with torch.cuda.stream(self.stream):
                yield
        except BaseException:
            self.join()
            raise
