"""Calibrate Perceptual promises on the trained reference: the worst measurement, with the margin defined here.

A promise below the measurement is broken. A promise far above it has no use: the pass could become many times worse
without a report. A promise is set to the worst measurement with the margin, rounded to two digits. It is *calibrated*
as long as it lies between the worst measurement and twice that margin: how FP8 rounds depends on the last bit of the
input, so measurements differ a little between machines.

Promises for any other model (``lpips`` and ``audio_snr_db`` of the promise itself) are looser: pictures with more
detail change more. They follow published measurements with the released weights, and ``h3opt verify --model`` applies
them.
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
"""The promised LPIPS over the worst measured LPIPS."""

SNR_MARGIN_DB = 6.0
"""The worst measured audio signal-to-noise ratio minus the promised ratio: 6 dB are twice the noise."""


@dataclass(frozen=True)
class Calibration:
    """A Perceptual promise and the measurement for it.

    Attributes:
        name: name of the pass.
        promise: the promise as the pass declares it.
        measured: the worst of each measure over the clips.
        clips: number of clips.
    """

    name: str
    promise: Perceptual
    measured: Difference
    clips: int

    @property
    def suggested(self) -> Perceptual:
        """The promise to declare: the worst measurement with the margin, rounded away from the measurement.

        Sound without a differing bit needs no decibels.
        """
        snr = self.measured.audio_snr_db
        return dataclasses.replace(
            self.promise,
            lpips=_two_digits_up(LPIPS_MARGIN * self.measured.lpips),
            audio_snr_db=None if self.measured.audio_differing == 0 else float(math.floor(snr - SNR_MARGIN_DB)),
        )

    @property
    def kept(self) -> bool:
        """Whether the promise allows the measurement."""
        return self.measured.lpips <= self.promise.lpips and self.measured.audio_snr_db >= _promised_snr(self.promise)

    @property
    def loose(self) -> bool:
        """Whether the promise allows more than the measurement with twice the margin."""
        suggested = self.suggested
        loosest_snr = _promised_snr(suggested) - SNR_MARGIN_DB
        return self.promise.lpips > 2 * suggested.lpips or _promised_snr(self.promise) < loosest_snr

    def to_dict(self) -> dict[str, Any]:
        """The calibration as JSON-ready types."""
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
    """Calibrate every Perceptual promise of a verification; passes that declined are left out.

    Raises:
        PipelineError: a pass made NaN, for which there is no threshold.
    """
    results = []
    for entry in verdict.passes:
        if not isinstance(entry.promise, Perceptual) or entry.declined:
            continue
        if math.isnan(entry.difference.lpips) or not entry.difference.audio_snr_db > -math.inf:
            raise PipelineError(
                f"{entry.name} makes NaN, or noise of silence. Mend it before its promise is calibrated."
            )
        results.append(Calibration(entry.name, entry.promise, entry.difference, len(verdict.settings)))
    return results


def _promised_snr(promise: Perceptual) -> float:
    return math.inf if promise.audio_snr_db is None else promise.audio_snr_db


def _two_digits_up(value: float) -> float:
    """Round up to two digits: ``0.01231`` → ``0.013``. A value with two digits stays, despite binary fractions."""
    if value == 0:
        return 0.0
    digits = 1 - math.floor(math.log10(value))
    return round(math.ceil(value * 10**digits - 1e-9) / 10**digits, digits)
