"""``h3opt.verify``: compare picture and sound of each pass with its promise.

The unmodified pipeline runs first. Then passes are added one by one, Exact passes first, then Rounding passes, as far
as their order allows, and every generation is compared with the one before: the difference belongs to the pass that was
added. Exact asks for equal bits, Rounding for a change no larger than the noise floor, Perceptual for LPIPS and audio
SNR. Once all Exact passes that build on no other kind are on, video and audio are compared with the unmodified
pipeline, bit for bit. Clips with all passes on are searched for faults (:mod:`h3opt.verification.faults`) that the
unmodified clips do not have. On request, each pass is also left out of the whole set, which is compared with the whole
set, or is on alone and compared with the unmodified pipeline.

The *noise floor* is how far the unmodified pipeline moves when the initial noise, and the input of the video decoder,
move by one unit in the last place (ulp) of their dtype. It is measured when a pass may move bits, or on request, and
changes are given as multiples of it. Compiling, another attention library, a warm cache and the next seed move the
pipeline too: :mod:`h3opt.verification.noise_floors` measures these on request.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from h3opt.pipeline.sequence_length import sequence_length
from h3opt.pipeline.steps import hide_progress_bars
from h3opt.pipeline.tiling.plan import tile_borders
from h3opt.pipeline.view import PipelineView
from h3opt.profiles.schema import Profile
from h3opt.verification.bisection import bisect_pass
from h3opt.verification.difference import Difference
from h3opt.verification.evidence import check_folder
from h3opt.verification.faults import Finding, find_faults
from h3opt.verification.latents import LatentTrace, trace_latents
from h3opt.verification.noise_floors import Floor, choose_floors, count_generations, measure_floors, multiples
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
    """Run the unmodified pipeline, then add passes one by one, and measure what each changes in picture and sound.

    Passes that were installed on the pipeline before are installed again at the end.

    Args:
        pipe: a MiniMax-H3 pipeline with all components loaded.
        prompts: one or several prompts; the worst result counts. ``None`` uses the prompt of ``settings``.
        passes, profile: as for :func:`h3opt.optimize`.
        settings: size, length, steps and first seed of the clips.
        seeds: clips per prompt, with seeds that are counted up from the first.
        leave_out: also run all passes without each one, and compare with all passes.
        alone: also run each pass by itself, and compare with the unmodified pipeline. A pass that builds on others has
            nothing to do alone.
        floors: names of :data:`h3opt.verification.noise_floors.FLOORS` to measure. Rounding is judged by ``ulp``,
            which is always measured if a pass may move bits.
        evidence: folder for the tensors that show a broken promise, in a subfolder named after the pass; ``None`` to
            skip the search for them. See :mod:`h3opt.verification.bisection`.
        on_reference: the pipeline is :func:`h3opt.pipeline.generation.reference_pipeline`, for which Perceptual passes
            promise less change than for other models.
        progress: called before each generation.
        options: as for :func:`h3opt.optimize`. ``tokens`` is the length of the longest packed sequence of the clips
            if it is left out, see :func:`h3opt.pipeline.sequence_length.sequence_length`.

    Raises:
        H3OptError: bad passes, profile or pipeline. A broken promise is no error: the verdict reports it.
    """
    settings = settings or GenerationSettings()
    if seeds < 1:
        raise PipelineError(f"{seeds} seeds make no clip. Use at least one.")
    requests = [
        dataclasses.replace(settings, prompt=prompt, seed=settings.seed + number)
        for prompt in _as_prompts(prompts, settings)
        for number in range(seeds)
    ]
    if PipelineView.of(pipe).pipe is None:
        raise PipelineError("verify needs a whole pipeline. Pass the pipeline, not one of its models.")
    options.setdefault("tokens", max(sequence_length(pipe, request) for request in requests))
    session, chosen = prepare(pipe, passes, profile, **options)
    floor_names = choose_floors(floors, ulp=not all(isinstance(item.promise, Exact) for item in chosen))
    if floor_names:
        check_lpips()  # now, and not after minutes of work
    if evidence is not None:
        check_folder(evidence, [item.name for item in chosen])
    with temporarily_uninstalled(session.view, always_back=True), ExitStack() as undo:
        undo.callback(session.uninstall)
        if progress is not None:  # the caller shows progress
            hide_progress_bars(session.view.pipe, undo)
        verification = _Verification(
            pipe, session, list(chosen), requests, leave_out, alone, floor_names, evidence, on_reference, progress
        )
        return verification.run()


@dataclass
class _Verification:
    """One call of :func:`verify`; the attributes are its arguments, resolved."""

    pipe: Any
    session: Session
    passes: list[Pass]
    requests: list[GenerationSettings]
    leave_out: bool
    alone: bool
    floor_names: list[str]
    evidence: Path | None
    on_reference: bool
    progress: Progress | None
    floors: list[Floor] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        self.exact, rounding, others = strictest_first(self.passes)
        self.inexact = [*rounding, *others]
        runs = 3 + len(self.passes) * (1 + self.leave_out)
        if self.alone:
            runs += sum(not item.builds_on for item in self.passes)
        self.total = runs * len(self.requests) + count_generations(self.floor_names, self.requests)

    def run(self) -> Verdict:
        facts = environment(self.session.device.name)
        (reference, reference_seconds), reference_traces = self._run_traced("unmodified pipeline")
        self.floors = measure_floors(
            self.floor_names,
            self.session.view,
            self.requests,
            reference,
            lambda what, requests: self._run(what, requests)[0],
        )
        facts["floors"] = {floor.name: dict(floor.facts) for floor in self.floors if floor.facts}
        self.session.install([])
        before, _ = self._run("captured, no pass")
        capture = Difference.worst(_compare(reference, before))
        verdicts: list[PassVerdict] = []
        exact_set = None
        installed: list[Pass] = []
        for added in [*self.exact, *self.inexact]:
            installed.append(added)
            self.session.change_passes(installed)
            after, seconds = self._run(f"+ {added.name}")
            try:
                differences = _compare(before, after)
            except PipelineError as error:
                error.add_note(f"Without {added.name} the clip has another length or size than with it.")
                raise
            verdicts.append(self._judge(added, differences, seconds))
            before = after
            if self.exact and added is self.exact[-1]:
                exact_set = Difference.worst(_compare(reference, after))
        (optimized, optimized_seconds), traces = self._run_traced("all passes, warm")
        report = self.session.report()
        pairs = list(zip(installed, verdicts, strict=True))
        if self.leave_out:
            verdicts = [self._judge_left_out(item, verdict, optimized) for item, verdict in pairs]
            pairs = list(zip(installed, verdicts, strict=True))
        if self.alone:
            verdicts = [self._judge_alone(item, verdict, reference) for item, verdict in pairs]
        if self.evidence is not None:
            verdicts = [self._bisect(installed[:count], verdict) for count, verdict in enumerate(verdicts, 1)]
        if self.progress is not None:
            self.progress("done", self.total, self.total)
        differences = _compare(reference, optimized)
        shown = _most_changed(differences)
        return Verdict(
            passes=verdicts,
            capture=capture,
            exact_set=exact_set,
            exact_names=[item.name for item in self.exact],
            all_passes=Difference.worst(differences),
            floors=self.floors,
            reference=reference[shown],
            optimized=optimized[shown],
            reference_seconds=reference_seconds,
            optimized_seconds=optimized_seconds,
            report=report,
            settings=self.requests,
            differences=differences,
            shown=shown,
            pairs=list(zip(reference, optimized, strict=True)),
            traces=(reference_traces[shown], traces[shown]),
            faults=self._find_faults(optimized, traces, reference, reference_traces),
            reference_faults=self._find_faults(reference, reference_traces),
            environment=facts,
        )

    def _run(self, what: str, requests: Sequence[GenerationSettings] | None = None) -> tuple[list[Media], float]:
        """Generate all clips, or other clips; returns them with the mean seconds of one."""
        media, seconds = [], 0.0
        for request in self.requests if requests is None else requests:
            if self.progress is not None:
                self.progress(what, self.done, self.total)
            started = time.perf_counter()
            media.append(generate(self.pipe, request))
            seconds += time.perf_counter() - started
            self.done += 1
        return media, seconds / len(self.requests)

    def _run_traced(self, what: str) -> tuple[tuple[list[Media], float], list[LatentTrace]]:
        traces: list[LatentTrace] = []
        with ExitStack() as undo:
            trace = trace_latents(self.session.view, undo)
            trace.ended = lambda: traces.append(trace.snapshot())
            return self._run(what), traces

    def _judge(self, added: Pass, differences: list[Difference], seconds: float) -> PassVerdict:
        entry = self.session.report()[added.name]
        difference = Difference.worst(differences)
        promise = added.promise
        if self.on_reference and isinstance(promise, Perceptual):
            promise = promise.on_reference or promise
        ulp = next((floor.difference for floor in self.floors if floor.name == "ulp"), None)
        return PassVerdict(
            added.name,
            added.kind,
            promise,
            entry.counts,
            difference,
            None if entry.declined else entry.idle is None and holds(promise, difference, ulp),
            entry.declined,
            seconds,
            differences,
            {} if entry.declined else multiples(difference, self.floors),
            idle=entry.idle,
        )

    def _judge_left_out(self, omitted: Pass, verdict: PassVerdict, optimized: list[Media]) -> PassVerdict:
        try:
            self.session.change_passes([item for item in (*self.exact, *self.inexact) if item is not omitted])
            media, _ = self._run(f"all but {omitted.name}")
        except H3OptError as error:  # another pass builds on this pass
            return dataclasses.replace(verdict, left_out_failed=str(error))
        return dataclasses.replace(verdict, left_out=Difference.worst(_compare(optimized, media)))

    def _judge_alone(self, single: Pass, verdict: PassVerdict, reference: list[Media]) -> PassVerdict:
        if single.builds_on:
            reason = f"nothing to do: it builds on {', '.join(single.builds_on)}"
            return dataclasses.replace(verdict, alone_failed=reason)
        try:
            self.session.change_passes([single])
            media, _ = self._run(f"{single.name} alone")
        except H3OptError as error:
            return dataclasses.replace(verdict, alone_failed=str(error))
        if declined := self.session.report()[single.name].declined:
            return dataclasses.replace(verdict, alone_failed=f"declined: {declined}")
        return dataclasses.replace(verdict, alone=Difference.worst(_compare(reference, media)))

    def _bisect(self, installed: list[Pass], verdict: PassVerdict) -> PassVerdict:
        if verdict.held is not False or verdict.idle or self.evidence is None:
            return verdict
        if self.progress is not None:
            self.progress(f"bisecting {verdict.name}", self.done, self.total)
        # Earlier clips are generated too: a stale result shows only after them.
        requests = self.requests[: _most_changed(verdict.differences) + 1]
        culprit = bisect_pass(self.session, installed, requests, self.evidence / verdict.name)
        return dataclasses.replace(verdict, culprit=culprit)

    def _find_faults(
        self,
        media: list[Media],
        traces: list[LatentTrace],
        reference: list[Media] | None = None,
        reference_traces: list[LatentTrace] | None = None,
    ) -> list[tuple[int, Finding]]:
        """(number of the clip, finding) for all faults of the clips."""
        faults = []
        for number, request in enumerate(self.requests):
            borders = None  # every line is compared with the reference: a pass may have moved the tiles
            if reference is None and self.session.view.vae is not None:
                borders = tile_borders(self.session.view.vae, request.height, request.width)
            findings = find_faults(
                media[number],
                reference=reference[number] if reference else None,
                latents=traces[number],
                reference_latents=reference_traces[number] if reference_traces else None,
                borders=borders,
            )
            faults += [(number, finding) for finding in findings]
        return faults


def holds(promise: Promise, difference: Difference, floor: Difference | None) -> bool:
    """Whether a difference keeps a promise.

    Args:
        promise: what the pass promises.
        difference: what the pass changed.
        floor: the noise floor, which bounds Rounding.
    """
    if isinstance(promise, Exact):
        return difference.equal
    if isinstance(promise, Rounding):
        return difference.equal or (
            floor is not None and difference.lpips <= floor.lpips and difference.audio_snr_db >= floor.audio_snr_db
        )
    assert isinstance(promise, Perceptual)
    if promise.audio_snr_db is None:  # the pass promises not to change the sound
        return difference.lpips <= promise.lpips and difference.audio_differing == 0
    return difference.lpips <= promise.lpips and difference.audio_snr_db >= promise.audio_snr_db


def _most_changed(differences: Sequence[Difference]) -> int:
    """The number of the clip that changed most."""
    return max(range(len(differences)), key=lambda number: _change(differences[number]))


def _change(difference: Difference) -> tuple[float, float, int]:
    """A sort key that is larger for a larger change: LPIPS, then noise of the sound, then bits; NaN is the largest."""
    lpips = math.inf if math.isnan(difference.lpips) else difference.lpips
    noise = math.inf if math.isnan(difference.audio_snr_db) else -difference.audio_snr_db
    return lpips, noise, difference.video_differing + difference.audio_differing


def _compare(reference: list[Media], candidate: list[Media]) -> list[Difference]:
    return list(map(Difference.between, reference, candidate))


def _as_prompts(prompts: str | Sequence[str] | None, settings: GenerationSettings) -> list[str]:
    if prompts is None:
        return [settings.prompt]
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise PipelineError("There is no prompt to verify with. Give at least one that is not empty.")
    return texts
