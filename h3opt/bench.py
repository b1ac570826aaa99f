"""What each pass is worth on this GPU: the transformer at its real geometry, arm against arm in one run.

Arms are the unmodified model, ``compile_repeated_blocks``, torchao's row-wise FP8 with it (if torchao is installed),
and h3opt: captured without passes, then pass by pass cumulatively, and each pass left out. Arms are interleaved over
several rounds, so that clocks that drift with power drift for all of them; only ratios within one run mean anything.

A profiler says where each arm's time goes: attention and matrix products against the rates they reach, h3opt's own
kernels against the bytes they must move, and that every kernel of a rewritten graph ran as often as the graph has it.
"""

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
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from h3opt.compiler.optimize import prepare
from h3opt.compiler.session import Session
from h3opt.device import Device
from h3opt.environment import versions
from h3opt.errors import DeviceError, PipelineError, nearest
from h3opt.kernels import kernel_names
from h3opt.metrics.bits import bits_equal, relative_error
from h3opt.pass_api.base import Pass, Yes
from h3opt.pass_api.ordering import strictest_first
from h3opt.pipeline.hooks import around

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


@dataclass
class TransformerBench(ArmTables):
    """The result of :func:`bench_transformer`.

    Attributes:
        copy_tb_per_s, gemm_tflops: measured ceilings, see :func:`copy_rate` and :func:`gemm_rate`.
        attention_flop, gemm_flop: of one forward's blocks.
        top_kernels: by arm, the longest kernels as (name, launches, milliseconds).
    """

    device: str
    layers: int
    canvas: str
    tokens: int
    copy_tb_per_s: float
    gemm_tflops: float
    attention_flop: float
    gemm_flop: float
    arms: list[Arm]
    top_kernels: dict[str, list[tuple[str, float, float]]]

    @property
    def title(self) -> str:
        return f"{self.device}, {self.layers} blocks, {self.canvas}, {self.tokens} tokens"

    def markdown(self) -> str:
        """The table for docs/benchmarks."""
        lines = [
            "| arm | ms per forward | ms per block | over eager | over compile | over torchao FP8 | install s "
            "| first call s | peak GiB | elements that differ from eager | relative error | of the first block |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for arm in self.arms:
            if (ms := arm.milliseconds) is None:
                lines.append(f"| {arm.name} | {arm.failure} | | | | | | | | | | |")
                continue
            ratios = " | ".join(self._ratios(ms))
            lines.append(
                f"| {arm.name} | {ms:.1f} | {ms / self.layers:.2f} | {ratios} | {arm.install_seconds:.1f} "
                f"| {arm.first_call_seconds:.1f} | {arm.peak_gib:.1f} | {arm.differing} | {arm.error:.4f} "
                f"| {arm.block_error:.4f} |"
            )
        return "\n".join(lines)

    def _ratios(self, milliseconds: float) -> list[str]:
        base = [self.arm(name) for name in ("eager", "compile", "torchao fp8 + compile")]
        times = [arm.milliseconds if arm is not None else None for arm in base]
        return ["–" if time is None else f"{time / milliseconds:.3f}" for time in times]

    def __str__(self) -> str:
        lines = [
            f"{self.title}; copy {self.copy_tb_per_s:.2f} TB/s, bf16 GEMM {self.gemm_tflops:.0f} TFLOP/s",
            f"{'arm':44s} {'ms':>9s} {'/block':>7s} {'eager/x':>8s} {'compile/x':>9s} {'torchao/x':>9s} "
            f"{'install':>8s} {'first s':>8s} {'GiB':>6s} {'differ':>10s} {'error':>8s} {'block':>8s}",
        ]
        for arm in self.arms:
            ms = arm.milliseconds
            if ms is None:
                lines.append(f"{arm.name:44s} {arm.failure}")
                continue
            ratios = self._ratios(ms)
            lines.append(
                f"{arm.name:44s} {ms:9.2f} {ms / self.layers:7.2f} {ratios[0]:>8s} {ratios[1]:>9s} {ratios[2]:>9s} "
                f"{arm.install_seconds:8.1f} {arm.first_call_seconds:8.1f} {arm.peak_gib:6.1f} {arm.differing:10d} "
                f"{arm.error:8.4f} {arm.block_error:8.4f}"
            )
        return "\n".join([*lines, "", self.kernels_markdown(), *self.miscounts()])


def bench_transformer(
    transformer: Any,
    inputs: dict[str, Any],
    passes: Sequence[str | Pass],
    *,
    canvas: str = "",
    rounds: int = 3,
    forwards: int = 3,
    cumulative: bool = True,
    leave_out: bool = False,
    peers: Sequence[str] = ("compile", "torchao fp8 + compile"),
    profile: str = "auto",
    progress: Progress | None = None,
    on_visit: Callable[[TransformerBench], None] | None = None,
) -> TransformerBench:
    """Time the transformer in every arm.

    Args:
        transformer: on a CUDA device, unmodified; left as found.
        inputs: keyword arguments of one forward.
        passes: measured cumulatively, first the Exact ones that need no other, in their running order.
        canvas: named in the result.
        rounds: interleaved visits to every arm.
        forwards: timed forwards per visit, back to back, after one that is not.
        cumulative: measure every step on the way to all passes, not just the Exact ones together and all.
        leave_out: also measure all passes but one, for each.
        peers: which of the peers to run.
        profile: for the options of passes given by name.
        progress: told before each visit.
        on_visit: gets the result so far after each visit, so that a run that is cut short leaves what it found.

    Raises:
        DeviceError: the transformer is not on a CUDA device.
        PipelineError: a peer that nobody knows.
    """
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise PipelineError(f"There is no peer {unknown[0]!r}{nearest(unknown[0], PEERS)}. Use {' or '.join(PEERS)}.")
    device = next(transformer.parameters()).device
    if device.type != "cuda":
        raise DeviceError("bench times GPU work. Move the transformer to a CUDA device.")
    session, asked = prepare(transformer, passes, profile)
    applicable = [one for one in asked if isinstance(one.applies(session.device, session.view), Yes)]
    exact, rounding, others = strictest_first(applicable)
    chosen = [*exact, *rounding, *others]
    bench = _Bench(transformer, inputs, session, forwards)
    models: list[tuple[Arm, Callable[[ExitStack], Any]]] = [(Arm("eager"), bench.eager)]
    models += [(Arm(peer), getattr(bench, PEERS[peer])) for peer in peers]
    models.append((Arm("h3opt, no pass"), partial(bench.h3opt, passes=[])))
    if cumulative:
        for count, one in enumerate(chosen, start=1):
            models.append((Arm(f"+ {one.name}"), partial(bench.h3opt, passes=chosen[:count])))
    else:
        if exact and chosen != exact:
            models.append((Arm("h3opt, Exact passes"), partial(bench.h3opt, passes=exact)))
        models.append((Arm("h3opt, all passes"), partial(bench.h3opt, passes=chosen)))
    if leave_out:
        for one in chosen:
            rest = [other for other in chosen if other is not one]
            models.append((Arm(f"all but {one.name}"), partial(bench.h3opt, passes=rest)))
    plan = [(arm, partial(bench.forward, model=model)) for arm, model in models]
    tokens = inputs["position_ids"].shape[0]
    blocks = transformer.transformer_blocks
    linears = [
        one for block in blocks for name, one in block.named_modules() if _is_linear(one) and "adaln" not in name
    ]
    result = TransformerBench(
        Device.of(device).name,
        len(blocks),
        canvas,
        tokens,
        copy_rate(device),
        gemm_rate(device),
        4.0 * tokens**2 * blocks[0].attn.to_q.out_features * len(blocks),
        2.0 * tokens * sum(one.in_features * one.out_features for one in linears),
        [arm for arm, _ in plan],
        bench.top_kernels,
    )
    bench.rounds(plan, rounds, progress, lambda: on_visit(result) if on_visit is not None else None)
    return result


PEERS = {"compile": "compile", "torchao fp8 + compile": "torchao"}
"""The peers by the names they have in the table."""


AnyArm = TypeVar("AnyArm", bound=Arm)
Enter = Callable[[ExitStack], Callable[[], Any]]
"""Puts an arm in place, says how to take it off, and returns what runs it once."""


class Visits(abc.ABC, Generic[AnyArm]):
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
        plan: Sequence[tuple[AnyArm, Enter]],
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

    def visit(self, arm: AnyArm, enter: Enter, first: bool) -> None:
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


class _Bench(Visits[Arm]):
    def __init__(self, transformer: Any, inputs: dict[str, Any], session: Session, forwards: int) -> None:
        super().__init__(session, forwards)
        self.transformer, self.inputs = transformer, inputs
        self.reference: tuple[torch.Tensor, ...] | None = None
        self.reference_delta: torch.Tensor | None = None
        self._peers: dict[str, Any] = {}

    def forward(self, undo: ExitStack, model: Callable[[ExitStack], Any]) -> Callable[[], Any]:
        """One forward of the model that ``model`` puts in place."""
        return _Forward(model(undo), self.inputs)

    def eager(self, undo: ExitStack) -> Any:
        """The unmodified model."""
        return self.transformer

    def compile(self, undo: ExitStack) -> Any:
        """diffusers' ``compile_repeated_blocks``, on a shallow copy that shares the weights."""
        if "compile" not in self._peers:
            model = sharing_weights(self.transformer)
            model.compile_repeated_blocks(fullgraph=True)
            self._peers["compile"] = model
        return self._peers["compile"]

    def torchao(self, undo: ExitStack) -> Any:
        """torchao's row-wise dynamic FP8 with ``compile_repeated_blocks``."""
        if "torchao" not in self._peers:
            from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

            model = sharing_weights(self.transformer)
            quantize_(
                model.transformer_blocks,
                Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
                filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and "adaln" not in name,
            )
            model.compile_repeated_blocks(fullgraph=True)
            self._peers["torchao"] = model
        return self._peers["torchao"]

    def h3opt(self, undo: ExitStack, passes: Sequence[Pass]) -> Any:
        """h3opt with ``passes``."""
        self.session.install(passes)
        undo.callback(self.session.uninstall)
        return self.transformer

    def check(self, arm: Arm, out: tuple[torch.Tensor, ...], work: Any) -> None:
        delta = _first_delta(work.model, work)
        if self.reference is None or self.reference_delta is None:
            self.reference, self.reference_delta = tuple(tensor.clone() for tensor in out), delta
        arm.block_error = relative_error(self.reference_delta, delta)
        arm.differing, arm.error = distance(self.reference, out)


@dataclass
class _Forward:
    model: Any
    inputs: dict[str, Any]

    def __call__(self) -> Any:
        return self.model(**self.inputs)


def distance(reference: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> tuple[int, float]:
    """Elements that differ, and ``‖out − reference‖ / ‖reference‖``, over several tensors."""
    pairs = list(zip(reference, out, strict=True))
    differing = sum(bits_equal(one, other).differing for one, other in pairs)
    apart = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    size = sum(float(one.double().square().sum()) for one, _ in pairs)
    return differing, (apart / size) ** 0.5


def _first_delta(model: Any, forward: Callable[[], Any]) -> torch.Tensor:
    """What the first block adds to the residual stream in one forward."""
    seen: list[torch.Tensor] = []

    def record(proceed: Any, *args: Any, **kwargs: Any) -> Any:
        before = args[0] if args else kwargs["hidden_states"]
        out = proceed(*args, **kwargs)
        seen.append(out - before)
        return out

    with ExitStack() as undo:
        around(model.transformer_blocks[0], record, undo)
        forward()
    return seen[0]


def _kind_of(kernel: str) -> str:
    if kernel in kernel_names.values():
        return "h3opt"
    name = kernel.lower()
    if any(word in name for word in ("flash", "fmha", "sdpa", "attention", "cudnn_generated")):
        return "attention"
    return "gemm" if any(word in name for word in ("gemm", "nvjet", "cutlass", "xmma", "cublas")) else "other"


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def _idle_in_graphs() -> int:
    """Bytes that recorded CUDA graphs work in: the allocator counts them as free unless one is being recorded."""
    segments = torch.cuda.memory_snapshot()
    idle = (one["total_size"] - one["allocated_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))
    return sum(idle)


def copy_rate(device: torch.device) -> float:
    """Measured device-to-device copy in TB/s, bytes read plus bytes written."""
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best_of(lambda: target.copy_(source)) / 1e12


def gemm_rate(device: torch.device) -> float:
    """Measured bf16 matrix product in TFLOP/s on random data, 8192 × 8192 × 8192."""
    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _best_of(lambda: left @ right) / 1e12


def _best_of(work: Callable[[], Any], times: int = 7) -> float:
    seconds = []
    for _ in range(times):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds[2:])


def sharing_weights(model: Any) -> Any:
    """A copy of the module tree whose parameters and buffers are the original's, not copies of them."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)
