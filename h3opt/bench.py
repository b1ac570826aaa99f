"""What each pass is worth on this GPU: the transformer at its real geometry, arm against arm in one run.

Arms are the unmodified model, ``compile_repeated_blocks``, torchao's row-wise FP8 with it (if torchao is installed),
and h3opt: captured without passes, then pass by pass cumulatively, and each pass left out. Arms are interleaved over
several rounds, so that clocks that drift with power drift for all of them; only ratios within one run mean anything.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from h3opt.device import Device
from h3opt.environment import versions
from h3opt.errors import DeviceError
from h3opt.kernels import kernel_names
from h3opt.protocol import Pass, Yes
from h3opt.quality import bits_equal
from h3opt.session import Session, prepare

Progress = Callable[[str, int, int], None]


@dataclass
class Arm:
    """One way to run the transformer.

    Attributes:
        name: as it stands in the table.
        milliseconds: of one forward, median over all rounds; one entry per round in ``rounds``.
        first_call_seconds: capture and compilation included.
        peak_gib: most memory allocated during a forward.
        differing: elements of video and audio velocity whose bits differ from eager's.
        error: ``‖out − eager‖ / ‖eager‖`` over both velocities.
        kernels: h3opt kernel → (launches seen by the profiler, launches the report expects).
        failure: why the arm has no figures.
    """

    name: str
    rounds: list[float] = field(default_factory=list)
    first_call_seconds: float | None = None
    peak_gib: float | None = None
    differing: int | None = None
    error: float | None = None
    kernels: dict[str, tuple[int, int]] = field(default_factory=dict)
    failure: str | None = None

    @property
    def milliseconds(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None


@dataclass
class TransformerBench:
    """The result of :func:`bench_transformer`."""

    device: str
    layers: int
    canvas: str
    tokens: int
    copy_tb_per_s: float
    gemm_tflops: float
    arms: list[Arm]
    top_kernels: dict[str, list[tuple[str, float, float]]]

    def arm(self, name: str) -> Arm | None:
        """The arm called ``name``."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        arms = [{**asdict(arm), "milliseconds": arm.milliseconds} for arm in self.arms]
        return {**asdict(self), "arms": arms, "versions": versions()}

    def markdown(self) -> str:
        """The table for docs/benchmarks."""
        lines = [
            "| arm | ms per forward | ms per block | over eager | over compile | over torchao FP8 | first call s "
            "| peak GiB | elements that differ from eager | relative error |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for arm in self.arms:
            if (ms := arm.milliseconds) is None:
                lines.append(f"| {arm.name} | {arm.failure} | | | | | | | | |")
                continue
            ratios = " | ".join(self._ratios(ms))
            lines.append(
                f"| {arm.name} | {ms:.1f} | {ms / self.layers:.2f} | {ratios} | {arm.first_call_seconds:.1f} "
                f"| {arm.peak_gib:.1f} | {arm.differing} | {arm.error:.4f} |"
            )
        return "\n".join(lines)

    def _ratios(self, milliseconds: float) -> list[str]:
        base = [self.arm(name) for name in ("eager", "compile", "torchao fp8 + compile")]
        times = [arm.milliseconds if arm is not None else None for arm in base]
        return ["–" if time is None else f"{time / milliseconds:.3f}" for time in times]

    def __str__(self) -> str:
        lines = [
            f"{self.device}, {self.layers} blocks, {self.canvas}, {self.tokens} tokens; "
            f"copy {self.copy_tb_per_s:.2f} TB/s, bf16 GEMM {self.gemm_tflops:.0f} TFLOP/s",
            f"{'arm':44s} {'ms':>9s} {'/block':>7s} {'eager/x':>8s} {'compile/x':>9s} {'torchao/x':>9s} "
            f"{'first s':>8s} {'GiB':>6s} {'differ':>10s} {'error':>8s}",
        ]
        for arm in self.arms:
            ms = arm.milliseconds
            if ms is None:
                lines.append(f"{arm.name:44s} {arm.failure}")
                continue
            ratios = self._ratios(ms)
            lines.append(
                f"{arm.name:44s} {ms:9.2f} {ms / self.layers:7.2f} {ratios[0]:>8s} {ratios[1]:>9s} {ratios[2]:>9s} "
                f"{arm.first_call_seconds:8.1f} {arm.peak_gib:6.1f} {arm.differing:10d} {arm.error:8.4f}"
            )
        wrong = [
            f"{arm.name}: {kernel} ran {ran} times, not {expected}"
            for arm in self.arms
            for kernel, (ran, expected) in arm.kernels.items()
            if ran != expected
        ]
        return "\n".join([*lines, *wrong])


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
) -> TransformerBench:
    """Time the transformer in every arm.

    Args:
        transformer: on a CUDA device, unmodified; left as found.
        inputs: keyword arguments of one forward.
        passes: measured cumulatively in their running order, Exact ones first.
        canvas: named in the result.
        rounds: interleaved visits to every arm.
        forwards: timed forwards per visit, after one that is not.
        cumulative: measure every step on the way to all passes, not just the end.
        leave_out: also measure all passes but one, for each.
        peers: which of the peers to run.
        profile: for the options of passes given by name.
        progress: told before each visit.

    Raises:
        DeviceError: the transformer is not on a CUDA device.
    """
    device = next(transformer.parameters()).device
    if device.type != "cuda":
        raise DeviceError("bench times GPU work. Move the transformer to a CUDA device.")
    session, asked = prepare(transformer, passes, profile)
    chosen = [one for one in asked if isinstance(one.applies(session.device, session.view), Yes)]
    bench = _Bench(transformer, inputs, session, forwards)
    plan: list[tuple[Arm, Callable[[ExitStack], Callable[[], Any]]]] = [(Arm("eager"), bench.eager)]
    plan += [(Arm(peer), getattr(bench, peer.split()[0])) for peer in peers]
    plan.append((Arm("h3opt, no pass"), partial(bench.h3opt, passes=[])))
    for count in range(1 if cumulative else len(chosen), len(chosen) + 1):
        name = f"+ {chosen[count - 1].name}" if cumulative else "h3opt, all passes"
        plan.append((Arm(name), partial(bench.h3opt, passes=chosen[:count])))
    if leave_out:
        for one in chosen:
            rest = [other for other in chosen if other is not one]
            plan.append((Arm(f"all but {one.name}"), partial(bench.h3opt, passes=rest)))
    total = rounds * len(plan)
    with torch.no_grad():
        for visit in range(rounds):
            for number, (arm, enter) in enumerate(plan):
                if progress is not None:
                    progress(arm.name, visit * len(plan) + number, total)
                if arm.failure is None:
                    bench.visit(arm, enter, first=visit == 0)
    return TransformerBench(
        Device.of(device).name,
        len(transformer.transformer_blocks),
        canvas,
        inputs["position_ids"].shape[0],
        copy_rate(device),
        gemm_rate(device),
        [arm for arm, _ in plan],
        bench.top_kernels,
    )


