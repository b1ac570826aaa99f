"""What each pass is worth in decoding: video, sound and both, arm against arm in one run.

Arms come in three groups, each compared with its own eager arm: the video decode (unmodified, its blocks compiled, then
pass by pass), the audio decode, and the pipeline's two decode steps one after the other, for passes that change how
these run together. Which group a pass belongs to is what it finds there to change. :mod:`h3opt.bench.harness` visits
and times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from h3opt.bench.harness import Arm, ArmTables, BenchmarkRunner, Progress, SetUp, distance, sharing_weights
from h3opt.bench.rates import copy_rate, gemm_rate
from h3opt.compiler.optimize import prepare
from h3opt.compiler.session import Session
from h3opt.device import Device
from h3opt.errors import PipelineError, nearest
from h3opt.metrics.audio import audio_snr_db
from h3opt.metrics.lpips import LPIPS_MIN_SIZE, check_lpips, lpips_per_frame
from h3opt.metrics.video import denormalize
from h3opt.pass_api.base import FormatPass, GraphFacts, GraphPass, Pass, SchedulePass
from h3opt.pass_api.ordering import strictest_first
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.steps import find_steps_making
from h3opt.pipeline.tiling.plan import plan_decode
from h3opt.pipeline.view import PipelineView

PEERS = ("compile",)
"""What passes are compared with besides eager."""


VIDEO, AUDIO, BOTH = "video", "audio", "video + audio"


@dataclass
class DecodeArm(Arm):
    """One way to decode.

    Attributes:
        decodes: ``"video"``, ``"audio"`` or ``"video + audio"``: the group.
        lpips: of the decoded random latents against eager, mean over frames.
        clip_lpips: the same of each clip that was encoded; the worst frame's in ``clip_worst``.
        audio_snr_db: of the decoded sound against eager, worst channel; ``None`` where no bit differs.
    """

    decodes: str = VIDEO
    lpips: float | None = None
    clip_lpips: dict[str, float] = field(default_factory=dict)
    clip_worst: dict[str, float] = field(default_factory=dict)
    audio_snr_db: float | None = None


@dataclass
class DecodeBench(ArmTables):
    """The result of :func:`bench_decode`.

    Attributes:
        tiles: calls of the video decoder that one decode makes without batching.
        profiled_tiles: how many of them the profiler saw: those of the first clip.
        copy_tb_per_s, gemm_tflops: measured ceilings; zero on a CPU.
        attention_flop, gemm_flop: of the profiled tiles.
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
    arms: list[DecodeArm]
    top_kernels: dict[str, list[tuple[str, float, float]]]

    @property
    def title(self) -> str:
        return f"{self.device}, decode {self.canvas}, {self.layers} decoder blocks, {self.tiles} tiles"

    def over(self, arm: DecodeArm, peer: str) -> float | None:
        """How many times faster an arm is than the peer of its group."""
        found = next((one for one in self.arms if (one.decodes, one.name.split(": ")[-1]) == (arm.decodes, peer)), None)
        if found is None or found.milliseconds is None or arm.milliseconds is None:
            return None
        return found.milliseconds / arm.milliseconds

    def profiled_share(self, arm: DecodeArm) -> float:
        return self.profiled_tiles / self.tiles if arm.decodes == VIDEO else 1.0

    def flop(self, arm: DecodeArm) -> tuple[float, float]:
        return (self.attention_flop, self.gemm_flop) if arm.decodes == VIDEO else (0.0, 0.0)

    def markdown(self) -> str:
        """The table for docs/benchmarks."""
        lines = [f"| {' | '.join(_HEADS)} |", "|---" * len(_HEADS) + "|"]
        lines += [f"| {' | '.join(cells)} |" for cells in self._cells()]
        return "\n".join(lines)

    def kernels_markdown(self) -> str:
        head = f"By profiler, of {self.profiled_tiles} of {self.tiles} tiles (one clip); sound whole:\n\n"
        return head + super().kernels_markdown() if any(arm.spent for arm in self.arms) else ""

    def _cells(self) -> list[list[str]]:
        rows = []
        for arm in self.arms:
            if arm.milliseconds is None:
                rows.append([arm.name, arm.failure or "not run", *[""] * (len(_HEADS) - 2)])
                continue
            worst = max(arm.clip_lpips.values(), default=None)
            rows.append(
                [
                    arm.name,
                    f"{arm.milliseconds:.1f}",
                    _number(self.over(arm, "eager"), ".3f"),
                    _number(self.over(arm, "compile"), ".3f"),
                    _number(arm.install_seconds, ".1f"),
                    _number(arm.first_call_seconds, ".1f"),
                    _number(arm.peak_gib, ".2f"),
                    _number(arm.differing, "d"),
                    _number(arm.lpips, ".2g"),
                    _number(worst, ".2g"),
                    _number(arm.audio_snr_db, ".1f"),
                ]
            )
        return rows

    def __str__(self) -> str:
        rows = [list(_HEADS), *self._cells()]
        widths = [max(len(row[column]) for row in rows if row[-1] or not column) for column in range(len(_HEADS))]
        lines = [
            row[0].ljust(widths[0])
            + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        ]
        return "\n".join(
            [self.title, *(line.rstrip() for line in lines), "", self.kernels_markdown(), *self.miscounts()]
        )


