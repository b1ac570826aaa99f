"""What each pass is worth on this GPU: the transformer at its real geometry, arm against arm in one run.

Arms are the unmodified model, ``compile_repeated_blocks``, torchao's row-wise FP8 with it (if torchao is installed),
and h3opt: captured without passes, then pass by pass cumulatively, and each pass left out. Arms are interleaved over
several rounds, so that clocks that drift with power drift for all of them; only ratios within one run mean anything.

A profiler says where each arm's time goes: attention and matrix products against the rates they reach, h3opt's own
kernels against the bytes they must move, and that every kernel of a rewritten graph ran as often as the graph has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from h3opt.bench.harness import Arm, ArmTables, BenchmarkRunner, Progress, distance, sharing_weights
from h3opt.bench.peers import PEERS
from h3opt.bench.rates import copy_rate, gemm_rate
from h3opt.compiler.optimize import prepare
from h3opt.compiler.session import Session
from h3opt.device import Device
from h3opt.errors import DeviceError, PipelineError, nearest
from h3opt.kernels.data_kinds import draw
from h3opt.metrics.bits import relative_error
from h3opt.pass_api.base import Pass
from h3opt.pass_api.ordering import strictest_first
from h3opt.pipeline.hooks import wrap_calls


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
            "| first call s | peak GiB | elements that differ from eager | relative error | of the first block "
            "| on structured input |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for arm in self.arms:
            if (ms := arm.milliseconds) is None:
                lines.append(f"| {arm.name} | {arm.failure} | | | | | | | | | | | |")
                continue
            ratios = " | ".join(self._ratios(ms))
            lines.append(
                f"| {arm.name} | {ms:.1f} | {ms / self.layers:.2f} | {ratios} | {arm.install_seconds:.1f} "
                f"| {arm.first_call_seconds:.1f} | {arm.peak_gib:.1f} | {arm.differing} | {arm.error:.4f} "
                f"| {arm.block_error:.4f} | {_figure(arm.structured_error)} |"
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
            f"{'install':>8s} {'first s':>8s} {'GiB':>6s} {'differ':>10s} {'error':>8s} {'block':>8s} {'struct':>8s}",
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
                f"{arm.error:8.4f} {arm.block_error:8.4f} {_figure(arm.structured_error):>8s}"
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
    applicable = [one for one in asked if one.applies(session.device, session.view) is None]
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


class _Bench(BenchmarkRunner[Arm]):
    def __init__(self, transformer: Any, inputs: dict[str, Any], session: Session, forwards: int) -> None:
        super().__init__(session, forwards)
        self.transformer, self.inputs = transformer, inputs
        self.reference: tuple[torch.Tensor, ...] | None = None
        self.reference_delta: torch.Tensor | None = None
        self.structured_delta: torch.Tensor | None = None
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
        structured = _first_delta(work.model, work, _STRUCTURED)
        if self.reference is None or self.reference_delta is None or self.structured_delta is None:
            self.reference = tuple(tensor.clone() for tensor in out)
            self.reference_delta, self.structured_delta = delta, structured
        arm.block_error = relative_error(self.reference_delta, delta)
        arm.structured_error = relative_error(self.structured_delta, structured)
        arm.differing, arm.error = distance(self.reference, out)


@dataclass
class _Forward:
    model: Any
    inputs: dict[str, Any]

    def __call__(self) -> Any:
        return self.model(**self.inputs)


_STRUCTURED = "offset_0.3"
"""Kind of the structured input: V's channels are then off zero about as far as in the project's trained reference."""


def _first_delta(model: Any, forward: Callable[[], Any], kind: str | None = None) -> torch.Tensor:
    """What the first block adds to the residual stream in one forward.

    With ``kind``, the block's input is data of that kind, of the same root mean square, in place of what the model has
    there. Random weights make inputs without a mean over the tokens, on which sums that lose bits look right.
    """
    seen: list[torch.Tensor] = []

    def record(proceed: Any, *args: Any, **kwargs: Any) -> Any:
        before, *others = args or (kwargs.pop("hidden_states"),)
        if kind is not None:
            data = draw(kind, before.shape, torch.Generator(before.device).manual_seed(0))
            size = before.float().square().mean().sqrt() / data.square().mean().sqrt()
            before = (data * size).to(before.dtype)
        out = proceed(before, *others, **kwargs)
        seen.append(out - before)
        return out

    with ExitStack() as undo:
        wrap_calls(model.transformer_blocks[0], record, undo)
        forward()
    return seen[0]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)
