"""``h3opt.verify``: what each pass does to picture and sound, held to what it promises.

The unmodified pipeline runs first. Then passes are added one by one, Exact ones first as far as their order allows,
and every generation is compared with the one before it: the difference belongs to the pass that was added. Exact
asks for equal bits, Rounding for a change no larger than the noise floor, Perceptual for LPIPS and audio SNR. Once
all Exact passes that need no other are on, video and audio are compared with the unmodified pipeline, bit for bit.

The *noise floor* is how far the unmodified pipeline moves by itself when the noise it starts from moves by one unit
in the last place of the transformer's dtype.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from h3opt.calls import around
from h3opt.errors import PipelineError
from h3opt.generation import GenerationSettings, Media, generate
from h3opt.profiles import Profile
from h3opt.promises import Exact, Perceptual, Promise, Rounding
from h3opt.protocol import Pass
from h3opt.quality import audio_snr_db, bits_equal, lpips_per_frame, psnr_db
from h3opt.report import Report
from h3opt.session import Session, displaced, prepare

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)`` before each generation, and once at the end."""


@dataclass(frozen=True)
class Difference:
    """How far one generation is from another; the worst over all prompts.

    Attributes:
        video_differing, audio_differing: elements whose bits differ.
        lpips: mean over frames of the worst clip; 0 when the bits are equal.
        psnr_db: of the video.
        audio_snr_db: of the worst channel.
    """

    video_differing: int = 0
    audio_differing: int = 0
    lpips: float = 0.0
    psnr_db: float = math.inf
    audio_snr_db: float = math.inf

    @property
    def equal(self) -> bool:
        """Whether every bit of video and audio is the same."""
        return self.video_differing == 0 and self.audio_differing == 0

    @classmethod
    def between(cls, reference: Media, candidate: Media) -> Difference:
        """Compare two generations of one prompt."""
        video = bits_equal(reference.video, candidate.video)
        audio = bits_equal(reference.audio, candidate.audio)
        lpips, psnr = 0.0, math.inf
        if not video.equal:
            lpips = float(lpips_per_frame(reference.video, candidate.video).mean())
            psnr = psnr_db(reference.video, candidate.video)
        snr = math.inf if audio.equal else float(audio_snr_db(reference.audio, candidate.audio).min())
        return cls(video.differing, audio.differing, lpips, psnr, snr)

    @classmethod
    def worst(cls, differences: Iterable[Difference]) -> Difference:
        """The worst of each measure."""
        all_of = list(differences)
        return cls(
            max(one.video_differing for one in all_of),
            max(one.audio_differing for one in all_of),
            max((one.lpips for one in all_of), key=lambda lpips: math.inf if math.isnan(lpips) else lpips),
            min((one.psnr_db for one in all_of), key=_nan_lowest),
            min((one.audio_snr_db for one in all_of), key=_nan_lowest),
        )

    def __str__(self) -> str:
        if self.equal:
            return "bits equal"
        return f"LPIPS {self.lpips:.4f}, audio {self.audio_snr_db:.1f} dB"


@dataclass(frozen=True)
class PassVerdict:
    """One pass, judged.

    Attributes:
        name, kind, promise: as registered.
        counts: matched/expected sites.
        difference: from the generation without it.
        held: whether the promise held; ``None`` for a pass that declined.
        declined: why it declined.
        seconds: of the generation with it, capture included.
    """

    name: str
    kind: str
    promise: Promise
    counts: str
    difference: Difference
    held: bool | None
    declined: str | None
    seconds: float

    @property
    def measured(self) -> str:
        """In the promise's own terms."""
        return f"declined: {self.declined}" if self.declined else str(self.difference)