_HEADS = (
    "arm", "ms per decode", "over eager", "over compile", "install s", "first call s", "peak GiB",
    "elements that differ from eager", "LPIPS", "LPIPS on clips", "audio SNR dB",
)  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


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
    peers: Sequence[str] = PEERS,
    profile: str = "auto",
    progress: Progress | None = None,
    on_visit: Callable[[DecodeBench], None] | None = None,
) -> DecodeBench:
    """Time decoding in every arm.

    Args:
        pipe: a MiniMax-H3 pipeline with both VAEs, unmodified; left as found. Its decode steps are enough.
        inputs: ``latents [1, channels, frames, rows, columns]`` and ``audio_latents [2, channels, frames]``.
        passes: those that change decoding are measured cumulatively, the stricter promises first; the others are left
            out.
        canvas: named in the result.
        clips: by name, ``[1, 3, frames, height, width]`` as the VAE reads it: encoded by the unmodified VAE, decoded
            in every video arm, and compared with eager's.
        rounds: interleaved visits to every arm.
        decodes: timed decodes per visit, after one that is not.
        cumulative: measure every step on the way to all passes, not just the Exact ones together and all.
        leave_out: also measure all passes but one, for each.
        peers: which of :data:`PEERS` to run.
        profile: for the options of passes given by name.
        progress: told before each visit.
        on_visit: gets the result so far after each visit, so that a run that is cut short leaves what it found.

    Raises:
        PipelineError: a peer that nobody knows, or a pipeline that does not decode video and sound.
        H3OptError: anything else that was asked for is unknown.
    """
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise PipelineError(f"There is no peer {unknown[0]!r}{nearest(unknown[0], PEERS)}. Use {' or '.join(PEERS)}.")
    session, asked = prepare(pipe, passes, profile)
    view = session.view
    if view.vae is None or view.audio_vae is None or not find_steps_making(view.pipe, minimax_h3.VIDEO):
        raise PipelineError("This pipeline does not decode video and sound. Give one with both VAEs and decode steps.")
    check_lpips()
    groups = _by_group(asked, session)
    bench = _Decodes(session, inputs, decodes)
    plan: list[tuple[DecodeArm, SetUp]] = []
    for decoded in (VIDEO, AUDIO):
        plan.append((DecodeArm(f"{decoded}: eager", decodes=decoded), partial(bench.plain, what=decoded)))
        if decoded == VIDEO:
            plan += [(DecodeArm(f"{decoded}: {peer}"), getattr(bench, peer)) for peer in peers]
        plan += [
            (DecodeArm(f"{decoded}: {name}", decodes=decoded), partial(bench.h3opt, what=decoded, passes=some))
            for name, some in _steps(groups[decoded], decoded == VIDEO, cumulative, leave_out)
        ]
    before = [*groups[VIDEO], *groups[AUDIO]]
    ladder = [(f"+ {one.name}", groups[BOTH][:count]) for count, one in enumerate(groups[BOTH], start=1)]
    together = [*ladder, ("passes of either", before)] if before else ladder
    together += [(f"passes of either {name}", [*before, *some]) for name, some in ladder if before]
    plan.append((DecodeArm(f"{BOTH}: eager", decodes=BOTH), partial(bench.plain, what=BOTH)))
    plan += [
        (DecodeArm(f"{BOTH}: {name}", decodes=BOTH), partial(bench.h3opt, what=BOTH, passes=some))
        for name, some in together
    ]
    result = bench.result([arm for arm, _ in plan], canvas)
    with torch.no_grad():
        for name, clip in (clips or {}).items():
            posterior = view.vae.encode(clip.to(bench.latents.device), return_dict=False)[0]
            bench.clips[name] = posterior.mode().cpu()
    bench.rounds(plan, rounds, progress, lambda: on_visit(result) if on_visit is not None else None)
    return result


