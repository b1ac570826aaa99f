"""Promises of passes about the output of the pipeline, and their text in reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exact:
    """The output is bit for bit that without the pass, for every input; NaN payloads do not count."""

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Rounding:
    """The computation is the same, with the same intermediate dtypes, but in another order of reduction.

    On the whole pipeline the difference must be within the noise floor (see :mod:`h3opt.verification.verify`), whatever
    ``ulps`` is.

    Attributes:
        ulps: the largest difference at the output of a rewritten site, in units in the last place of the largest
            magnitude in the row, for data with products in the normal range of the dtype; ``None`` for a schedule pass
            that changes the order of reductions inside a whole model. Graph passes must give a number.
    """

    ulps: int | None = 1

    def __str__(self) -> str:
        return "rounding, noise floor" if self.ulps is None else f"rounding, {self.ulps} ulp"


@dataclass(frozen=True)
class Perceptual:
    """The output changes by a lower-precision number format or an approximation, within perceptual bounds.

    Attributes:
        lpips: the largest LPIPS (AlexNet, mean over frames) against the unmodified pipeline.
        audio_snr_db: the smallest audio signal-to-noise ratio against the unmodified pipeline, in dB; ``None`` for
            a pass that does not change audio.
        site_error: for a graph pass, the largest ``‖with − without‖ / ‖without‖`` at a rewritten site, on each kind of
            data that is finite and of ordinary size (:attr:`h3opt.pass_api.examples.Draw.unit_scale`).
        on_reference: the bounds on the small trained reference model, on which the changes are smaller: twice the
            measured values; see :mod:`h3opt.verification.calibration`.
    """

    lpips: float
    audio_snr_db: float | None = None
    site_error: float | None = None
    on_reference: Perceptual | None = None

    def __str__(self) -> str:
        snr = "" if self.audio_snr_db is None else f", audio ≥ {self.audio_snr_db:g} dB"
        return f"LPIPS ≤ {self.lpips:g}{snr}"


Promise = Exact | Rounding | Perceptual
