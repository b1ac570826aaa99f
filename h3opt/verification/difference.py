"""Measure how far two generations are apart, over one clip and over several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from h3opt.metrics.audio import audio_snr_db, av_offset, log_spectral_distance_db, si_sdr_db
from h3opt.metrics.bits import bits_equal
from h3opt.metrics.lpips import lpips_per_frame
from h3opt.metrics.video import psnr_db, ssim_per_frame, temporal_difference
from h3opt.pipeline.generation import Media

CONFIDENCE = 0.95
"""The confidence of every bound on a mean."""


@dataclass(frozen=True)
class Difference:
    """How far a generation is from a reference; over several clips, the worst value of each measure.

    Attributes:
        video_differing, audio_differing: number of elements that differ in any bit.
        lpips: mean LPIPS over frames; 0 for equal bits.
        psnr_db: peak signal-to-noise ratio of the video.
        audio_snr_db: signal-to-noise ratio of the worst channel.
        worst_frame_lpips: LPIPS of the worst frame.
        ssim: mean SSIM over frames.
        temporal_difference: mean over time, see :func:`h3opt.metrics.video.temporal_difference`.
        audio_si_sdr_db, audio_log_spectral_db: of the worst channel.
        av_offset_frames: by how many frames the sound is later against the picture than in the reference.
    """

    video_differing: int = 0
    audio_differing: int = 0
    lpips: float = 0.0
    psnr_db: float = math.inf
    audio_snr_db: float = math.inf
    worst_frame_lpips: float = 0.0
    ssim: float = 1.0
    temporal_difference: float = 0.0
    audio_si_sdr_db: float = math.inf
    audio_log_spectral_db: float = 0.0
    av_offset_frames: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether every bit of video and audio is the same."""
        return self.video_differing == 0 and self.audio_differing == 0

    @classmethod
    def between(cls, reference: Media, candidate: Media) -> Difference:
        """Compare two generations of one prompt.

        Raises:
            PipelineError: the generations differ in length or size.
        """
        video, audio = (reference.video, candidate.video), (reference.audio, candidate.audio)
        measures: dict[str, Any] = {
            "video_differing": bits_equal(*video).differing,
            "audio_differing": bits_equal(*audio).differing,
        }
        if measures["video_differing"]:
            lpips = lpips_per_frame(*video)
            measures |= {
                "lpips": float(lpips.mean()),
                "worst_frame_lpips": float(lpips.max()),  # NaN if one frame is
                "psnr_db": psnr_db(*video),
                "ssim": float(ssim_per_frame(*video).mean()),
                "temporal_difference": float(temporal_difference(*video).mean()),
            }
        if measures["audio_differing"]:
            measures |= {
                "audio_snr_db": float(audio_snr_db(*audio).min()),
                "audio_si_sdr_db": float(si_sdr_db(*audio).min()),
                "audio_log_spectral_db": float(log_spectral_distance_db(*audio).max()),
            }
        if measures["video_differing"] or measures["audio_differing"]:
            measures["av_offset_frames"] = av_offset(video, audio, reference.sampling_rate)
        return cls(**measures)

    @classmethod
    def worst(cls, differences: Iterable[Difference]) -> Difference:
        """Take the worst value of each measure; NaN is worse than any number."""
        clips = list(differences)
        names = [measure.name for measure in fields(cls)]
        return cls(**{name: max((getattr(clip, name) for clip in clips), key=_badness(name)) for name in names})

    def over(self, floor: Difference) -> float:
        """Return this difference as a multiple of ``floor``: the larger of the ratio of LPIPS and of noise amplitudes.

        The multiple is 0 for equal bits, and infinite where the floor is 0 and this difference is not. An audio SNR
        that is 6 dB lower is a factor of two.
        """
        picture = _ratio(self.lpips, floor.lpips)
        sound = _ratio(_amplitude(self.audio_snr_db), _amplitude(floor.audio_snr_db))
        return max(picture, sound, key=_nan_worst)

    def to_dict(self) -> dict[str, Any]:
        """The measures by name."""
        return asdict(self)

    def __str__(self) -> str:
        if self.equal:
            return "bits equal"
        lpips = "<0.0001" if 0 < self.lpips < 5e-5 else f"{self.lpips:.4f}"
        sound = "audio equal" if self.audio_differing == 0 else f"audio {self.audio_snr_db:.1f} dB"
        return f"LPIPS {lpips}, {sound}"


@dataclass(frozen=True)
class Spread:
    """One measure over several clips.

    Attributes:
        clips: number of clips.
        worst, mean: worst and mean value.
        bound: the mean is no worse than this with confidence :data:`CONFIDENCE`; ``None`` for a single clip, or if a
            value is not finite.
    """

    clips: int
    worst: float
    mean: float
    bound: float | None

    @classmethod
    def of(cls, values: Sequence[float], badness: Callable[[float], float] = float) -> Spread:
        """Summarise ``values``.

        The bound is the one-sided Student t bound of a mean, ``mean ± t(0.95, n - 1) s / sqrt(n)`` (Student, "The
        Probable Error of a Mean", Biometrika 1908). It assumes independent clips and a mean that is nearly normally
        distributed, which does not hold for few clips with long tails; the worst value is needed too.

        Args:
            values: a value for each clip.
            badness: a key that is larger for a worse value.
        """
        count, worst = len(values), max(values, key=badness)
        mean = sum(values) / count
        bound = None
        if count > 1 and all(map(math.isfinite, values)):
            from scipy.stats import t

            deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
            margin = float(t.ppf(CONFIDENCE, count - 1)) * deviation / math.sqrt(count)
            bound = mean + math.copysign(margin, badness(1.0) - badness(0.0))
        return cls(count, worst, mean, bound)


def spreads(differences: Sequence[Difference]) -> dict[str, Spread]:
    """Summarise each measure over several clips, by name."""
    return {
        measure.name: Spread.of([float(getattr(clip, measure.name)) for clip in differences], _badness(measure.name))
        for measure in fields(Difference)
    }


def _badness(measure: str) -> Callable[[float], float]:
    """A sort key that is larger for a worse value; NaN is the worst."""
    if measure.endswith("_offset_frames"):
        return lambda value: math.inf if math.isnan(value) else abs(value)
    higher_is_better = measure in ("ssim", "psnr_db", "audio_snr_db", "audio_si_sdr_db")
    return lambda value: math.inf if math.isnan(value) else (-value if higher_is_better else value)


def _nan_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _amplitude(snr_db: float) -> float:
    return 10 ** (-snr_db / 20)


def _ratio(value: float, floor: float) -> float:
    if value == 0:
        return 0.0
    return value / floor if floor else math.inf