def _by_group(passes: Sequence[Pass], session: Session) -> dict[str, list[Pass]]:
    """Passes by what they change: one of the decoders, or only the two together. Others are left out."""
    view = session.view
    parts = {VIDEO: PipelineView(vae=view.vae), AUDIO: PipelineView(audio_vae=view.audio_vae)}
    parts[BOTH] = replace(view, transformer=None)
    found: dict[str, list[Pass]] = {name: [] for name in parts}
    for one in passes:
        for name, part in parts.items():
            if _changes(one, part, session, passes):
                found[name].append(one)
                break
    return found


def _changes(one: Pass, part: PipelineView, session: Session, passes: Sequence[Pass]) -> bool:
    if one.applies(session.device, part) is not None:
        return False
    if isinstance(one, (FormatPass, SchedulePass)):
        return one.expect(part) > 0
    assert isinstance(one, GraphPass)
    regions = [
        GraphFacts(region.name, region.holds or {region.name: 1}, _Each(), tuple(passes)) for region in part.regions()
    ]
    return any(one.expect(facts) != 0 for facts in regions)


class _Each(dict[Any, int]):
    """Operators of a graph that is not captured yet: one of each, so that a pass that counts them finds some."""

    def get(self, key: Any, default: Any = None) -> Any:
        return 1


def _steps(
    passes: Sequence[Pass], captured: bool, cumulative: bool, leave_out: bool
) -> list[tuple[str, Sequence[Pass]]]:
    """Named sets of passes to measure, the stricter promises first.

    ``captured`` tells whether a capture without passes is something to measure.
    """
    exact, rounding, others = strictest_first(passes)
    chosen = [*exact, *rounding, *others]
    found: list[tuple[str, Sequence[Pass]]] = [("h3opt, no pass", [])] if captured else []
    if cumulative:
        found += [(f"+ {one.name}", chosen[:count]) for count, one in enumerate(chosen, start=1)]
    else:
        found += [("h3opt, Exact passes", exact)] if exact and chosen != exact else []
        found += [("h3opt, Exact and Rounding passes", [*exact, *rounding])] if rounding and others else []
        found += [("h3opt, all passes", chosen)] if chosen else []
    if leave_out and len(chosen) > 1:
        found += [(f"all but {one.name}", [other for other in chosen if other is not one]) for one in chosen]
    return found


@dataclass
class _Decoded:
    """What one run made: sound in [-1, 1], and video as the VAE or (``in_range``) as the pipeline returns it."""

    video: torch.Tensor | None = None
    audio: torch.Tensor | None = None
    in_range: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [one for one in (self.video, self.audio) if one is not None]

    def to(self, device: torch.device | str) -> _Decoded:
        video, audio = (None if one is None else one.to(device) for one in (self.video, self.audio))
        return replace(self, video=video, audio=audio)


