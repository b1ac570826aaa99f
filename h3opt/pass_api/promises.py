"""What a pass promises about the output, and the words a report uses for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exact:
    """Bits with the pass are the bits without it, for every input; NaN payloads do not count."""

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Rounding:
    """The same maths with the same rounding points, but another order of reduction.

    Attributes:
        ulps: the largest distance allowed at the output of one rewritten site, in units in the last place of the
            largest magnitude in its row, for data whose products stay in the dtype's normal range; ``None`` for a
            schedule pass that reorders the reductions inside a whole model. Graph passes must give a number.

    On the whole pipeline the pass is held to the noise floor (see :mod:`h3opt.verification.verify`), whatever the
    number.
    """

    ulps: int | None = 1

    def __str__(self) -> str:
        return "rounding, noise floor" if self.ulps is None else f"rounding, {self.ulps} ulp"


@dataclass(frozen=True)
class Perceptual:
    """A number format or an approximation changed.

    Attributes:
        lpips: the largest LPIPS (AlexNet, mean over frames) against the unmodified pipeline.
        audio_snr_db: the smallest audio signal-to-noise ratio against the unmodified pipeline, in dB; ``None`` for
            a pass that does not touch sound.
        site_error: of a graph pass: the largest ``‖with − without‖ / ‖without‖`` at one rewritten site, on each kind of
            data that is finite and of ordinary size (:attr:`h3opt.pass_api.examples.Draw.unit_scale`).
        on_reference: the same on the small trained reference, which draws plainer pictures than a model for users do:
            twice what was measured there; see :mod:`h3opt.verification.calibration`.
    """

    lpips: float
    audio_snr_db: float | None = None
    site_error: float | None = None
    on_reference: Perceptual | None = None

    def __str__(self) -> str:
        snr = "" if self.audio_snr_db is None else f", audio ≥ {self.audio_snr_db:g} dB"
        return f"LPIPS ≤ {self.lpips:g}{snr}"


Promise = Exact | Rounding | Perceptual
