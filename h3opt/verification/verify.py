"""``h3opt.verify``: what each pass does to picture and sound, held to what it promises.

The unmodified pipeline runs first. Then passes are added one by one, Exact ones first, then Rounding ones, as far as
their order allows, and every generation is compared with the one before it: the difference belongs to the pass that was
added. Exact asks for equal bits, Rounding for a change no larger than the noise floor, Perceptual for LPIPS and audio
SNR. Once all Exact passes that need no other are on, video and audio are compared with the unmodified pipeline, bit for
bit. Clips with everything on are searched for faults (:mod:`h3opt.verification.faults`) that the unmodified ones do not
have. When asked, each pass is also left out of the whole set and compared with it, or is on alone and compared with the
unmodified pipeline.

The *noise floor* is how far the unmodified pipeline moves by itself when the noise it starts from, and what its video
decoder reads, moves by one unit in the last place of their dtype. It is measured when a pass is on that may move bits,
or when asked, and changes are given as multiples of it. Compiling, another attention library, a warm cache and the next
seed move the pipeline too: :mod:`h3opt.verification.noise_floors` measures these when asked.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from h3opt.compiler.optimize import prepare, temporarily_uninstalled
from h3opt.compiler.session import Session
from h3opt.environment import environment
from h3opt.errors import H3OptError, PipelineError
from h3opt.metrics.lpips import check_lpips
from h3opt.pass_api.base import Pass
from h3opt.pass_api.ordering import strictest_first
from h3opt.pass_api.promises import Exact, Perceptual, Promise, Rounding
from h3opt.pipeline.generation import GenerationSettings, Media, generate
from h3opt.pipeline.steps import hide_progress_bars
from h3opt.pipeline.tiling.plan import tile_borders
from h3opt.profiles.schema import Profile
from h3opt.verification.bisection import bisect_pass
from h3opt.verification.difference import Difference
from h3opt.verification.evidence import check_folder
from h3opt.verification.faults import Finding, find_faults
from h3opt.verification.latents import LatentTrace, trace_latents
from h3opt.verification.noise_floors import Floor, choose_floors, generations, measure_floors, multiples
from h3opt.verification.verdict import PassVerdict, Verdict

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)`` before each generation, and once at the end."""


