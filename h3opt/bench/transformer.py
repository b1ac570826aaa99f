"""Benchmark the transformer at its real geometry: eager, peers, and h3opt pass by pass, in one run.

The variants are the unmodified model, the peers (``compile_repeated_blocks``, torchao's row-wise FP8), and h3opt:
captured without passes, then with passes added one by one, and with each pass left out. Only ratios within one run
mean something, see :mod:`h3opt.bench.harness`.

A profiler says where the time of each variant goes: attention and matrix products against the rates they reach,
h3opt's own kernels against the bytes they must move. It also checks that every kernel of a rewritten graph ran as
often as the graph contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from h3opt.bench.harness import BenchmarkRunner, BenchResult, Progress, Variant, compare_outputs
from h3opt.bench.peers import TRANSFORMER_PEER_NAMES, TRANSFORMER_PEERS, Peer, choose_peers
from h3opt.bench.rates import copy_rate, gemm_rate
from h3opt.bench.table import Table, format_cell
from h3opt.compiler.optimize import prepare
from h3opt.compiler.session import Session
from h3opt.device import Device
from h3opt.errors import DeviceError
from h3opt.kernels.data_kinds import draw
from h3opt.metrics.bits import relative_error
from h3opt.pass_api.base import Pass
from h3opt.pass_api.ordering import strictest_first
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.minimax_h3 import ADALN_PROJECTION, transformer_blocks


@dataclass
class TransformerBench(BenchResult):
    """The result of :func:`bench_transformer`.

    Attributes:
        device: name of the GPU.
        layers: number of transformer blocks.
        canvas: size of the request, in words.
        tokens: length of the packed sequence.
        copy_tb_per_s, gemm_tflops: measured ceilings, see :func:`copy_rate` and :func:`gemm_rate`.
        attention_flop, gemm_flop: floating point operations of one forward's blocks.
        variants: the figures.
        top_kernels: variant → its longest kernels as (name, launches, milliseconds).
    """

    device: str
    layers: int
    canvas: str
    tokens: int
    copy_tb_per_s: float
    gemm_tflops: float
    attention_flop: float
    gemm_flop: float
    variants: list[Variant]
    top_kernels: dict[str, list[tuple[str, float, float]]]

    @property
    def title(self) -> str:
        return f"{self.device}, {self.layers} blocks, {self.canvas}, {self.tokens} tokens"

    @property
    def preface(self) -> str:
        return f"{self.title}; copy {self.copy_tb_per_s:.2f} TB/s, bf16 GEMM {self.gemm_tflops:.0f} TFLOP/s"

    def table(self) -> Table:
        heads = (
            "variant", "ms per forward", "ms per block", "over eager", "over compile", "over torchao FP8", "install s",
            "first call s", "peak GiB", "elements that differ from eager", "relative error", "of the first block",
            "on structured input",
        )  # fmt: skip
        return Table(heads, [self._row(variant) for variant in self.variants])

    def _row(self, variant: Variant) -> list[str]:
        milliseconds = variant.milliseconds
        if milliseconds is None:
            return [variant.name, variant.failure or "not run"]
        return [
            variant.name,
            f"{milliseconds:.1f}",
            f"{milliseconds / self.layers:.2f}",
            *(self._speedup(milliseconds, name) for name in ("eager", "compile", "torchao fp8 + compile")),
            format_cell(variant.install_seconds, ".1f"),
            format_cell(variant.first_call_seconds, ".1f"),
            format_cell(variant.peak_gib, ".1f"),
            format_cell(variant.differing, "d"),
            format_cell(variant.error, ".4f"),
            format_cell(variant.block_error, ".4f"),
            format_cell(variant.structured_error, ".4f"),
        ]

    def _speedup(self, milliseconds: float, name: str) -> str:
        base = self.variant(name)
        time = None if base is None else base.milliseconds
        return format_cell(None if time is None else time / milliseconds, ".3f")


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
    peers: Sequence[str] = TRANSFORMER_PEER_NAMES,
    profile: str = "auto",
    progress: Progress | None = None,
    after_run: Callable[[TransformerBench], None] | None = None,
) -> TransformerBench:
    """Time the transformer in every variant.

    Args:
        transformer: an unmodified transformer on a CUDA device; it is left unmodified.
        inputs: keyword arguments of one forward.
        passes: measured cumulatively, first the Exact passes that need no other pass, in their running order.
        canvas: size of the request, named in the result.
        rounds: how often every variant is run, interleaved.
        forwards: timed forwards of a variant in each round, back to back, after one forward that is not timed.
        cumulative: measure every step on the way to all passes, not only the Exact passes together and all passes.
        leave_out: also measure all passes without one, for each pass.
        peers: names of :data:`h3opt.bench.peers.TRANSFORMER_PEERS`.
        profile: source of the options of passes that are given by name; rows that depend on the number of tokens go
            by the length of the packed sequence in ``inputs``.
        progress: called before each run of a variant.
        after_run: called with the result so far after each run of a variant, so that an interrupted benchmark
            leaves the figures that it has.

    Raises:
        DeviceError: the transformer is not on a CUDA device.
        PipelineError: there is no such peer.
        H3OptError: a pass, an option or the profile is unknown.
    """
    chosen_peers = choose_peers(peers, TRANSFORMER_PEERS)
    device = next(transformer.parameters()).device
    if device.type != "cuda":
        raise DeviceError("bench times GPU work. Move the transformer to a CUDA device.")
    tokens = inputs["position_ids"].shape[0]
    session, requested = prepare(transformer, passes, profile, tokens=tokens)
    applicable = [item for item in requested if item.applies(session.device, session.view) is None]
    bench = _TransformerBenchmark(transformer, inputs, session, forwards)
    models = _models(bench, strictest_first(applicable), chosen_peers, cumulative, leave_out)
    variants = [(variant, partial(bench.forward, put_in_place=put_in_place)) for variant, put_in_place in models]
    blocks = transformer_blocks(transformer)
    linears = [
        module
        for block in blocks
        for name, module in block.named_modules()
        if isinstance(module, torch.nn.Linear) and ADALN_PROJECTION not in name
    ]
    result = TransformerBench(
        device=Device.of(device).name,
        layers=len(blocks),
        canvas=canvas,
        tokens=tokens,
        copy_tb_per_s=copy_rate(device),
        gemm_tflops=gemm_rate(device),
        attention_flop=4.0 * tokens**2 * blocks[0].attn.to_q.out_features * len(blocks),
        gemm_flop=2.0 * tokens * sum(linear.in_features * linear.out_features for linear in linears),
        variants=[variant for variant, _ in variants],
        top_kernels=bench.top_kernels,
    )
    bench.run_rounds(variants, rounds, progress, lambda: after_run(result) if after_run is not None else None)
    return result


PutInPlace = Callable[[ExitStack], Any]
"""Puts a model in place, registers with the stack how to remove it, and returns the model."""


def _models(
    bench: _TransformerBenchmark,
    groups: tuple[list[Pass], list[Pass], list[Pass]],
    peers: Sequence[Peer],
    cumulative: bool,
    leave_out: bool,
) -> list[tuple[Variant, PutInPlace]]:
    """The variants to measure; ``groups`` are the passes, the stricter promises first."""
    exact, rounding, others = groups
    passes = [*exact, *rounding, *others]
    models: list[tuple[Variant, PutInPlace]] = [(Variant("eager"), bench.eager)]
    models += [(Variant(peer.name), partial(bench.peer, peer=peer)) for peer in peers]
    models.append((Variant("h3opt, no pass"), partial(bench.h3opt, passes=[])))
    if cumulative:
        for count, added in enumerate(passes, start=1):
            models.append((Variant(f"+ {added.name}"), partial(bench.h3opt, passes=passes[:count])))
    else:
        if exact and passes != exact:
            models.append((Variant("h3opt, Exact passes"), partial(bench.h3opt, passes=exact)))
        models.append((Variant("h3opt, all passes"), partial(bench.h3opt, passes=passes)))
    if leave_out:
        for omitted in passes:
            rest = [item for item in passes if item is not omitted]
            models.append((Variant(f"all but {omitted.name}"), partial(bench.h3opt, passes=rest)))
    return models


class _TransformerBenchmark(BenchmarkRunner[Variant]):
    def __init__(self, transformer: Any, inputs: dict[str, Any], session: Session, forwards: int) -> None:
        super().__init__(session, forwards)
        self.transformer, self.inputs = transformer, inputs
        self.reference: tuple[torch.Tensor, ...] | None = None
        self.reference_delta: torch.Tensor | None = None
        self.structured_delta: torch.Tensor | None = None

    def forward(self, undo: ExitStack, put_in_place: PutInPlace) -> Callable[[], Any]:
        """The work: one forward of the model that ``put_in_place`` returns."""
        return _Forward(put_in_place(undo), self.inputs)

    def eager(self, undo: ExitStack) -> Any:
        """The unmodified model."""
        return self.transformer

    def peer(self, undo: ExitStack, peer: Peer) -> Any:
        """The model of a peer."""
        return self.peer_model(peer, self.transformer)

    def h3opt(self, undo: ExitStack, passes: Sequence[Pass]) -> Any:
        """The model with ``passes`` installed by h3opt."""
        self.session.install(passes)
        undo.callback(self.session.uninstall)
        return self.transformer

    def check(self, variant: Variant, out: tuple[torch.Tensor, ...], work: Any) -> None:
        delta, structured = _first_delta(work), _first_delta(work, _STRUCTURED)
        if self.reference is None or self.reference_delta is None or self.structured_delta is None:
            self.reference = tuple(tensor.clone() for tensor in out)
            self.reference_delta, self.structured_delta = delta, structured
        variant.block_error = relative_error(self.reference_delta, delta)
        variant.structured_error = relative_error(self.structured_delta, structured)
        variant.differing, variant.error = compare_outputs(self.reference, out)


@dataclass
class _Forward:
    model: Any
    inputs: dict[str, Any]

    def __call__(self) -> Any:
        return self.model(**self.inputs)


_STRUCTURED = "offset_0.3"
"""Kind of the structured input: V's channels are then off zero about as far as in the project's trained reference."""


def _first_delta(forward: _Forward, kind: str | None = None) -> torch.Tensor:
    """Return what the first block adds to the residual stream in one forward.

    With ``kind``, the input of the block is data of that kind with the same root mean square, instead of the input that
    the model has there. Random weights make inputs without a mean over the tokens, on which sums that lose bits look
    correct.
    """
    deltas: list[torch.Tensor] = []

    def record(proceed: Any, *args: Any, **kwargs: Any) -> Any:
        before, *others = args or (kwargs.pop("hidden_states"),)
        if kind is not None:
            data = draw(kind, before.shape, torch.Generator(before.device).manual_seed(0))
            size = before.float().square().mean().sqrt() / data.square().mean().sqrt()
            before = (data * size).to(before.dtype)
        out = proceed(before, *others, **kwargs)
        deltas.append(out - before)
        return out

    with ExitStack() as undo:
        wrap_calls(transformer_blocks(forward.model)[0], record, undo)
        forward()
    return deltas[0]
