"""The result of a verification: an entry for each pass, and the comparisons with the unmodified pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_map_only

from h3opt.compiler.report import Report
from h3opt.environment import versions
from h3opt.pass_api.promises import Perceptual, Promise, Rounding
from h3opt.pipeline.generation import GenerationSettings, Media
from h3opt.verification.difference import Difference, Spread, spreads
from h3opt.verification.faults import Finding
from h3opt.verification.latents import LatentTrace
from h3opt.verification.noise_floors import Floor, floor_hint, multiple_words, multiples

if TYPE_CHECKING:
    from h3opt.verification.bisection import Culprit


@dataclass(frozen=True)
class PassVerdict:
    """The verdict on a pass.

    Attributes:
        name, kind, promise: as registered; the promise may be the one for the trained reference.
        counts: matched and expected sites, as ``matched/expected``.
        difference: difference to the generation without the pass; over several clips, the worst of each measure.
        held: whether the promise held; ``None`` for a pass that declined, ``False`` for a pass that was idle.
        declined: the reason why the pass declined.
        idle: the reason why the pass changed nothing at all, so that nothing was verified.
        seconds: mean time of a generation with the pass, capture included.
        differences: the differences of the single clips.
        of_floors: name of a floor → ``difference`` as a multiple of it.
        left_out: difference between all passes and all passes without this pass; ``None`` if it was not measured.
        left_out_failed: the reason why the other passes do not run without this pass.
        alone: difference between the unmodified pipeline and this pass alone; ``None`` if it was not measured.
        alone_failed: the reason why the pass does nothing alone.
        culprit: the first call that the pass changed, if the promise broke and evidence was asked for.
    """

    name: str
    kind: str
    promise: Promise
    counts: str
    difference: Difference
    held: bool | None
    declined: str | None
    seconds: float
    differences: Sequence[Difference] = ()
    of_floors: Mapping[str, float] = field(default_factory=dict)
    left_out: Difference | None = None
    left_out_failed: str | None = None
    alone: Difference | None = None
    alone_failed: str | None = None
    culprit: Culprit | None = None
    idle: str | None = None

    @property
    def measured(self) -> str:
        """The difference in words, or the reason why the pass declined or was idle."""
        if self.declined or self.idle:
            return f"declined: {self.declined}" if self.declined else f"idle: {self.idle}"
        return str(self.difference)

    @property
    def of_floor(self) -> float | None:
        """``difference`` as a multiple of the noise floor; ``None`` if the floor was not measured."""
        return self.of_floors.get("ulp")

    @property
    def floor_words(self) -> str:
        """The multiple of a floor in words, e.g. ``0.4 of what compiling alone does``.

        The floor is ``compile`` if it was measured, else the noise floor. Empty without a floor or a difference.
        """
        name = "compile" if "compile" in self.of_floors else "ulp"
        if name not in self.of_floors or self.declined or self.difference.equal:
            return ""
        return multiple_words(name, self.of_floors[name])

    @property
    def tried(self) -> bool:
        """Whether the other passes were run without this pass."""
        return self.left_out is not None or self.left_out_failed is not None

    @property
    def tried_alone(self) -> bool:
        """Whether the pass was run by itself."""
        return self.alone is not None or self.alone_failed is not None

    @property
    def spread(self) -> dict[str, Spread]:
        """Worst, mean and bound of each measure over the clips; empty for a single clip."""
        return spreads(self.differences) if len(self.differences) > 1 else {}

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON-ready types, except for numbers that are not finite."""
        return {
            "name": self.name,
            "kind": self.kind,
            "promise": str(self.promise),
            "sites": self.counts,
            "held": self.held,
            "declined": self.declined,
            "idle": self.idle,
            "measured": self.measured,
            "of_noise_floor": self.of_floor,
            "of_floors": dict(self.of_floors),
            "difference": asdict(self.difference),
            "spread": {name: asdict(spread) for name, spread in self.spread.items()},
            "left_out": asdict(self.left_out) if self.left_out else None,
            "left_out_failed": self.left_out_failed,
            "alone": asdict(self.alone) if self.alone else None,
            "alone_failed": self.alone_failed,
            "culprit": self.culprit.to_dict() if self.culprit else None,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class Verdict:
    """The result of :func:`h3opt.verify`. All differences are to the unmodified pipeline unless stated otherwise.

    Attributes:
        passes: an entry for each pass, in the order in which they were added.
        capture: difference with captured graphs and no pass.
        exact_set: difference with the Exact passes that build on no other kind; ``None`` without such passes.
        exact_names: names of these passes.
        all_passes: difference with all passes, the worst of each measure over the clips.
        floors: how far the unmodified pipeline moves without h3opt, see :mod:`h3opt.verification.noise_floors`.
        reference, optimized: the shown clip, unmodified and with all passes.
        reference_seconds, optimized_seconds: mean time of a generation; the optimized pipeline had its graphs already.
        report: the report of the pipeline with all passes.
        settings: the settings of each clip.
        differences: the difference of each clip with all passes.
        shown: number of the shown clip, which is the clip that changed most.
        pairs: (unmodified, optimized) for each clip.
        traces: latents of the shown clip, unmodified and optimized.
        faults: (number of the clip, finding) for faults of the optimized clips that the unmodified clips do not have.
        reference_faults: (number of the clip, finding) for faults of the unmodified clips.
        environment: see :func:`h3opt.environment.environment`.
    """

    passes: list[PassVerdict]
    capture: Difference
    exact_set: Difference | None
    exact_names: list[str]
    all_passes: Difference
    floors: list[Floor]
    reference: Media
    optimized: Media
    reference_seconds: float
    optimized_seconds: float
    report: Report
    settings: list[GenerationSettings] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    shown: int = 0
    pairs: list[tuple[Media, Media]] = field(default_factory=list)
    traces: tuple[LatentTrace, LatentTrace] | None = None
    faults: list[tuple[int, Finding]] = field(default_factory=list)
    reference_faults: list[tuple[int, Finding]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        """Whether capture and the Exact set keep the unmodified bits, every promise held and there is no new fault."""
        exact = self.exact_set is None or self.exact_set.equal
        return exact and self.capture_equal and not self.faults and not self.broken and self.together_held

    @property
    def together(self) -> Perceptual | None:
        """How far all passes may move the output together; ``None`` without a Perceptual pass.

        LPIPS and noise power are squared distances, so the changes of independent passes add up linearly: the limit is
        the sum of the promises, with the noise floor for each Rounding pass and with what the capture moves. Changes
        in a common direction, such as a tint by every pass, add up to more and are beyond the limit.
        """
        active = [entry.promise for entry in self.passes if not entry.declined]
        perceptual = [promise for promise in active if isinstance(promise, Perceptual)]
        if not perceptual:
            return None
        rounding = sum(isinstance(promise, Rounding) for promise in active)
        floor = self.noise_floor or Difference()
        lpips = sum(promise.lpips for promise in perceptual) + rounding * floor.lpips + self.capture.lpips
        noise = rounding * _power(floor.audio_snr_db) + _power(self.capture.audio_snr_db)
        noise += sum(_power(promise.audio_snr_db) for promise in perceptual if promise.audio_snr_db is not None)
        return Perceptual(lpips, -10 * math.log10(noise) if noise else None)

    @property
    def together_held(self) -> bool:
        """Whether all passes together stay within :attr:`together`."""
        limit = self.together
        if limit is None:
            return True
        sound = (
            self.all_passes.audio_differing == 0
            if limit.audio_snr_db is None
            else self.all_passes.audio_snr_db >= limit.audio_snr_db - 1e-6
        )
        return sound and self.all_passes.lpips <= limit.lpips

    @property
    def capture_equal(self) -> bool:
        """Whether the captured pipeline without passes keeps the unmodified bits; only executor ``direct`` must."""
        return self.capture.equal or self.report.executor != "direct"

    @property
    def moved(self) -> list[str]:
        """The passes that changed any bit of the output."""
        return [entry.name for entry in self.passes if not entry.difference.equal]

    @property
    def broken(self) -> list[str]:
        """The passes whose promise did not hold."""
        return [entry.name for entry in self.passes if entry.held is False]

    @property
    def noise_floor(self) -> Difference | None:
        """The noise floor, which bounds Rounding; ``None`` if it was not measured."""
        return next((floor.difference for floor in self.floors if floor.name == "ulp"), None)

    @property
    def of_floor(self) -> float | None:
        """``all_passes`` as a multiple of the noise floor."""
        return self.of_floors.get("ulp")

    @property
    def of_floors(self) -> dict[str, float]:
        """Name of a measured floor → ``all_passes`` as a multiple of it."""
        return multiples(self.all_passes, self.floors)

    @property
    def floor_words(self) -> list[str]:
        """The multiples of all floors in words, e.g. ``0.4 of what compiling alone does``; empty for equal bits."""
        if self.all_passes.equal:
            return []
        return [multiple_words(name, multiple) for name, multiple in self.of_floors.items()]

    @property
    def floor_hint(self) -> str:
        """A hint to measure another floor, see :func:`h3opt.verification.noise_floors.floor_hint`; may be empty."""
        return floor_hint(self.all_passes, self.floors)

    @property
    def spread(self) -> dict[str, Spread]:
        """Worst, mean and bound of each measure over the clips, with all passes; empty for a single clip."""
        return spreads(self.differences) if len(self.differences) > 1 else {}

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON-ready types, without media; numbers that are not finite become ``None``."""
        data = {
            "held": self.held,
            "moved": self.moved,
            "broken": self.broken,
            "passes": [entry.to_dict() for entry in self.passes],
            "capture": asdict(self.capture),
            "exact_set": {"passes": self.exact_names, **asdict(self.exact_set)} if self.exact_set else None,
            "all_passes": asdict(self.all_passes),
            "together": {"limit": str(self.together), "held": self.together_held} if self.together else None,
            "all_passes_of_noise_floor": self.of_floor,
            "spread": {name: asdict(spread) for name, spread in self.spread.items()},
            "noise_floor": asdict(self.noise_floor) if self.noise_floor else None,
            "floors": [floor.to_dict() for floor in self.floors],
            "all_passes_of_floors": self.of_floors,
            "faults": [{"clip": clip, **finding.to_dict()} for clip, finding in self.faults],
            "reference_faults": [{"clip": clip, **finding.to_dict()} for clip, finding in self.reference_faults],
            "latents": self._latents(),
            "reference_seconds": round(self.reference_seconds, 3),
            "optimized_seconds": round(self.optimized_seconds, 3),
            "report": self.report.to_dict(),
            "settings": [settings.to_dict() for settings in self.settings],
            "environment": self.environment,
            "versions": versions(),
        }
        finite: dict[str, Any] = tree_map_only(float, lambda value: value if math.isfinite(value) else None, data)
        return finite

    def _latents(self) -> dict[str, Any] | None:
        if self.traces is None:
            return None
        reference, optimized = self.traces
        return {"reference": reference.to_dict(), "optimized": optimized.to_dict()}


def _power(snr_db: float) -> float:
    """The power of noise against the power of the signal."""
    return 10 ** (-snr_db / 10)
