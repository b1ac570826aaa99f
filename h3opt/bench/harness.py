"""Interleaved visits to the arms of a benchmark, and the tables they make."""

from __future__ import annotations

import abc
import copy
import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import torch

from h3opt.compiler.session import Session
from h3opt.environment import versions
from h3opt.kernels import kernel_names
from h3opt.metrics.bits import bits_equal

Progress = Callable[[str, int, int], None]


@dataclass
class Arm:
    """One way to run the transformer.

    Attributes:
        name: as it stands in the table.
        milliseconds: of one forward, median over all rounds; one entry per round in ``rounds``.
        install_seconds: to put the arm in place; weights that leave the GPU or change their format are most of it.
        first_call_seconds: of the first forward, capture and compilation included.
        peak_gib: most memory allocated during a forward, and what replayed CUDA graphs work in.
        differing: elements of video and audio velocity whose bits differ from eager's.
        error: ``‖out − eager‖ / ‖eager‖`` over both velocities.
        block_error: the same of what the first block adds to its input.
        structured_error: the same where that input has a mean per channel, as in trained networks; transformer only.
        kernels: h3opt kernel → (launches seen by the profiler, launches the report expects).
        spent: milliseconds of a forward in ``attention``, ``gemm``, ``h3opt`` kernels and ``other`` kernels.
        gib_moved: what h3opt's kernels read and write in a forward, every operand once.
        failure: why the arm has no figures.
    """

    name: str
    rounds: list[float] = field(default_factory=list)
    install_seconds: float | None = None
    first_call_seconds: float | None = None
    peak_gib: float | None = None
    differing: int | None = None
    error: float | None = None
    block_error: float | None = None
    structured_error: float | None = None
    kernels: dict[str, tuple[int, int]] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    gib_moved: float = 0.0
    failure: str | None = None

    @property
    def milliseconds(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None


class ArmTables(ABC):
    """What the results of all suites show alike: kinds of kernels, and arms as JSON-ready types."""

    device: str
    arms: Any  # the arms of the suite
    copy_tb_per_s: float
    attention_flop: float
    gemm_flop: float

    @property
    @abstractmethod
    def title(self) -> str:
        """What was measured."""

    @abstractmethod
    def markdown(self) -> str:
        """The table for docs/benchmarks."""

    def arm(self, name: str) -> Any:
        """The first arm called ``name``, or ``None``."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        arms = [{**asdict(arm), "milliseconds": arm.milliseconds} for arm in self.arms]
        return {**asdict(self), "arms": arms, "versions": versions()}  # type: ignore[call-overload]

    def profiled_share(self, arm: Any) -> float:
        """How much of an arm's work the profiler saw."""
        return 1.0

    def flop(self, arm: Any) -> tuple[float, float]:
        """Of attention and matrix products in what the profiler saw; zero where they are not counted."""
        return self.attention_flop, self.gemm_flop

    def kernels_markdown(self) -> str:
        """Where the time of each arm goes, and at what rate."""
        lines = [
            "| arm | attention ms (TFLOP/s) | GEMM ms (TFLOP/s) | h3opt kernels ms (of copy rate) | other ms |",
            "|---|---|---|---|---|",
        ]
        for arm in self.arms:
            if not arm.spent:
                continue
            rates = [
                f"{arm.spent[kind]:.2f}" + (f" ({flop / max(arm.spent[kind], 1e-9) / 1e9:.0f})" if flop else "")
                for kind, flop in zip(("attention", "gemm"), self.flop(arm), strict=True)
            ]
            moved = "–"
            if arm.spent["h3opt"]:
                share = arm.gib_moved * 2**30 / (arm.spent["h3opt"] / 1e3) / (self.copy_tb_per_s * 1e12)
                moved = f"{arm.spent['h3opt']:.2f} ({share:.0%})"
            lines.append(f"| {arm.name} | {' | '.join(rates)} | {moved} | {arm.spent['other']:.2f} |")
        return "\n".join(lines)

    def miscounts(self) -> list[str]:
        """Kernels that did not run as often as their graphs have them."""
        return [
            f"{arm.name}: {kernel} ran {ran} times, not {expected}"
            for arm in self.arms
            for kernel, (ran, expected) in arm.kernels.items()
            if ran != expected
        ]


AnyArm = TypeVar("AnyArm", bound=Arm)


SetUp = Callable[[ExitStack], Callable[[], Any]]
"""Puts an arm in place, says how to take it off, and returns what runs it once."""


class BenchmarkRunner(abc.ABC, Generic[AnyArm]):
    """Switches between arms, times them, and asks a profiler once for each.

    Args:
        session: what h3opt's passes are installed in.
        repeats: timed runs per visit, back to back.
    """

    def __init__(self, session: Session, repeats: int) -> None:
        self.session, self.repeats = session, repeats
        self.on_gpu = session.device.type == "cuda"
        self.top_kernels: dict[str, list[tuple[str, float, float]]] = {}

    @abc.abstractmethod
    def check(self, arm: AnyArm, out: Any, work: Callable[[], Any]) -> None:
        """Compare an arm's first output with eager's."""

    def profiled(self, arm: AnyArm, work: Callable[[], Any]) -> Callable[[], Any] | None:
        """What to run under the profiler: ``work``, a part of it, or nothing."""
        return work

    def rounds(
        self,
        plan: Sequence[tuple[AnyArm, SetUp]],
        rounds: int,
        progress: Progress | None,
        visited: Callable[[], None],
    ) -> None:
        """Visit every arm, ``rounds`` times."""
        with torch.no_grad():
            for visit in range(rounds):
                for number, (arm, enter) in enumerate(plan):
                    if progress is not None:
                        progress(arm.name, visit * len(plan) + number, rounds * len(plan))
                    if arm.failure is None:
                        self.visit(arm, enter, first=visit == 0)
                    visited()

    def visit(self, arm: AnyArm, enter: SetUp, first: bool) -> None:
        """Switch to an arm, check it on the first visit, time it, and switch back."""
        try:
            with ExitStack() as undo:
                started = time.perf_counter()
                work = enter(undo)
                self._synchronize()
                installed = time.perf_counter()
                out = work()
                self._synchronize()
                if first:
                    arm.install_seconds, arm.first_call_seconds = installed - started, time.perf_counter() - installed
                    self.check(arm, out, work)
                del out
                if self.on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                arm.rounds.append(self._time(work))
                if self.on_gpu:
                    arm.peak_gib = (torch.cuda.max_memory_allocated() + _idle_in_graphs()) / 2**30
                    if first and (part := self.profiled(arm, work)) is not None:
                        self._profile(arm, part)
        except Exception as error:  # one arm must not cost the others their figures; the table shows it
            arm.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _time(self, work: Callable[[], Any]) -> float:
        """Milliseconds of a run, of several back to back as in a denoising loop: the host may run ahead of the GPU."""
        if not self.on_gpu:
            started = time.perf_counter()
            for _ in range(self.repeats):
                work()
            return (time.perf_counter() - started) * 1e3 / self.repeats
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(self.repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / self.repeats

    def _profile(self, arm: AnyArm, work: Callable[[], Any]) -> None:
        before, moved = self.session.operators_run(), self.session.bytes_moved()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        self.top_kernels[arm.name] = [
            (event.key[:90], event.count, event.self_device_time_total / 1e3) for event in events[:14]
        ]
        arm.spent = dict.fromkeys(("attention", "gemm", "h3opt", "other"), 0.0)
        for event in events:
            arm.spent[_kind_of(event.key)] += event.self_device_time_total / 1e3
        arm.gib_moved = (self.session.bytes_moved() - moved) / 2**30
        if self.session.installed:
            launches = {event.key: event.count for event in events}
            for operator, ran in self.session.operators_run().items():
                kernel, expected = kernel_names.get(operator), ran - before[operator]
                if kernel is not None:
                    arm.kernels[kernel] = (launches.get(kernel, 0), expected)


def distance(reference: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> tuple[int, float]:
    """Elements that differ, and ``‖out − reference‖ / ‖reference‖``, over several tensors."""
    pairs = list(zip(reference, out, strict=True))
    differing = sum(bits_equal(one, other).differing for one, other in pairs)
    apart = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    size = sum(float(one.double().square().sum()) for one, _ in pairs)
    return differing, (apart / size) ** 0.5


def _kind_of(kernel: str) -> str:
    if kernel in kernel_names.values():
        return "h3opt"
    name = kernel.lower()
    if any(word in name for word in ("flash", "fmha", "sdpa", "attention", "cudnn_generated")):
        return "attention"
    return "gemm" if any(word in name for word in ("gemm", "nvjet", "cutlass", "xmma", "cublas")) else "other"


def _idle_in_graphs() -> int:
    """Bytes that recorded CUDA graphs work in: the allocator counts them as free unless one is being recorded."""
    segments = torch.cuda.memory_snapshot()
    idle = (one["total_size"] - one["allocated_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))
    return sum(idle)


def sharing_weights(model: Any) -> Any:
    """A copy of the module tree whose parameters and buffers are the original's, not copies of them."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)
