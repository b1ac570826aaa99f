"""Measures of audio: SNR, SI-SDR, log-spectral distance, and shift in time against the video."""

from __future__ import annotations

import math

import torch

from h3opt.errors import PipelineError
from h3opt.metrics.bits import require_same
from h3opt.metrics.video import MAX_SHIFT_FRAMES, video_shift

_FFT, _HOP = 2048, 512  # samples
_POWER_FLOOR = 1e-10  # -100 dB of full scale: differences of level below it are inaudible


def audio_snr_db(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Compute the signal-to-noise ratio of each channel, 10 log10(Σ reference² / Σ (candidate - reference)²), in dB.

    Infinite for an equal channel, silent or not; minus infinity where only the reference is silent.

    Args:
        reference, candidate: ``[batch, channels, samples]`` or ``[channels, samples]``, floating point, of one shape
            and dtype.

    Returns:
        float64 ``[batch * channels]`` on the CPU.

    Raises:
        PipelineError: shapes or dtypes differ, or these are not channels of samples.
    """
    signal, other = _channels(reference, candidate)
    noise = other - signal
    signal_power, noise_power = signal.square().sum(-1), noise.square().sum(-1)
    # 0 / 0, two silent channels, is a perfect match and not NaN.
    ratio = torch.where(noise_power == 0, math.inf, signal_power / noise_power)
    return 10 * ratio.log10()


def si_sdr_db(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Compute the scale-invariant signal-to-distortion ratio of each channel in dB; infinite for a scaled copy.

    Le Roux et al., "SDR - Half-baked or Well Done?", ICASSP 2019: 10 log10(|a s|² / |a s - c|²) with
    a = <c, s> / |s|².

    Args:
        reference, candidate: as for :func:`audio_snr_db`.

    Returns:
        float64 ``[batch * channels]`` on the CPU; infinite for equal channels, silent or not.

    Raises:
        PipelineError: shapes or dtypes differ, or these are not channels of samples.
    """
    signal, other = _channels(reference, candidate)
    gain = (other * signal).sum(-1, keepdim=True) / signal.square().sum(-1, keepdim=True)
    target = gain.nan_to_num(0.0, 0.0, 0.0) * signal
    noise = (target - other).square().sum(-1)
    ratio = torch.where(noise == 0, math.inf, target.square().sum(-1) / noise)
    # A copy scaled by a power of two has no noise; scaled by another factor, it has the rounding of float64.
    return 10 * ratio.log10()


def log_spectral_distance_db(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Compute the log-spectral distance of each channel in dB: 20 log10(g) for a copy g times as loud.

    The mean over windows of the root mean square over frequencies of 10 log10(P / Q), with P and Q the power spectra
    of Hann windows of 2048 samples, 512 apart, clamped at -100 dB of full scale. Gray and Markel, "Distance Measures
    for Speech Processing", IEEE TASSP 1976.

    Args:
        reference, candidate: as for :func:`audio_snr_db`.

    Returns:
        float64 ``[batch * channels]`` on the CPU.

    Raises:
        PipelineError: shapes or dtypes differ, or these are not channels of samples.
    """
    left, right = (_decibels(part) for part in _channels(reference, candidate))
    return (left - right).square().mean(-2).sqrt().mean(-1)


def audio_shift(reference: torch.Tensor, candidate: torch.Tensor, sampling_rate: int, fps: float = 24.0) -> float:
    """Estimate by how many video frames the candidate is late: the lag of the largest normalized cross-correlation.

    Searches a quarter of a second in both directions. A periodic signal resembles a copy shifted by a period, so the
    correlation is normalized by the energy of the overlapping parts, and a lag must explain at least half of the
    difference. Of equally good lags the smallest counts.

    Args:
        reference, candidate: as for :func:`audio_snr_db`, of one sample.
        sampling_rate: of the audio, in Hz.
        fps: video frames per second.

    Returns:
        The lag; 0 for silence, NaN for audio that is not finite.

    Raises:
        PipelineError: shapes or dtypes differ, or these are not channels of samples.
    """
    signal, other = (part.mean(0) for part in _channels(reference, candidate))
    if not (signal.isfinite().all() and other.isfinite().all()):
        return math.nan
    count = signal.numel()
    reach = min(round(MAX_SHIFT_FRAMES * sampling_rate / fps), count // 2)
    spectrum = torch.fft.rfft(other, 2 * count) * torch.fft.rfft(signal, 2 * count).conj()
    lags = torch.arange(-reach, reach + 1)
    later, earlier = lags.clamp(min=0), (-lags).clamp(min=0)
    signal_energy, other_energy = (torch.nn.functional.pad(part.square().cumsum(0), (1, 0)) for part in (signal, other))
    signal_overlap = signal_energy[count - later] - signal_energy[earlier]
    other_overlap = other_energy[count - earlier] - other_energy[later]
    least = 1e-9 * float(signal.norm() * other.norm())
    norms = (signal_overlap * other_overlap).sqrt().clamp(min=least)
    distance = 1 - torch.fft.irfft(spectrum, 2 * count)[lags % (2 * count)] / norms
    best = float(distance.min())
    if least == 0 or not best < 0.5 * float(distance[reach]):
        return 0.0
    good = lags[distance <= best + 1e-6]
    return float(good[good.abs().argmin()]) * fps / sampling_rate


def av_offset(
    video: tuple[torch.Tensor, torch.Tensor],
    audio: tuple[torch.Tensor, torch.Tensor],
    sampling_rate: int,
    fps: float = 24.0,
) -> float:
    """Estimate how much later audio comes relative to video in the candidate than in the reference, in frames.

    Args:
        video, audio: (reference, candidate), as for :func:`~h3opt.metrics.video.video_shift` and :func:`audio_shift`.
        sampling_rate: of the audio, in Hz.
        fps: video frames per second.

    Raises:
        PipelineError: shapes or dtypes differ, or these are no videos and channels of samples.
    """
    return audio_shift(*audio, sampling_rate, fps) - video_shift(*video)


def spectrogram_db(channel: torch.Tensor) -> torch.Tensor:
    """Compute the spectrogram that :func:`log_spectral_distance_db` compares.

    Args:
        channel: ``[samples]``.

    Returns:
        float64 ``[frequencies, windows]`` on the CPU, in dB of full scale.
    """
    return _decibels(channel.detach().cpu().double().flatten()[None])[0]


def _decibels(channels: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(_FFT, dtype=channels.dtype)
    if channels.shape[-1] < _FFT:
        channels = torch.nn.functional.pad(channels, (0, _FFT - channels.shape[-1]))
    spectrum = torch.stft(channels, _FFT, _HOP, window=window, center=False, return_complex=True)
    power = spectrum.abs().div(window.sum() / 2).square()  # a full-scale sine has power 1
    return 10 * power.clamp_min(_POWER_FLOOR).log10()


def _channels(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Check two audio tensors and return them as float64 ``[batch * channels, samples]`` on the CPU."""
    require_same(reference, candidate)
    if reference.ndim not in (2, 3) or reference.numel() == 0 or not reference.is_floating_point():
        raise PipelineError(
            "Audio must be floating point [batch, channels, samples] or [channels, samples], "
            f"not {reference.dtype} {list(reference.shape)}. Pass what the pipeline returns."
        )
    left, right = (part.detach().cpu().double().flatten(0, -2) for part in (reference, candidate))
    return left, right