def verify(
    pipe: Any,
    prompts: str | Sequence[str] | None = None,
    passes: Iterable[str | Pass] | None = None,
    profile: str | Profile = "auto",
    *,
    settings: GenerationSettings | None = None,
    seeds: int = 1,
    leave_out: bool = False,
    alone: bool = False,
    floors: Iterable[str] = (),
    evidence: Path | None = None,
    on_reference: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Verdict:
    """Run the unmodified pipeline, then add passes one by one, and say what each did to picture and sound.

    The pipeline is left as it was found: passes that were installed on it are installed again.

    Args:
        pipe: a MiniMax-H3 pipeline with all components loaded.
        prompts: one or several; the worst counts. ``None`` for that of ``settings``.
        passes, profile: as for :func:`h3opt.optimize`, which also takes ``options``.
        settings: size, length, steps and first seed of what is generated.
        seeds: clips per prompt, with seeds that follow one another.
        leave_out: also take each pass out of the whole set, and compare with the whole.
        alone: also put each pass on by itself, and compare with the unmodified pipeline. One that builds on others has
            nothing to do alone.
        floors: what else the unmodified pipeline's own moves are measured by, of
            :data:`h3opt.verification.noise_floors.FLOORS`. Rounding is judged by ``ulp``, which is measured, named or
            not, if a pass may move bits.
        evidence: where to save what moved first when a promise breaks, in a folder named after the pass; ``None`` not
            to look for it. See :mod:`h3opt.verification.bisection`.
        on_reference: the pipeline is :func:`h3opt.pipeline.generation.reference_pipeline`, for which Perceptual passes
            promise less change than for just any model.
        progress: told before each generation.

    Raises:
        H3OptError: bad passes, profile or pipeline. A broken promise is no error: it is in the verdict.
    """
    settings = settings or GenerationSettings()
    if seeds < 1:
        raise PipelineError(f"{seeds} seeds make no clip. Use at least one.")
    clips = [
        dataclasses.replace(settings, prompt=prompt, seed=settings.seed + number)
        for prompt in _as_prompts(prompts, settings)
        for number in range(seeds)
    ]
    session, chosen = prepare(pipe, passes, profile, **options)
    if session.view.pipe is None:
        raise PipelineError("verify needs a whole pipeline. Pass the pipeline, not one of its models.")
    measured = choose_floors(floors, ulp=not all(isinstance(one.promise, Exact) for one in chosen))
    if measured:
        check_lpips()  # minutes of work would end there
    if evidence is not None:
        check_folder(evidence, [one.name for one in chosen])
    with temporarily_uninstalled(session.view, always_back=True), ExitStack() as undo:
        undo.callback(session.uninstall)
        if progress is not None:  # the caller shows progress of its own
            hide_progress_bars(session.view.pipe, undo)
        ladder = _Ladder(
            pipe, session, list(chosen), clips, leave_out, alone, measured, evidence, on_reference, progress
        )
        return ladder.climb()


class _Ladder:
    def __init__(
        self,
        pipe: Any,
        session: Session,
        passes: list[Pass],
        clips: list[GenerationSettings],
        leave_out: bool,
        alone: bool,
        floors: list[str],
        evidence: Path | None,
        on_reference: bool,
        progress: Progress | None,
    ) -> None:
        self.pipe, self.session, self.clips, self.progress = pipe, session, clips, progress
        self.leave_out, self.alone, self.evidence, self.on_reference = leave_out, alone, evidence, on_reference
        self.floors: list[Floor] = []
        self._floors = floors
        self.exact, *others = strictest_first(passes)
        self.others = [one for some in others for one in some]
        self.done = 0
        runs = 3 + len(passes) * (1 + leave_out) + (sum(not one.builds_on for one in passes) if alone else 0)
        self.total = runs * len(clips) + generations(floors, clips)

    def climb(self) -> Verdict:
        found_in = environment(self.session.device.name)
        (reference, reference_seconds), reference_traces = self._traced_run("unmodified pipeline")
        self.floors = measure_floors(
            self._floors, self.session.view, self.clips, reference, lambda what, clips: self._run(what, clips)[0]
        )
        found_in["floors"] = {floor.name: dict(floor.facts) for floor in self.floors if floor.facts}
        self.session.install([])
        before, _ = self._run("captured, no pass")
        capture = Difference.worst(_each(reference, before))
        verdicts: list[PassVerdict] = []
        exact_set = None
        installed: list[Pass] = []
        for one in [*self.exact, *self.others]:
            installed.append(one)
            self.session.change_passes(installed)
            after, seconds = self._run(f"+ {one.name}")
            try:
                moved = _each(before, after)
            except PipelineError as error:
                error.add_note(f"Without {one.name} the clip has another length or size than with it.")
                raise
            verdicts.append(self._judge(one, moved, seconds))
            before = after
            if self.exact and one is self.exact[-1]:
                exact_set = Difference.worst(_each(reference, after))
        (optimized, optimized_seconds), traces = self._traced_run("all passes, warm")
        report = self.session.report()
        if self.leave_out:
            verdicts = [
                self._without(one, verdict, optimized) for one, verdict in zip(installed, verdicts, strict=True)
            ]
        if self.alone:
            verdicts = [
                self._by_itself(one, verdict, reference) for one, verdict in zip(installed, verdicts, strict=True)
            ]
        if self.evidence is not None:
            verdicts = [self._bisected(installed[:n], verdict) for n, verdict in enumerate(verdicts, 1)]
        if self.progress is not None:
            self.progress("done", self.total, self.total)
        differences = _each(reference, optimized)
        shown = _furthest(differences)
        reference_faults = self._faults(reference, reference_traces)
        return Verdict(
            verdicts,
            capture,
            exact_set,
            [one.name for one in self.exact],
            Difference.worst(differences),
            self.floors,
            reference[shown],
            optimized[shown],
            reference_seconds,
            optimized_seconds,
            report,
            self.clips,
            differences,
            shown,
            list(zip(reference, optimized, strict=True)),
            (reference_traces[shown], traces[shown]),
            self._faults(optimized, traces, reference, reference_traces),
            reference_faults,
            found_in,
        )

    def _run(self, what: str, clips: Sequence[GenerationSettings] | None = None) -> tuple[list[Media], float]:
        media, seconds = [], 0.0
        for clip in self.clips if clips is None else clips:
            if self.progress is not None:
                self.progress(what, self.done, self.total)
            started = time.perf_counter()
            media.append(generate(self.pipe, clip))
            seconds += time.perf_counter() - started
            self.done += 1
        return media, seconds / len(self.clips)

    def _traced_run(self, what: str) -> tuple[tuple[list[Media], float], list[LatentTrace]]:
        traces: list[LatentTrace] = []
        with ExitStack() as undo:
            trace = trace_latents(self.session.view, undo)
            trace.ended = lambda: traces.append(trace.snapshot())
            return self._run(what), traces

    def _judge(self, one: Pass, differences: list[Difference], seconds: float) -> PassVerdict:
        entry = self.session.report()[one.name]
        difference = Difference.worst(differences)
        promise = one.promise
        if self.on_reference and isinstance(promise, Perceptual):
            promise = promise.on_reference or promise
        ulp = next((floor.difference for floor in self.floors if floor.name == "ulp"), None)
        return PassVerdict(
            one.name,
            one.kind,
            promise,
            entry.counts,
            difference,
            None if entry.declined else _holds(promise, difference, ulp),
            entry.declined,
            seconds,
            differences,
            {} if entry.declined else multiples(difference, self.floors),
        )

    def _without(self, one: Pass, verdict: PassVerdict, optimized: list[Media]) -> PassVerdict:
        try:
            self.session.change_passes([other for other in (*self.exact, *self.others) if other is not one])
            media, _ = self._run(f"all but {one.name}")
        except H3OptError as error:  # another pass builds on it
            return dataclasses.replace(verdict, left_out_failed=str(error))
        return dataclasses.replace(verdict, left_out=Difference.worst(_each(optimized, media)))

    def _by_itself(self, one: Pass, verdict: PassVerdict, reference: list[Media]) -> PassVerdict:
        if one.builds_on:
            return dataclasses.replace(verdict, alone_failed=f"nothing to do: it builds on {', '.join(one.builds_on)}")
        try:
            self.session.change_passes([one])
            media, _ = self._run(f"{one.name} alone")
        except H3OptError as error:
            return dataclasses.replace(verdict, alone_failed=str(error))
        if declined := self.session.report()[one.name].declined:
            return dataclasses.replace(verdict, alone_failed=f"declined: {declined}")
        return dataclasses.replace(verdict, alone=Difference.worst(_each(reference, media)))

    def _bisected(self, installed: list[Pass], verdict: PassVerdict) -> PassVerdict:
        if verdict.held is not False or self.evidence is None:
            return verdict
        if self.progress is not None:
            self.progress(f"bisecting {verdict.name}", self.done, self.total)
        # A stale result shows only after the clips before the one that moved.
        clips = self.clips[: _furthest(verdict.differences) + 1]
        culprit = bisect_pass(self.session, installed, clips, self.evidence / verdict.name)
        return dataclasses.replace(verdict, culprit=culprit)

    def _faults(
        self,
        media: list[Media],
        traces: list[LatentTrace],
        reference: list[Media] | None = None,
        reference_traces: list[LatentTrace] | None = None,
    ) -> list[tuple[int, Finding]]:
        found = []
        for number, clip in enumerate(self.clips):
            borders = None  # every line against the reference: a pass may have put tiles elsewhere
            if reference is None and self.session.view.vae is not None:
                borders = tile_borders(self.session.view.vae, clip.height, clip.width)
            findings = find_faults(
                media[number],
                reference=reference[number] if reference else None,
                latents=traces[number],
                reference_latents=reference_traces[number] if reference_traces else None,
                borders=borders,
            )
            found += [(number, finding) for finding in findings]
        return found


def _holds(promise: Promise, difference: Difference, floor: Difference | None) -> bool:
    if isinstance(promise, Exact):
        return difference.equal
    if isinstance(promise, Rounding):
        return difference.equal or (
            floor is not None and difference.lpips <= floor.lpips and difference.audio_snr_db >= floor.audio_snr_db
        )
    assert isinstance(promise, Perceptual)
    if promise.audio_snr_db is None:  # it says that it does not touch sound
        return difference.lpips <= promise.lpips and difference.audio_differing == 0
    return difference.lpips <= promise.lpips and difference.audio_snr_db >= promise.audio_snr_db


def _furthest(differences: Sequence[Difference]) -> int:
    """The clip that moved most."""
    return max(range(len(differences)), key=lambda clip: _moved_by(differences[clip]))


def _moved_by(difference: Difference) -> tuple[float, float, int]:
    """Orders clips by how far they moved; NaN is the furthest."""
    lpips = math.inf if math.isnan(difference.lpips) else difference.lpips
    noise = math.inf if math.isnan(difference.audio_snr_db) else -difference.audio_snr_db
    return lpips, noise, difference.video_differing + difference.audio_differing


def _each(reference: list[Media], candidate: list[Media]) -> list[Difference]:
    return list(map(Difference.between, reference, candidate))


def _as_prompts(prompts: str | Sequence[str] | None, settings: GenerationSettings) -> list[str]:
    if prompts is None:
        return [settings.prompt]
    found = [prompts] if isinstance(prompts, str) else list(prompts)
    if not found or not all(isinstance(one, str) and one.strip() for one in found):
        raise PipelineError("There is no prompt to verify with. Give at least one that is not empty.")
    return found
