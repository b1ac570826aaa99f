"""What each Perceptual promise should be on the trained reference: the worst that was measured, with a margin stated
here and nowhere else.

A promise below what was measured is broken. One far above it says nothing: a pass could get many times worse under it
without anybody being told. A promise is set to the worst measurement with its margin, rounded to two digits, and is
*calibrated* as long as it lies between the worst measurement and twice that margin: how FP8 rounds depends on the last
bit of what it is given, so another machine measures a little more, or less.

What passes promise for just any model (``lpips``, ``audio_snr_db`` of the promise itself) is looser: pictures with more
in them change more. It is taken from what others measured with the released weights, and ``h3opt verify --model`` holds
passes to it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from h3opt.errors import PipelineError
from h3opt.pass_api.promises import Perceptual
from h3opt.verification.difference import Difference
from h3opt.verification.verdict import Verdict

LPIPS_MARGIN = 2.0
"""A promise may be this many times the worst LPIPS that was measured."""


SNR_MARGIN_DB = 6.0
"""And this many decibels below the worst audio signal-to-noise ratio: twice the noise."""


@dataclass(frozen=True)
class Calibration:
    """One Perceptual promise beside what was measured.

    Attributes:
        name: of the pass.
        promise: as it stands in the pass.
        measured: the worst of each measure over the clips.
        clips: how many.
    """

    name: str
    promise: Perceptual
    measured: Difference
    clips: int

    @property
    def suggested(self) -> Perceptual:
        """What the promise should be: the worst with its margin, rounded away from it; sound that kept all its bits is
        not promised in decibels."""
        snr = self.measured.audio_snr_db
        return dataclasses.replace(
            self.promise,
            lpips=_two_digits_up(LPIPS_MARGIN * self.measured.lpips),
            audio_snr_db=None if self.measured.audio_differing == 0 else float(math.floor(snr - SNR_MARGIN_DB)),
        )

    @property
    def kept(self) -> bool:
        """Whether the promise allows what was measured."""
        return self.measured.lpips <= self.promise.lpips and self.measured.audio_snr_db >= _least(self.promise)

    @property
    def loose(self) -> bool:
        """Whether it allows more than what was measured with twice the margin."""
        suggested = self.suggested
        return self.promise.lpips > 2 * suggested.lpips or _least(self.promise) < _least(suggested) - SNR_MARGIN_DB

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready types."""
        return {
            "pass": self.name,
            "promise": str(self.promise),
            "measured": str(self.measured),
            "clips": self.clips,
            "suggested": str(self.suggested),
            "kept": self.kept,
            "loose": self.loose,
        }

    def __str__(self) -> str:
        state = "BROKEN" if not self.kept else "too loose" if self.loose else "calibrated"
        return (
            f"{self.name}: promises {self.promise}; worst of {self.clips} clips {self.measured}; "
            f"should promise {self.suggested}: {state}"
        )


def calibrations(verdict: Verdict) -> list[Calibration]:
    """Every Perceptual promise of a verification, of passes that did not decline.

    Raises:
        PipelineError: a pass made NaN, with which no threshold can be stated.
    """
    found = []
    for one in verdict.passes:
        if not isinstance(one.promise, Perceptual) or one.declined:
            continue
        if math.isnan(one.difference.lpips) or not one.difference.audio_snr_db > -math.inf:
            raise PipelineError(f"{one.name} makes NaN, or noise of silence. Mend it before its promise is calibrated.")
        found.append(Calibration(one.name, one.promise, one.difference, len(verdict.settings)))
    return found


def _least(promise: Perceptual) -> float:
    return math.inf if promise.audio_snr_db is None else promise.audio_snr_db


def _two_digits_up(value: float) -> float:
    """``0.01231`` → ``0.013``; exact thresholds stay, despite binary fractions."""
    if value == 0:
        return 0.0
    digits = 1 - math.floor(math.log10(value))
    return round(math.ceil(value * 10**digits - 1e-9) / 10**digits, digits)
