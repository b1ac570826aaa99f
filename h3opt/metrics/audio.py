"""TODO"""

from __future__ import annotations

import math

import torch

from h3opt.errors import PipelineError
from h3opt.metrics.bits import require_same
from h3opt.metrics.video import frames_of, luma


def audio_snr_db(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Signal-to-noise ratio of each channel, 10 log10(sum reference² / sum (candidate - reference)²) in dB.

    Infinite for an equal channel, silent or not; minus infinity where a silent reference got noise.

    Args:
        reference, candidate: [batch, channels, samples] or [channels, samples], of one shape and dtype.

    Returns:
        float64 [batch * channels] on the CPU.

    Raises:
        PipelineError: when shapes or dtypes differ, or these are not channels of samples.
    """
    require_same(reference, candidate)
    if reference.ndim not in (2, 3) or reference.numel() == 0 or not reference.is_floating_point():
        raise PipelineError(
            "audio must be floating point [batch, channels, samples] or [channels, samples], "
            f"got {reference.dtype} {list(reference.shape)}"
        )
    signal = reference.detach().cpu().double().flatten(0, -2)
    noise = candidate.detach().cpu().double().flatten(0, -2) - signal
    signal_power, noise_power = signal.square().sum(-1), noise.square().sum(-1)
    # 0 / 0, a silent channel that stayed silent, is a perfect match and not NaN.
    ratio = torch.where(noise_power == 0, math.inf, signal_power / noise_power)
    return 10 * ratio.log10()


_FFT, _HOP = 2048, 512


_POWER_FLOOR = 1e-10  # -100 dB of full scale: below it nobody hears a difference of levels


_MAX_SHIFT = 6  # frames; a quarter of a second


def si_sdr_db(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Scale-invariant signal-to-distortion ratio of each channel in dB; infinite for a scaled copy.

    Le Roux et al., "SDR - Half-baked or Well Done?", ICASSP 2019: 10 log10(|a s|² / |a s - c|²) with
    a = <c, s> / |s|².

    Args:
        reference, candidate: ``[1, channels, samples]`` or ``[channels, samples]``, floating point, of one shape.

    Returns:
        float64 ``[channels]`` on the CPU; infinite for equal channels, silent or not.

    Raises:
        PipelineError: the shapes differ, or these are no channels of samples.
    """
    signal, other = _channels(reference, candidate)
    gain = (other * signal).sum(-1, keepdim=True) / signal.square().sum(-1, keepdim=True)
    target = gain.nan_to_num(0.0, 0.0, 0.0) * signal
    noise = (target - other).square().sum(-1)
    ratio = torch.where(noise == 0, math.inf, target.square().sum(-1) / noise)
    # a copy scaled by a power of two has no noise at all; by another factor, that of float64
    return 10 * ratio.log10()


def log_spectral_distance_db(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Log-spectral distance of each channel in dB: 0 for equal spectra, 20 log10(g) for a copy g times as loud.

    The mean over windows of the root mean square over frequencies of 10 log10(P / Q), with P and Q the power spectra
    of Hann windows of 2048 samples, 512 apart, held above -100 dB of full scale. Gray and Markel, "Distance Measures
    for Speech Processing", IEEE TASSP 1976.

    Args:
        reference, candidate: as :func:`si_sdr_db`.

    Returns:
        float64 ``[channels]`` on the CPU.

    Raises:
        PipelineError: the shapes differ, or these are no channels of samples.
    """
    left, right = (_decibels(part) for part in _channels(reference, candidate))
    return (left - right).square().mean(-2).sqrt().mean(-1)


def audio_shift(reference: torch.Tensor, candidate: torch.Tensor, sampling_rate: int, fps: float = 24.0) -> float:
    """How much later the candidate's sound is, in frames: the lag of the largest normalised cross-correlation.

    Looks a quarter of a second either way. A tone that repeats itself is nearly as like its copy a period further on,
    so the correlation is normalised by what overlaps, and a lag must explain half of the difference at least. Of
    equally good lags the smallest counts. 0 for silence.

    Raises:
        PipelineError: the shapes differ, or these are no channels of samples.
    """
    signal, other = (part.mean(0) for part in _channels(reference, candidate))
    if not (signal.isfinite().all() and other.isfinite().all()):
        return math.nan
    count = signal.numel()
    reach = min(round(_MAX_SHIFT * sampling_rate / fps), count // 2)
    spectrum = torch.fft.rfft(other, 2 * count) * torch.fft.rfft(signal, 2 * count).conj()
    lags = torch.arange(-reach, reach + 1)
    later, earlier = lags.clamp(min=0), (-lags).clamp(min=0)
    energy, energy_other = (torch.nn.functional.pad(part.square().cumsum(0), (1, 0)) for part in (signal, other))
    there = energy[count - later] - energy[earlier]
    here = energy_other[count - earlier] - energy_other[later]
    least = 1e-9 * float(signal.norm() * other.norm())
    unlike = 1 - torch.fft.irfft(spectrum, 2 * count)[lags % (2 * count)] / (there * here).sqrt().clamp(min=least)
    best = float(unlike.min())
    if least == 0 or not best < 0.5 * float(unlike[reach]):
        return 0.0
    good = lags[unlike <= best + 1e-6]
    return float(good[good.abs().argmin()]) * fps / sampling_rate


def video_shift(reference: torch.Tensor, candidate: torch.Tensor) -> int:
    """How many frames later the candidate's picture is: the shift at which its frames are nearest the reference's.

    Looks a quarter of a second either way; a picture that does not move has shift 0.

    Args:
        reference, candidate: ``[1, frames, 3, height, width]`` or ``[frames, 3, height, width]`` of one shape.

    Raises:
        PipelineError: the shapes differ, or these are no videos.
    """
    if reference.shape != candidate.shape:
        raise PipelineError(
            f"Videos of {list(reference.shape)} and {list(candidate.shape)} cannot be compared. Pass equal requests."
        )
    a, b = (_small(luma(frames_of(video))) for video in (reference, candidate))
    count = a.shape[0]
    costs = {}
    for shift in sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs):
        if count - abs(shift) < 2:
            break
        early, late = a[max(-shift, 0) : count - max(shift, 0)], b[max(shift, 0) : count - max(-shift, 0)]
        costs[shift] = float((early - late).square().mean())  # edges that moved stand out of an even change
    best = min(costs, key=lambda shift: costs[shift], default=0)  # of equal ones the first, the smallest shift
    # a shift must explain the difference, not make it a little smaller by chance
    return best if costs and costs[best] < 0.5 * costs[0] else 0


def av_offset(
    video: tuple[torch.Tensor, torch.Tensor],
    audio: tuple[torch.Tensor, torch.Tensor],
    sampling_rate: int,
    fps: float = 24.0,
) -> float:
    """How much later sound comes after picture in the candidate than in the reference, in frames.

    Args:
        video, audio: (reference, candidate), as :func:`video_shift` and :func:`audio_shift`.
        sampling_rate: of the audio, in Hz.
        fps: frames a second.
    """
    return audio_shift(*audio, sampling_rate, fps) - video_shift(*video)


def spectrogram_db(channel: torch.Tensor) -> torch.Tensor:
    """``[samples]`` → ``[frequencies, windows]`` in dB of full scale, as :func:`log_spectral_distance_db` sees it."""
    return _decibels(channel.detach().cpu().double().flatten()[None])[0]


def _small(pictures: torch.Tensor) -> torch.Tensor:
    """``[frames, height, width]`` averaged down to what a shift in time needs; small ones as they are."""
    shrink = max(1, min(pictures.shape[-2:]) // 64)
    return torch.nn.functional.avg_pool2d(pictures[:, None], shrink)[:, 0]


def _decibels(channels: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(_FFT, dtype=channels.dtype)
    if channels.shape[-1] < _FFT:
        channels = torch.nn.functional.pad(channels, (0, _FFT - channels.shape[-1]))
    spectrum = torch.stft(channels, _FFT, _HOP, window=window, center=False, return_complex=True)
    power = spectrum.abs().div(window.sum() / 2).square()  # a full-scale sine has power 1
    return 10 * power.clamp_min(_POWER_FLOOR).log10()


def _channels(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if reference.shape != candidate.shape:
        raise PipelineError(
            f"Sounds of {list(reference.shape)} and {list(candidate.shape)} cannot be compared. Pass equal requests."
        )
    if reference.ndim not in (2, 3) or reference.numel() == 0 or not reference.is_floating_point():
        raise PipelineError(
            "Audio must be floating point [1, channels, samples] or [channels, samples], "
            f"not {reference.dtype} {list(reference.shape)}. Pass what the pipeline returns."
        )
    left, right = (part.detach().cpu().double().flatten(0, -2) for part in (reference, candidate))
    return left, right