@dataclass
class Verdict:
    """What :func:`verify` found. Raises nothing; says all.

    Attributes:
        passes: one entry per pass, in the order they were added.
        capture: captured but with no pass on, against the unmodified pipeline.
        exact_set: the Exact passes that need no other pass, together, against the unmodified pipeline.
        all_passes: everything on, against the unmodified pipeline.
        noise_floor: how far the unmodified pipeline moves by itself; ``None`` if no pass needed it.
        reference, optimized: the media of the first prompt.
        reference_seconds, optimized_seconds: of one generation; the optimized one has its graphs already.
        report: the report of the pipeline with everything on.
        settings: what was generated.
    """

    passes: list[PassVerdict]
    capture: Difference
    exact_set: Difference | None
    exact_names: list[str]
    all_passes: Difference
    noise_floor: Difference | None
    reference: Media
    optimized: Media
    reference_seconds: float
    optimized_seconds: float
    report: Report
    settings: list[GenerationSettings] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether capture and the Exact set gave the unmodified bits and every promise held."""
        exact = self.exact_set is None or self.exact_set.equal
        return exact and self.capture_equal and all(one.held is not False for one in self.passes)

    @property
    def capture_equal(self) -> bool:
        """Whether the captured pipeline without passes gives the unmodified bits (asserted for ``direct`` only)."""
        return self.capture.equal or self.report.executor != "direct"

    @property
    def moved(self) -> list[str]:
        """The passes that changed any bit of the output."""
        return [one.name for one in self.passes if not one.difference.equal]

    @property
    def broken(self) -> list[str]:
        """The passes whose promise did not hold."""
        return [one.name for one in self.passes if one.held is False]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types, media left out; infinite decibels become ``None``."""
        passes = [
            {
                "name": one.name,
                "kind": one.kind,
                "promise": str(one.promise),
                "sites": one.counts,
                "held": one.held,
                "declined": one.declined,
                "measured": one.measured,
                "difference": asdict(one.difference),
                "seconds": round(one.seconds, 3),
            }
            for one in self.passes
        ]
        return _finite(
            {
                "held": self.held,
                "moved": self.moved,
                "broken": self.broken,
                "passes": passes,
                "capture": asdict(self.capture),
                "exact_set": {"passes": self.exact_names, **asdict(self.exact_set)} if self.exact_set else None,
                "all_passes": asdict(self.all_passes),
                "noise_floor": asdict(self.noise_floor) if self.noise_floor else None,
                "reference_seconds": round(self.reference_seconds, 3),
                "optimized_seconds": round(self.optimized_seconds, 3),
                "report": self.report.to_dict(),
                "settings": [one.to_dict() for one in self.settings],
                "versions": versions(),
            }
        )


