"""Time the variants of a benchmark in turn, and hold the results that all benchmarks share.

A *variant* is one way to run the same work: the unmodified model, a compiled model, h3opt with some passes. Variants
are interleaved over several rounds, so that clock rates that drift with power and temperature drift for all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import torch

from h3opt.bench.peers import Peer
from h3opt.bench.table import Table
from h3opt.compiler.session import Session
from h3opt.environment import versions
from h3opt.kernels import kernel_names
from h3opt.metrics.bits import bits_equal

Progress = Callable[[str, int, int], None]
"""Called as ``progress(variant, done, total)`` before each run of a variant."""

SetUp = Callable[[ExitStack], Callable[[], Any]]
"""Puts a variant in place, registers with the stack how to remove it, and returns the work to time."""

KERNEL_KINDS = ("attention", "gemm", "h3opt", "other")
"""The kinds that a profiler's kernels are sorted into."""


@dataclass
class Variant:
    """One way to run the work, and its figures.

    Attributes:
        name: shown in the tables.
        rounds: milliseconds of one run of the work, one entry for each round.
        install_seconds: time to put the variant in place. Moving weights off the GPU and changing their format take
            most of it.
        first_call_seconds: time of the first run, with capture and compilation.
        peak_gib: the most memory allocated during a run, with the memory that recorded CUDA graphs work in.
        differing: output elements that differ from eager in any bit.
        error: ``‖out − eager‖ / ‖eager‖`` over all outputs.
        block_error: the same ratio for what the first block adds to its input.
        structured_error: the same ratio where the input of the first block has a mean per channel, as in trained
            networks; for the transformer only.
        kernels: name of an h3opt kernel → (launches that the profiler saw, launches that the report expects).
        spent: milliseconds of a profiled run by kind of kernel, see :data:`KERNEL_KINDS`.
        gib_moved: what h3opt's kernels read and write in a profiled run; every operand counts once.
        failure: why the variant has no figures.
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
        """The median over all rounds; ``None`` before the first round."""
        return statistics.median(self.rounds) if self.rounds else None


class BenchResult(ABC):
    """What the results of all benchmarks share: the tables, and a form for JSON."""

    device: str
    variants: Any  # a list of Variant, or of a subclass
    copy_tb_per_s: float
    attention_flop: float
    gemm_flop: float

    @property
    @abstractmethod
    def title(self) -> str:
        """What was measured."""

    @abstractmethod
    def table(self) -> Table:
        """The times, ratios and differences of all variants."""

    @property
    def preface(self) -> str:
        """The line above the table on the console."""
        return self.title

    @property
    def kernels_title(self) -> str:
        """A sentence above the table of kernels; may be empty."""
        return ""

    def variant(self, name: str) -> Any:
        """The first variant of this name, or ``None``."""
        return next((variant for variant in self.variants if variant.name == name), None)

    def profiled_share(self, variant: Any) -> float:
        """The share of a variant's work that ran under the profiler."""
        return 1.0

    def flop(self, variant: Any) -> tuple[float, float]:
        """Floating point operations of attention and of matrix products under the profiler; 0 if not counted."""
        return self.attention_flop, self.gemm_flop

    def kernels_table(self) -> Table:
        """Where the time of each profiled variant went, and at what rate."""
        heads = (
            "variant",
            "attention ms (TFLOP/s)",
            "GEMM ms (TFLOP/s)",
            "h3opt kernels ms (of copy rate)",
            "other ms",
        )
        return Table(heads, [self._kernels_row(variant) for variant in self.variants if variant.spent])

    def miscounts(self) -> list[str]:
        """Sentences about kernels that did not run as often as their graphs contain them."""
        return [
            f"{variant.name}: {kernel} ran {ran} times, not {expected}"
            for variant in self.variants
            for kernel, (ran, expected) in variant.kernels.items()
            if ran != expected
        ]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-ready types."""
        variants = [{**asdict(variant), "milliseconds": variant.milliseconds} for variant in self.variants]
        return {**asdict(self), "variants": variants, "versions": versions()}  # type: ignore[call-overload]

    def markdown(self) -> str:
        """Both tables as Markdown, for docs/benchmarks."""
        parts = [self.table().markdown()]
        if (kernels := self.kernels_table()).rows:
            parts += [self.kernels_title, kernels.markdown()]
        return "\n\n".join(part for part in parts if part)

    def __str__(self) -> str:
        parts = [self.preface, str(self.table())]
        if (kernels := self.kernels_table()).rows:
            parts += ["", *([self.kernels_title] if self.kernels_title else []), str(kernels)]
        return "\n".join([*parts, *self.miscounts()])

    def _kernels_row(self, variant: Variant) -> list[str]:
        rates = [
            f"{variant.spent[kind]:.2f}" + (f" ({flop / max(variant.spent[kind], 1e-9) / 1e9:.0f})" if flop else "")
            for kind, flop in zip(("attention", "gemm"), self.flop(variant), strict=True)
        ]
        moved = "–"
        if variant.spent["h3opt"]:
            share = variant.gib_moved * 2**30 / (variant.spent["h3opt"] / 1e3) / (self.copy_tb_per_s * 1e12)
            moved = f"{variant.spent['h3opt']:.2f} ({share:.0%})"
        return [variant.name, *rates, moved, f"{variant.spent['other']:.2f}"]


AnyVariant = TypeVar("AnyVariant", bound=Variant)


class BenchmarkRunner(ABC, Generic[AnyVariant]):
    """Put variants in place in turn, time them, and profile each of them once.

    Args:
        session: where h3opt's passes are installed.
        repeats: timed runs of a variant in each round, back to back.
    """

    def __init__(self, session: Session, repeats: int) -> None:
        self.session, self.repeats = session, repeats
        self.on_gpu = session.device.type == "cuda"
        self.top_kernels: dict[str, list[tuple[str, float, float]]] = {}
        self._peer_models: dict[str, Any] = {}

    @abstractmethod
    def check(self, variant: AnyVariant, out: Any, work: Callable[[], Any]) -> None:
        """Compare a variant's first output with eager's output."""

    def profiled(self, variant: AnyVariant, work: Callable[[], Any]) -> Callable[[], Any] | None:
        """The work to run under the profiler: all of ``work``, a part of it, or ``None`` for nothing."""
        return work

    def peer_model(self, peer: Peer, model: Any) -> Any:
        """The model of a peer, which is built at the first call and kept for later rounds."""
        if peer.name not in self._peer_models:
            self._peer_models[peer.name] = peer.set_up(model)
        return self._peer_models[peer.name]

    def run_rounds(
        self,
        variants: Sequence[tuple[AnyVariant, SetUp]],
        rounds: int,
        progress: Progress | None,
        after_run: Callable[[], None],
    ) -> None:
        """Run every variant once a round; a variant that failed is not run again."""
        with torch.no_grad():
            for number in range(rounds):
                for position, (variant, set_up) in enumerate(variants):
                    if progress is not None:
                        progress(variant.name, number * len(variants) + position, rounds * len(variants))
                    if variant.failure is None:
                        self.run_variant(variant, set_up, first=number == 0)
                    after_run()

    def run_variant(self, variant: AnyVariant, set_up: SetUp, first: bool) -> None:
        """Put a variant in place, compare its output in the first round, time it, and remove it."""
        try:
            with ExitStack() as undo:
                started = time.perf_counter()
                work = set_up(undo)
                self._synchronize()
                installed = time.perf_counter()
                out = work()
                self._synchronize()
                if first:
                    variant.install_seconds = installed - started
                    variant.first_call_seconds = time.perf_counter() - installed
                    self.check(variant, out, work)
                del out
                if self.on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                variant.rounds.append(self._time(work))
                if self.on_gpu:
                    variant.peak_gib = (torch.cuda.max_memory_allocated() + _bytes_of_cuda_graphs()) / 2**30
                    if first and (part := self.profiled(variant, work)) is not None:
                        self._profile(variant, part)
        except Exception as error:  # the other variants keep their figures; the table shows this error
            variant.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _time(self, work: Callable[[], Any]) -> float:
        """Milliseconds of one run. Runs are back to back as in a denoising loop: the host may run ahead of the GPU."""
        if not self.on_gpu:
            started = time.perf_counter()
            for _ in range(self.repeats):
                work()
            return (time.perf_counter() - started) * 1e3 / self.repeats
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(self.repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / self.repeats

    def _profile(self, variant: AnyVariant, work: Callable[[], Any]) -> None:
        runs_before, bytes_before = self.session.operators_run(), self.session.bytes_moved()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        self.top_kernels[variant.name] = [
            (event.key[:90], event.count, event.self_device_time_total / 1e3) for event in events[:14]
        ]
        variant.spent = dict.fromkeys(KERNEL_KINDS, 0.0)
        for event in events:
            variant.spent[_kind_of(event.key)] += event.self_device_time_total / 1e3
        variant.gib_moved = (self.session.bytes_moved() - bytes_before) / 2**30
        if self.session.installed:
            launches = {event.key: event.count for event in events}
            for operator, runs in self.session.operators_run().items():
                kernel = kernel_names.get(operator)
                if kernel is not None:
                    variant.kernels[kernel] = (launches.get(kernel, 0), runs - runs_before[operator])


def compare_outputs(reference: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> tuple[int, float]:
    """Count the elements that differ in any bit, and compute ``‖out − reference‖ / ‖reference‖`` over all tensors."""
    pairs = list(zip(reference, out, strict=True))
    differing = sum(bits_equal(left, right).differing for left, right in pairs)
    squared_error = sum(float((left.double() - right.double()).square().sum()) for left, right in pairs)
    squared_norm = sum(float(left.double().square().sum()) for left, _ in pairs)
    return differing, (squared_error / squared_norm) ** 0.5


def _kind_of(kernel: str) -> str:
    if kernel in kernel_names.values():
        return "h3opt"
    name = kernel.lower()
    if any(word in name for word in ("flash", "fmha", "sdpa", "attention", "cudnn_generated")):
        return "attention"
    return "gemm" if any(word in name for word in ("gemm", "nvjet", "cutlass", "xmma", "cublas")) else "other"


def _bytes_of_cuda_graphs() -> int:
    """Bytes in the memory pools of recorded CUDA graphs, which the allocator counts as free outside a recording."""
    pools = [pool for pool in torch.cuda.memory_snapshot() if tuple(pool["segment_pool_id"]) != (0, 0)]
    return sum(pool["total_size"] - pool["allocated_size"] for pool in pools)