class _Decodes(BenchmarkRunner[DecodeArm]):
    def __init__(self, session: Session, inputs: Mapping[str, torch.Tensor], repeats: int) -> None:
        super().__init__(session, repeats)
        self.view = session.view
        self.latents, self.audio_latents = inputs["latents"], inputs["audio_latents"]
        self.clips: dict[str, torch.Tensor] = {}
        self.references: dict[str, _Decoded] = {}
        self.clip_references: dict[str, torch.Tensor] = {}
        self._compiled: Any = None

    def result(self, arms: list[DecodeArm], canvas: str) -> DecodeBench:
        """With the sizes of the work, and no figures yet."""
        vae, device = self.view.vae, self.latents.device
        plan = plan_decode(vae, self.latents.shape)
        tiles = len(plan.rows.sources) * len(plan.columns.sources)
        area = sum(b - a for a, b in plan.rows.sources) * sum(b - a for a, b in plan.columns.sources)
        decoder, blocks = vae.decoder, minimax_h3.decoder_blocks(vae)
        frames = plan.chunks.sources[0][1]
        tokens = frames * area + tiles * (decoder.num_register_tokens + 1)
        linears = [one for one in blocks.modules() if isinstance(one, torch.nn.Linear)]
        weights = sum(one.in_features * one.out_features for one in linears)
        attention = 4.0 * (tokens / tiles) * tokens * blocks[0].attn.to_q.out_features * len(blocks)
        return DecodeBench(
            Device.of(device).name,
            len(blocks),
            canvas,
            len(plan.tiles),
            tiles,
            copy_rate(device) if self.on_gpu else 0.0,
            gemm_rate(device) if self.on_gpu else 0.0,
            attention,
            2.0 * tokens * weights,
            arms,
            self.top_kernels,
        )

    def plain(self, undo: ExitStack, what: str) -> Callable[[], _Decoded]:
        """The unmodified models."""
        return partial(self.decode, what, self.view.vae)

    def compile(self, undo: ExitStack) -> Callable[[], _Decoded]:
        """``torch.compile`` of each decoder block, in a copy of the video VAE that shares the weights."""
        if self._compiled is None:
            self._compiled = sharing_weights(self.view.vae)
            for block in minimax_h3.decoder_blocks(self._compiled):
                block.compile(fullgraph=True)
        return partial(self.decode, VIDEO, self._compiled)

    def h3opt(self, undo: ExitStack, what: str, passes: Sequence[Pass]) -> Callable[[], _Decoded]:
        """h3opt with ``passes``."""
        self.session.install(passes)
        undo.callback(self.session.uninstall)
        return partial(self.decode, what, self.view.vae)

    def decode(self, what: str, vae: Any, latents: torch.Tensor | None = None) -> _Decoded:
        """Run once; other ``latents`` than the benchmark's if given."""
        if what == VIDEO:
            return _Decoded(video=vae.decode(self.latents if latents is None else latents, return_dict=False)[0])
        if what == AUDIO:
            return _Decoded(audio=self.view.audio_vae.decode(self.audio_latents, return_dict=False)[0])
        values = {"latents": self.latents, "audio_latents": self.audio_latents, "output_type": "pt"}
        state = PipelineState(values)
        for output in (minimax_h3.VIDEO, minimax_h3.AUDIO):
            find_steps_making(self.view.pipe, output)[0](self.view.pipe, state)
        video: Any = state.get("videos")
        audio: Any = state.get("audio")
        return _Decoded(video, audio, in_range=True)

    def profiled(self, arm: DecodeArm, work: Callable[..., Any]) -> Callable[..., Any] | None:
        """Of video, the first clip: a whole decode launches a hundred thousand kernels."""
        if arm.decodes == BOTH:
            return None
        if arm.decodes == AUDIO:
            return work
        first = plan_decode(self.view.vae, self.latents.shape).chunks.sources[0][1]
        return partial(work, latents=self.latents[:, :, :first])

    def check(self, arm: DecodeArm, out: _Decoded, work: Callable[..., _Decoded]) -> None:
        if arm.decodes not in self.references:  # eager is the first of its group
            self.references[arm.decodes] = out.to("cpu")
        reference = self.references[arm.decodes].to(self.latents.device)
        arm.differing, arm.error = distance(reference.tensors, out.tensors)
        arm.lpips = self._lpips(reference, out)
        if reference.audio is not None and out.audio is not None and not reference.audio.equal(out.audio):
            arm.audio_snr_db = float(audio_snr_db(reference.audio, out.audio).min())
        if arm.decodes != VIDEO:
            return
        for name, latents in self.clips.items():
            decoded = work(latents=latents.to(self.latents.device))
            assert decoded.video is not None
            expected = self.clip_references.setdefault(name, decoded.video.cpu()).to(decoded.video.device)
            per_frame = self._per_frame(_Decoded(expected), decoded)
            if per_frame is not None:
                arm.clip_lpips[name], arm.clip_worst[name] = float(per_frame.mean()), float(per_frame.max())

    def _lpips(self, reference: _Decoded, out: _Decoded) -> float | None:
        per_frame = self._per_frame(reference, out)
        return None if per_frame is None else float(per_frame.mean())

    def _per_frame(self, reference: _Decoded, out: _Decoded) -> torch.Tensor | None:
        if reference.video is None or out.video is None:
            return None
        if min(out.video.shape[-2:]) < LPIPS_MIN_SIZE:
            return None
        if reference.video.equal(out.video):
            return torch.zeros(1)
        return lpips_per_frame(self._pixels(reference), self._pixels(out))

    def _pixels(self, decoded: _Decoded) -> torch.Tensor:
        """``[1, frames, 3, height, width]`` in [0, 1]: what the pipeline's decode step makes of the VAE's output."""
        assert decoded.video is not None
        if decoded.in_range:
            return decoded.video
        return denormalize(decoded.video, self.view.pipe.pixel_mean, self.view.pipe.pixel_std)