def verify(
    pipe: Any,
    prompts: str | Sequence[str] | None = None,
    passes: Iterable[str | Pass] | None = None,
    profile: str | Profile = "auto",
    *,
    settings: GenerationSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Verdict:
    """Run the unmodified pipeline, then add passes one by one, and say what each did to picture and sound.

    The pipeline is left as it was found: passes that were installed on it are installed again.

    Args:
        pipe: a MiniMax-H3 pipeline with all components loaded.
        prompts: one or several; the worst counts. ``None`` for that of ``settings``.
        passes, profile: as for :func:`h3opt.optimize`, which also takes ``options``.
        settings: size, length, steps and seed of what is generated.
        progress: told before each generation.

    Raises:
        H3OptError: bad passes, profile or pipeline. A broken promise is no error: it is in the verdict.
    """
    settings = settings or GenerationSettings()
    clips = [
        GenerationSettings(**{**settings.to_dict(), "prompt": prompt}) for prompt in _as_prompts(prompts, settings)
    ]
    session, chosen = prepare(pipe, passes, profile, **options)
    if session.view.pipe is None:
        raise PipelineError("verify needs a whole pipeline. Pass the pipeline, not one of its models.")
    with displaced(session.view, always_back=True), ExitStack() as undo:
        undo.callback(session.uninstall)
        if progress is not None:  # the caller shows progress of its own
            session.view.hide_step_bars(undo)
        return _Ladder(pipe, session, list(chosen), clips, progress).climb()


class _Ladder:
    def __init__(
        self,
        pipe: Any,
        session: Session,
        passes: list[Pass],
        clips: list[GenerationSettings],
        progress: Progress | None,
    ) -> None:
        self.pipe, self.session, self.clips, self.progress = pipe, session, clips, progress
        self.exact, self.others = split_exact(passes)
        needs_floor = any(isinstance(one.promise, Rounding) for one in passes)
        self.done, self.total = 0, (3 + len(passes) + needs_floor) * len(clips)
        self.needs_floor = needs_floor

    def climb(self) -> Verdict:
        reference, reference_seconds = self._run("unmodified pipeline")
        floor = self._noise_floor(reference) if self.needs_floor else None
        self.session.install([])
        before, _ = self._run("captured, no pass")
        capture = _worst(reference, before)
        verdicts: list[PassVerdict] = []
        exact_set = None
        installed: list[Pass] = []
        for one in [*self.exact, *self.others]:
            installed.append(one)
            self.session.change_passes(installed)
            after, seconds = self._run(f"+ {one.name}")
            entry = self.session.report()[one.name]
            difference = _worst(before, after)
            held = None if entry.declined else _holds(one.promise, difference, floor)
            verdicts.append(
                PassVerdict(one.name, one.kind, one.promise, entry.counts, difference, held, entry.declined, seconds)
            )
            before = after
            if self.exact and one is self.exact[-1]:
                exact_set = _worst(reference, after)
        optimized, optimized_seconds = self._run("all passes, warm")
        if self.progress is not None:
            self.progress("done", self.total, self.total)
        return Verdict(
            verdicts,
            capture,
            exact_set,
            [one.name for one in self.exact],
            _worst(reference, optimized),
            floor,
            reference[0],
            optimized[0],
            reference_seconds,
            optimized_seconds,
            self.session.report(),
            self.clips,
        )

    def _run(self, what: str) -> tuple[list[Media], float]:
        media, seconds = [], 0.0
        for clip in self.clips:
            if self.progress is not None:
                self.progress(what, self.done, self.total)
            started = time.perf_counter()
            media.append(generate(self.pipe, clip))
            seconds += time.perf_counter() - started
            self.done += 1
        return media, seconds / len(self.clips)

    def _noise_floor(self, reference: list[Media]) -> Difference:
        with ExitStack() as undo:
            transformer = self.session.view.transformer
            if transformer is not None:
                around(transformer, _Nudge(next(iter(transformer.transformer_blocks.parameters())).dtype), undo)
            if self.session.view.vae is not None:  # decoding rounds too
                decoder = self.session.view.vae.decoder
                around(decoder, _Nudge(next(iter(decoder.transformer_blocks.parameters())).dtype), undo)
            return _worst(reference, self._run("noise floor")[0])


class _Nudge:
    """Moves what enters the transformer, or the video decoder, by one ulp of its dtype in every call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("hidden_states", "audio_hidden_states"):
            if name in kwargs:
                kwargs[name] = kwargs[name] * (1 + torch.finfo(self.dtype).eps)
        if args:
            args = (args[0] * (1 + torch.finfo(self.dtype).eps), *args[1:])
        return proceed(*args, **kwargs)


def split_exact(passes: Sequence[Pass]) -> tuple[list[Pass], list[Pass]]:
    """Exact passes that build on Exact ones alone, and the rest; each in running order."""
    inexact = {one.name for one in passes if not isinstance(one.promise, Exact)}
    exact = [one for one in passes if one.name not in inexact and not inexact.intersection(one.builds_on)]
    return exact, [one for one in passes if one not in exact]


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


def _nan_lowest(decibels: float) -> float:
    return -math.inf if math.isnan(decibels) else decibels


def _worst(reference: list[Media], candidate: list[Media]) -> Difference:
    return Difference.worst(map(Difference.between, reference, candidate))


def _as_prompts(prompts: str | Sequence[str] | None, settings: GenerationSettings) -> list[str]:
    if prompts is None:
        return [settings.prompt]
    found = [prompts] if isinstance(prompts, str) else list(prompts)
    if not found or not all(isinstance(one, str) and one.strip() for one in found):
        raise PipelineError("There is no prompt to verify with. Give at least one that is not empty.")
    return found


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _finite(item) for name, item in found.items()}
    if isinstance(found, list):
        return [_finite(item) for item in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def versions() -> dict[str, str]:
    """Installed versions of the packages that a figure depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("h3opt", "torch", "triton", "diffusers", "transformers", "lpips"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