class _Bench:
    def __init__(self, transformer: Any, inputs: dict[str, Any], session: Session, forwards: int) -> None:
        self.transformer, self.inputs, self.session, self.forwards = transformer, inputs, session, forwards
        self.reference: tuple[torch.Tensor, ...] | None = None
        self.top_kernels: dict[str, list[tuple[str, float, float]]] = {}
        self._peers: dict[str, Any] = {}

    def visit(self, arm: Arm, enter: Callable[[ExitStack], Callable[[], Any]], first: bool) -> None:
        """Switch to an arm, check it on the first visit, time it, and switch back."""
        try:
            with ExitStack() as undo:
                started = time.perf_counter()
                forward = enter(undo)
                out = forward()
                torch.cuda.synchronize()
                if first:
                    arm.first_call_seconds = time.perf_counter() - started
                    self._check(arm, out)
                del out
                torch.cuda.reset_peak_memory_stats()
                arm.rounds.append(self._time(forward))
                arm.peak_gib = torch.cuda.max_memory_allocated() / 2**30
                if first:
                    self._profile(arm, forward)
        except Exception as error:  # one arm must not cost the others their figures; the table shows it
            arm.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        gc.collect()
        torch.cuda.empty_cache()

    def eager(self, undo: ExitStack) -> Callable[[], Any]:
        """The unmodified model."""
        return lambda: self.transformer(**self.inputs)

    def compile(self, undo: ExitStack) -> Callable[[], Any]:
        """diffusers' ``compile_repeated_blocks``, on a shallow copy that shares the weights."""
        if "compile" not in self._peers:
            model = _sharing_weights(self.transformer)
            model.compile_repeated_blocks(fullgraph=True)
            self._peers["compile"] = model
        model = self._peers["compile"]
        return lambda: model(**self.inputs)

    def torchao(self, undo: ExitStack) -> Callable[[], Any]:
        """torchao's row-wise dynamic FP8 with ``compile_repeated_blocks``."""
        if "torchao" not in self._peers:
            from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

            model = _sharing_weights(self.transformer)
            quantize_(
                model.transformer_blocks,
                Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
                filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and "adaln" not in name,
            )
            model.compile_repeated_blocks(fullgraph=True)
            self._peers["torchao"] = model
        model = self._peers["torchao"]
        return lambda: model(**self.inputs)

    def h3opt(self, undo: ExitStack, passes: Sequence[Pass]) -> Callable[[], Any]:
        """h3opt with ``passes``."""
        self.session.install(passes)
        undo.callback(self.session.uninstall)
        return lambda: self.transformer(**self.inputs)

    def _check(self, arm: Arm, out: tuple[torch.Tensor, ...]) -> None:
        if self.reference is None:
            self.reference = tuple(tensor.clone() for tensor in out)
        pairs = list(zip(self.reference, out, strict=True))
        arm.differing = sum(bits_equal(one, other).differing for one, other in pairs)
        distance = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
        size = sum(float(one.double().square().sum()) for one, _ in pairs)
        arm.error = (distance / size) ** 0.5

    def _time(self, forward: Callable[[], Any]) -> float:
        times = []
        for _ in range(self.forwards):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            forward()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def _profile(self, arm: Arm, forward: Callable[[], Any]) -> None:
        before = self.session.operators_run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            forward()
            torch.cuda.synchronize()
        events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        self.top_kernels[arm.name] = [
            (event.key[:90], event.count, event.self_device_time_total / 1e3) for event in events[:14]
        ]
        if self.session.installed:
            launches = {event.key: event.count for event in events}
            for operator, ran in self.session.operators_run().items():
                kernel, expected = kernel_names.get(operator), ran - before[operator]
                if kernel is not None:
                    arm.kernels[kernel] = (launches.get(kernel, 0), expected)


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


def _sharing_weights(model: Any) -> Any:
    """A copy of the module tree whose parameters and buffers are the original's, not copies of them."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)
