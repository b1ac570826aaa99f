"""Benchmark decoding: video, sound and both, each variant against eager in one run.

Variants come in three groups, each with its own eager variant: the video decode (unmodified, its blocks compiled, then
pass by pass), the audio decode, and the pipeline's two decode steps one after the other, for passes that change how
these run together. A pass belongs to the group where it has something to change. See :mod:`h3opt.bench.harness` for
how variants are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from h3opt.bench.harness import BenchmarkRunner, BenchResult, Progress, SetUp, Variant, compare_outputs
from h3opt.bench.peers import DECODE_PEER_NAMES, DECODE_PEERS, Peer, choose_peers
from h3opt.bench.rates import copy_rate, gemm_rate
from h3opt.bench.table import Table, format_cell
from h3opt.compiler.optimize import prepare
from h3opt.compiler.session import Session
from h3opt.device import Device
from h3opt.errors import PipelineError
from h3opt.metrics.audio import audio_snr_db
from h3opt.metrics.lpips import LPIPS_MIN_SIZE, check_lpips, lpips_per_frame
from h3opt.metrics.video import denormalize
from h3opt.pass_api.base import FormatPass, GraphFacts, GraphPass, Pass, SchedulePass
from h3opt.pass_api.ordering import strictest_first
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.steps import find_steps_making
from h3opt.pipeline.tiling.plan import plan_decode
from h3opt.pipeline.view import PipelineView

VIDEO, AUDIO, BOTH = "video", "audio", "video + audio"
"""The groups of variants, by what they decode."""


@dataclass
class DecodeVariant(Variant):
    """One way to decode, and its figures.

    Attributes:
        decodes: the group, :data:`VIDEO`, :data:`AUDIO` or :data:`BOTH`.
        lpips: LPIPS of the decoded random latents to eager, mean over frames.
        clip_lpips: name of a real clip → LPIPS of its decoded latents to eager, mean over frames.
        clip_worst: name of a real clip → LPIPS of its worst frame.
        audio_snr_db: signal-to-noise ratio of the decoded sound to eager in decibels, worst channel; ``None`` where
            no bit differs.
    """

    decodes: str = VIDEO
    lpips: float | None = None
    clip_lpips: dict[str, float] = field(default_factory=dict)
    clip_worst: dict[str, float] = field(default_factory=dict)
    audio_snr_db: float | None = None


@dataclass
class DecodeBench(BenchResult):
    """The result of :func:`bench_decode`.

    Attributes:
        device: name of the device.
        layers: number of blocks of the video decoder.
        canvas: size of the request, in words.
        tiles: calls of the video decoder in one decode without batching.
        profiled_tiles: how many of these calls the profiler saw: those of the first chunk of frames.
        copy_tb_per_s, gemm_tflops: measured ceilings; zero on a CPU.
        attention_flop, gemm_flop: floating point operations of the profiled tiles.
        variants: the figures.
        top_kernels: variant → its longest kernels as (name, launches, milliseconds).
    """

    device: str
    layers: int
    canvas: str
    tiles: int
    profiled_tiles: int
    copy_tb_per_s: float
    gemm_tflops: float
    attention_flop: float
    gemm_flop: float
    variants: list[DecodeVariant]
    top_kernels: dict[str, list[tuple[str, float, float]]]

    @property
    def title(self) -> str:
        return f"{self.device}, decode {self.canvas}, {self.layers} decoder blocks, {self.tiles} tiles"

    @property
    def kernels_title(self) -> str:
        return f"By profiler, of {self.profiled_tiles} of {self.tiles} tiles (one chunk of frames); sound whole:"

    def table(self) -> Table:
        heads = (
            "variant", "ms per decode", "over eager", "over compile", "install s", "first call s", "peak GiB",
            "elements that differ from eager", "LPIPS", "LPIPS on clips", "audio SNR dB",
        )  # fmt: skip
        return Table(heads, [self._row(variant) for variant in self.variants])

    def speedup(self, variant: DecodeVariant, base: str) -> float | None:
        """How many times faster a variant is than the variant called ``base`` of the same group."""
        same_group = (other for other in self.variants if other.decodes == variant.decodes)
        reference = next((other for other in same_group if other.name.split(": ")[-1] == base), None)
        if reference is None or reference.milliseconds is None or variant.milliseconds is None:
            return None
        return reference.milliseconds / variant.milliseconds

    def profiled_share(self, variant: DecodeVariant) -> float:
        return self.profiled_tiles / self.tiles if variant.decodes == VIDEO else 1.0

    def flop(self, variant: DecodeVariant) -> tuple[float, float]:
        return (self.attention_flop, self.gemm_flop) if variant.decodes == VIDEO else (0.0, 0.0)

    def _row(self, variant: DecodeVariant) -> list[str]:
        if variant.milliseconds is None:
            return [variant.name, variant.failure or "not run"]
        return [
            variant.name,
            f"{variant.milliseconds:.1f}",
            format_cell(self.speedup(variant, "eager"), ".3f"),
            format_cell(self.speedup(variant, "compile"), ".3f"),
            format_cell(variant.install_seconds, ".1f"),
            format_cell(variant.first_call_seconds, ".1f"),
            format_cell(variant.peak_gib, ".2f"),
            format_cell(variant.differing, "d"),
            format_cell(variant.lpips, ".2g"),
            format_cell(max(variant.clip_lpips.values(), default=None), ".2g"),
            format_cell(variant.audio_snr_db, ".1f"),
        ]


def bench_decode(
    pipe: Any,
    inputs: Mapping[str, torch.Tensor],
    passes: Sequence[str | Pass],
    *,
    canvas: str = "",
    clips: Mapping[str, torch.Tensor] | None = None,
    rounds: int = 3,
    decodes: int = 1,
    cumulative: bool = True,
    leave_out: bool = False,
    peers: Sequence[str] = DECODE_PEER_NAMES,
    profile: str = "auto",
    tokens: int | None = None,
    progress: Progress | None = None,
    after_run: Callable[[DecodeBench], None] | None = None,
) -> DecodeBench:
    """Time decoding in every variant.

    Args:
        pipe: an unmodified MiniMax-H3 pipeline with both VAEs; its decode steps are enough. It is left unmodified.
        inputs: ``latents [1, channels, frames, rows, columns]`` and ``audio_latents [2, channels, frames]``.
        passes: those that change decoding are measured cumulatively, the stricter promises first; the others are left
            out.
        canvas: size of the request, named in the result.
        clips: real clips by name, ``[1, 3, frames, height, width]`` as the VAE reads them. The unmodified VAE encodes
            them, every video variant decodes them, and the results are compared with eager's.
        rounds: how often every variant is run, interleaved.
        decodes: timed decodes of a variant in each round, after one decode that is not timed.
        cumulative: measure every step on the way to all passes, not only the Exact passes together and all passes.
        leave_out: also measure all passes without one, for each pass.
        peers: names of :data:`h3opt.bench.peers.DECODE_PEERS`.
        profile: source of the options of passes that are given by name.
        tokens: length of the transformer's packed sequence, for profile rows that depend on it.
        progress: called before each run of a variant.
        after_run: called with the result so far after each run of a variant, so that an interrupted benchmark
            leaves the figures that it has.

    Raises:
        PipelineError: there is no such peer, or the pipeline does not decode video and sound.
        H3OptError: a pass, an option or the profile is unknown.
    """
    chosen_peers = choose_peers(peers, DECODE_PEERS)
    session, requested = prepare(pipe, passes, profile, tokens=tokens)
    view = session.view
    if view.vae is None or view.audio_vae is None or not find_steps_making(view.pipe, minimax_h3.VIDEO):
        raise PipelineError("This pipeline does not decode video and sound. Give one with both VAEs and decode steps.")
    check_lpips()
    bench = _DecodeBenchmark(session, inputs, decodes)
    variants = _variants(bench, _by_group(requested, session), chosen_peers, cumulative, leave_out)
    result = bench.result([variant for variant, _ in variants], canvas)
    with torch.no_grad():
        for name, clip in (clips or {}).items():
            posterior = view.vae.encode(clip.to(bench.latents.device), return_dict=False)[0]
            bench.clips[name] = posterior.mode().cpu()
    bench.run_rounds(variants, rounds, progress, lambda: after_run(result) if after_run is not None else None)
    return result


def _variants(
    bench: _DecodeBenchmark,
    groups: Mapping[str, list[Pass]],
    peers: Sequence[Peer],
    cumulative: bool,
    leave_out: bool,
) -> list[tuple[DecodeVariant, SetUp]]:
    """The variants to measure; ``groups`` are the passes by what they change."""
    variants: list[tuple[DecodeVariant, SetUp]] = []

    def add(group: str, name: str, set_up: SetUp) -> None:
        variants.append((DecodeVariant(f"{group}: {name}", decodes=group), set_up))

    def with_passes(group: str, passes: Sequence[Pass]) -> SetUp:
        return partial(bench.h3opt, group=group, passes=passes)

    for group in (VIDEO, AUDIO):
        add(group, "eager", partial(bench.eager, group=group))
        for peer in peers if group == VIDEO else ():
            add(group, peer.name, partial(bench.peer, peer=peer))
        for name, passes in _pass_sets(groups[group], group == VIDEO, cumulative, leave_out):
            add(group, name, with_passes(group, passes))
    separate = [*groups[VIDEO], *groups[AUDIO]]
    together = [(f"+ {added.name}", groups[BOTH][:count]) for count, added in enumerate(groups[BOTH], start=1)]
    add(BOTH, "eager", partial(bench.eager, group=BOTH))
    for name, passes in together:
        add(BOTH, name, with_passes(BOTH, passes))
    if separate:
        add(BOTH, "passes of either", with_passes(BOTH, separate))
        for name, passes in together:
            add(BOTH, f"passes of either {name}", with_passes(BOTH, [*separate, *passes]))
    return variants


def _by_group(passes: Sequence[Pass], session: Session) -> dict[str, list[Pass]]:
    """Sort passes by what they change: one of the decoders, or only both together. Other passes are left out."""
    view = session.view
    parts = {VIDEO: PipelineView(vae=view.vae), AUDIO: PipelineView(audio_vae=view.audio_vae)}
    parts[BOTH] = replace(view, transformer=None)
    groups: dict[str, list[Pass]] = {name: [] for name in parts}
    for candidate in passes:
        for name, part in parts.items():
            if _changes(candidate, part, session, passes):
                groups[name].append(candidate)
                break
    return groups


def _changes(candidate: Pass, part: PipelineView, session: Session, passes: Sequence[Pass]) -> bool:
    """Whether a pass has something to change in a part of the pipeline."""
    if candidate.applies(session.device, part) is not None:
        return False
    if isinstance(candidate, (FormatPass, SchedulePass)):
        return candidate.expect(part) > 0
    assert isinstance(candidate, GraphPass)
    regions = [
        GraphFacts(region.name, region.holds or {region.name: 1}, _OneOfEach(), tuple(passes))
        for region in part.regions()
    ]
    return any(candidate.expect(facts) != 0 for facts in regions)


class _OneOfEach(dict[Any, int]):
    """Operator counts of a graph that is not captured yet: 1 for every operator, so that a pass expects a site."""

    def get(self, key: Any, default: Any = None) -> Any:
        return 1


def _pass_sets(
    passes: Sequence[Pass], captured: bool, cumulative: bool, leave_out: bool
) -> list[tuple[str, Sequence[Pass]]]:
    """Named sets of passes to measure, the stricter promises first.

    ``captured`` tells whether graphs are captured there, so that capture without passes is measured too.
    """
    exact, rounding, others = strictest_first(passes)
    ordered = [*exact, *rounding, *others]
    sets: list[tuple[str, Sequence[Pass]]] = [("h3opt, no pass", [])] if captured else []
    if cumulative:
        sets += [(f"+ {added.name}", ordered[:count]) for count, added in enumerate(ordered, start=1)]
    else:
        sets += [("h3opt, Exact passes", exact)] if exact and ordered != exact else []
        sets += [("h3opt, Exact and Rounding passes", [*exact, *rounding])] if rounding and others else []
        sets += [("h3opt, all passes", ordered)] if ordered else []
    if leave_out and len(ordered) > 1:
        for omitted in ordered:
            sets.append((f"all but {omitted.name}", [item for item in ordered if item is not omitted]))
    return sets


@dataclass
class _Decoded:
    """The output of one decode: sound in [-1, 1], and video as the VAE or, if ``in_range``, the pipeline returns it."""

    video: torch.Tensor | None = None
    audio: torch.Tensor | None = None
    in_range: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.video, self.audio) if tensor is not None]

    def to(self, device: torch.device | str) -> _Decoded:
        video, audio = (None if tensor is None else tensor.to(device) for tensor in (self.video, self.audio))
        return replace(self, video=video, audio=audio)


class _DecodeBenchmark(BenchmarkRunner[DecodeVariant]):
    def __init__(self, session: Session, inputs: Mapping[str, torch.Tensor], repeats: int) -> None:
        super().__init__(session, repeats)
        self.view = session.view
        self.latents, self.audio_latents = inputs["latents"], inputs["audio_latents"]
        self.clips: dict[str, torch.Tensor] = {}
        self.references: dict[str, _Decoded] = {}
        self.clip_references: dict[str, torch.Tensor] = {}

    def result(self, variants: list[DecodeVariant], canvas: str) -> DecodeBench:
        """The result with the amount of work, and no figures yet."""
        vae, device = self.view.vae, self.latents.device
        plan = plan_decode(vae, self.latents.shape)
        tiles = len(plan.rows.sources) * len(plan.columns.sources)
        area = sum(end - start for start, end in plan.rows.sources) * sum(
            end - start for start, end in plan.columns.sources
        )
        decoder, blocks = vae.decoder, minimax_h3.decoder_blocks(vae)
        frames = plan.chunks.sources[0][1]
        tokens = frames * area + tiles * (decoder.num_register_tokens + 1)
        linears = [module for module in blocks.modules() if isinstance(module, torch.nn.Linear)]
        weights = sum(linear.in_features * linear.out_features for linear in linears)
        return DecodeBench(
            device=Device.of(device).name,
            layers=len(blocks),
            canvas=canvas,
            tiles=len(plan.tiles),
            profiled_tiles=tiles,
            copy_tb_per_s=copy_rate(device) if self.on_gpu else 0.0,
            gemm_tflops=gemm_rate(device) if self.on_gpu else 0.0,
            attention_flop=4.0 * (tokens / tiles) * tokens * blocks[0].attn.to_q.out_features * len(blocks),
            gemm_flop=2.0 * tokens * weights,
            variants=variants,
            top_kernels=self.top_kernels,
        )

    def eager(self, undo: ExitStack, group: str) -> Callable[[], _Decoded]:
        """The unmodified models."""
        return partial(self.decode, group, self.view.vae)

    def peer(self, undo: ExitStack, peer: Peer) -> Callable[[], _Decoded]:
        """The video VAE of a peer."""
        return partial(self.decode, VIDEO, self.peer_model(peer, self.view.vae))

    def h3opt(self, undo: ExitStack, group: str, passes: Sequence[Pass]) -> Callable[[], _Decoded]:
        """The models with ``passes`` installed by h3opt."""
        self.session.install(passes)
        undo.callback(self.session.uninstall)
        return partial(self.decode, group, self.view.vae)

    def decode(self, group: str, vae: Any, latents: torch.Tensor | None = None) -> _Decoded:
        """Run one decode, of the benchmark's latents or of other video latents."""
        if group == VIDEO:
            return _Decoded(video=vae.decode(self.latents if latents is None else latents, return_dict=False)[0])
        if group == AUDIO:
            return _Decoded(audio=self.view.audio_vae.decode(self.audio_latents, return_dict=False)[0])
        values = {"latents": self.latents, "audio_latents": self.audio_latents, "output_type": "pt"}
        state = PipelineState(values)
        for output in (minimax_h3.VIDEO, minimax_h3.AUDIO):
            find_steps_making(self.view.pipe, output)[0](self.view.pipe, state)
        video: Any = state.get("videos")
        audio: Any = state.get("audio")
        return _Decoded(video, audio, in_range=True)

    def profiled(self, variant: DecodeVariant, work: Callable[..., Any]) -> Callable[..., Any] | None:
        """Of video, the first chunk of frames: a whole decode launches a hundred thousand kernels."""
        if variant.decodes == BOTH:
            return None
        if variant.decodes == AUDIO:
            return work
        first = plan_decode(self.view.vae, self.latents.shape).chunks.sources[0][1]
        return partial(work, latents=self.latents[:, :, :first])

    def check(self, variant: DecodeVariant, out: _Decoded, work: Callable[..., _Decoded]) -> None:
        if variant.decodes not in self.references:  # eager comes first in each group
            self.references[variant.decodes] = out.to("cpu")
        reference = self.references[variant.decodes].to(self.latents.device)
        variant.differing, variant.error = compare_outputs(reference.tensors, out.tensors)
        variant.lpips = self._lpips(reference, out)
        if reference.audio is not None and out.audio is not None and not reference.audio.equal(out.audio):
            variant.audio_snr_db = float(audio_snr_db(reference.audio, out.audio).min())
        if variant.decodes != VIDEO:
            return
        for name, latents in self.clips.items():
            decoded = work(latents=latents.to(self.latents.device))
            assert decoded.video is not None
            expected = self.clip_references.setdefault(name, decoded.video.cpu()).to(decoded.video.device)
            per_frame = self._lpips_per_frame(_Decoded(expected), decoded)
            if per_frame is not None:
                variant.clip_lpips[name] = float(per_frame.mean())
                variant.clip_worst[name] = float(per_frame.max())

    def _lpips(self, reference: _Decoded, out: _Decoded) -> float | None:
        per_frame = self._lpips_per_frame(reference, out)
        return None if per_frame is None else float(per_frame.mean())

    def _lpips_per_frame(self, reference: _Decoded, out: _Decoded) -> torch.Tensor | None:
        """LPIPS per frame; ``None`` without video, or where frames are too small for LPIPS."""
        if reference.video is None or out.video is None:
            return None
        if min(out.video.shape[-2:]) < LPIPS_MIN_SIZE:
            return None
        if reference.video.equal(out.video):
            return torch.zeros(1)
        return lpips_per_frame(self._pixels(reference), self._pixels(out))

    def _pixels(self, decoded: _Decoded) -> torch.Tensor:
        """Pixels ``[1, frames, 3, height, width]`` in [0, 1], scaled as in the pipeline's decode step."""
        assert decoded.video is not None
        if decoded.in_range:
            return decoded.video
        return denormalize(decoded.video, self.view.pipe.pixel_mean, self.view.pipe.pixel_std)
