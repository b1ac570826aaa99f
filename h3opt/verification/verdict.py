"""What a verification found: one entry per pass, and the comparisons with the unmodified pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from h3opt.compiler.report import Report
from h3opt.environment import versions
from h3opt.pass_api.promises import Promise
from h3opt.pipeline.generation import GenerationSettings, Media
from h3opt.verification.difference import Difference, Spread, spreads
from h3opt.verification.faults import Finding
from h3opt.verification.latents import LatentTrace
from h3opt.verification.noise_floors import Floor, floor_hint, multiple_words, multiples

if TYPE_CHECKING:
    from h3opt.verification.bisection import Culprit


@dataclass(frozen=True)
class PassVerdict:
    """One pass, judged.

    Attributes:
        name, kind, promise: as registered.
        counts: matched/expected sites.
        difference: from the generation without it; of several clips, the worst of each measure.
        held: whether the promise held; ``None`` for a pass that declined.
        declined: why it declined.
        seconds: of the generation with it, capture included.
        differences: of each clip.
        of_floors: ``difference`` as a multiple of each floor that was measured, by name.
        left_out: from all passes on to all but this one; ``None`` unless asked for.
        left_out_failed: why the rest does not run without it.
        alone: from the unmodified pipeline to this pass alone; ``None`` unless asked for.
        alone_failed: why it does nothing alone.
        culprit: what moved first, if the promise broke and was bisected.
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

    @property
    def measured(self) -> str:
        """In the promise's own terms."""
        return f"declined: {self.declined}" if self.declined else str(self.difference)

    @property
    def of_floor(self) -> float | None:
        """``difference`` as a multiple of the noise floor; ``None`` where none was measured."""
        return self.of_floors.get("ulp")

    @property
    def floor_words(self) -> str:
        """How far it moved as a sentence's end: ``0.4 of what compiling alone does`` if that was measured, else
        ``0.4 of the noise floor``; empty where nothing was, or nothing moved."""
        name = "compile" if "compile" in self.of_floors else "ulp"
        if name not in self.of_floors or self.declined or self.difference.equal:
            return ""
        return multiple_words(name, self.of_floors[name])

    @property
    def tried(self) -> bool:
        """Whether the rest was run without it."""
        return self.left_out is not None or self.left_out_failed is not None

    @property
    def tried_alone(self) -> bool:
        """Whether it was run by itself."""
        return self.alone is not None or self.alone_failed is not None

    @property
    def spread(self) -> dict[str, Spread]:
        """Worst, mean and bound of each measure over the clips; empty for a single clip."""
        return spreads(self.differences) if len(self.differences) > 1 else {}

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types, but for what is not finite."""
        return {
            "name": self.name,
            "kind": self.kind,
            "promise": str(self.promise),
            "sites": self.counts,
            "held": self.held,
            "declined": self.declined,
            "measured": self.measured,
            "of_noise_floor": self.of_floor,
            "of_floors": dict(self.of_floors),
            "difference": asdict(self.difference),
            "spread": {name: asdict(one) for name, one in self.spread.items()},
            "left_out": asdict(self.left_out) if self.left_out else None,
            "left_out_failed": self.left_out_failed,
            "alone": asdict(self.alone) if self.alone else None,
            "alone_failed": self.alone_failed,
            "culprit": self.culprit.to_dict() if self.culprit else None,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class Verdict:
    """What :func:`h3opt.verify` found. Raises nothing; says all.

    Attributes:
        passes: one entry per pass, in the order they were added.
        capture: captured but with no pass on, against the unmodified pipeline.
        exact_set: the Exact passes that need no other pass, together, against the unmodified pipeline.
        all_passes: everything on, against the unmodified pipeline.
        floors: how far the unmodified pipeline moves by itself, see :mod:`h3opt.verification.noise_floors`.
        reference, optimized: the media of the clip that moved most, with everything on.
        reference_seconds, optimized_seconds: of one generation; the optimized one has its graphs already.
        report: the report of the pipeline with everything on.
        settings: what was generated, one a clip.
        differences: of each clip, everything on against the unmodified pipeline.
        shown: which clip ``reference`` and ``optimized`` are.
        pairs: (unmodified, optimized) of each clip.
        traces: latents of the shown clip, unmodified and optimized.
        faults: (clip, finding) for what the optimized clips have and the unmodified ones do not.
        reference_faults: (clip, finding) for what the unmodified clips have.
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
        """Whether capture and the Exact set gave the unmodified bits, every promise held and no fault appeared."""
        exact = self.exact_set is None or self.exact_set.equal
        return exact and self.capture_equal and not self.faults and all(one.held is not False for one in self.passes)

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

    @property
    def noise_floor(self) -> Difference | None:
        """The floor that Rounding is judged by; ``None`` if no pass needed it."""
        return next((floor.difference for floor in self.floors if floor.name == "ulp"), None)

    @property
    def of_floor(self) -> float | None:
        """``all_passes`` as a multiple of the noise floor."""
        return self.of_floors.get("ulp")

    @property
    def of_floors(self) -> dict[str, float]:
        """``all_passes`` as a multiple of each floor that was measured."""
        return multiples(self.all_passes, self.floors)

    @property
    def floor_words(self) -> list[str]:
        """The same in words, e.g. ``0.4 of what compiling alone does``; empty where nothing moved."""
        if self.all_passes.equal:
            return []
        return [multiple_words(name, multiple) for name, multiple in self.of_floors.items()]

    @property
    def floor_hint(self) -> str:
        """What else to measure, where the noise floor says too little; empty elsewhere."""
        return floor_hint(self.all_passes, self.floors)

    @property
    def spread(self) -> dict[str, Spread]:
        """Worst, mean and bound of each measure over the clips, everything on; empty for a single clip."""
        return spreads(self.differences) if len(self.differences) > 1 else {}

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types, media left out; what is not finite becomes ``None``."""
        return _finite(
            {
                "held": self.held,
                "moved": self.moved,
                "broken": self.broken,
                "passes": [one.to_dict() for one in self.passes],
                "capture": asdict(self.capture),
                "exact_set": {"passes": self.exact_names, **asdict(self.exact_set)} if self.exact_set else None,
                "all_passes": asdict(self.all_passes),
                "all_passes_of_noise_floor": self.of_floor,
                "spread": {name: asdict(one) for name, one in self.spread.items()},
                "noise_floor": asdict(self.noise_floor) if self.noise_floor else None,
                "floors": [one.to_dict() for one in self.floors],
                "all_passes_of_floors": self.of_floors,
                "faults": [{"clip": clip, **one.to_dict()} for clip, one in self.faults],
                "reference_faults": [{"clip": clip, **one.to_dict()} for clip, one in self.reference_faults],
                "latents": self._latents(),
                "reference_seconds": round(self.reference_seconds, 3),
                "optimized_seconds": round(self.optimized_seconds, 3),
                "report": self.report.to_dict(),
                "settings": [one.to_dict() for one in self.settings],
                "environment": self.environment,
                "versions": versions(),
            }
        )

    def _latents(self) -> dict[str, Any] | None:
        if self.traces is None:
            return None
        reference, optimized = self.traces
        return {"reference": reference.to_dict(), "optimized": optimized.to_dict()}


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _finite(item) for name, item in found.items()}
    if isinstance(found, (list, tuple)):
        return [_finite(item) for item in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
