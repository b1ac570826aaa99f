"""Measures of audio agree with their definitions, worked out another way."""

from __future__ import annotations

import math

import pytest
import torch

from h3opt.errors import PipelineError
from h3opt.metrics.audio import (
    audio_shift,
    audio_snr_db,
    av_offset,
    log_spectral_distance_db,
    si_sdr_db,
    spectrogram_db,
)
from h3opt.metrics.video import video_shift

RATE = 16000


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_audio_snr_is_the_closed_form_for_each_channel() -> None:
    time = torch.arange(32_000) / 32_000
    tone = torch.sin(2 * math.pi * 440 * time)
    hum = torch.cos(2 * math.pi * 50 * time)
    reference = torch.stack([tone, tone, 0.5 * tone])[None]
    candidate = torch.stack([tone + 0.1 * hum, tone, 0.5 * tone + 0.01 * hum])[None]
    expected = [20.0, math.inf, 20 * math.log10(50)]
    assert audio_snr_db(reference, candidate).tolist() == pytest.approx(expected, abs=1e-3)
    assert audio_snr_db(reference[0], candidate[0]).tolist() == pytest.approx(expected, abs=1e-3)


def test_audio_snr_of_a_silent_channel() -> None:
    silence = torch.zeros(2, 100)
    noisy = silence.clone()
    noisy[1, 3] = 0.1
    assert audio_snr_db(silence, noisy).tolist() == [math.inf, -math.inf]
    noisy[1, 3] = math.nan
    assert audio_snr_db(silence, noisy)[1].isnan()


@pytest.mark.parametrize("measure", [audio_snr_db, si_sdr_db, log_spectral_distance_db])
@pytest.mark.parametrize(
    "audio", [torch.zeros(100), torch.zeros(1, 1, 2, 5), torch.zeros(2, 0), torch.ones(2, 5).long()]
)
def test_audio_of_another_form_is_refused(measure, audio: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PipelineError, match="samples"):
        measure(audio, audio)


@pytest.mark.parametrize("measure", [audio_snr_db, si_sdr_db, log_spectral_distance_db])
def test_other_shapes_and_dtypes_are_refused(measure) -> None:  # type: ignore[no-untyped-def]
    video = torch.rand(1, 2, 3, 32, 32)
    with pytest.raises(PipelineError, match="shapes"):
        measure(video, video[:, :1])
    with pytest.raises(PipelineError, match="cast one"):
        measure(video, video.double())


def tone(frequency: float, seconds: float = 1.0, level: float = 0.5) -> torch.Tensor:
    return level * torch.sin(2 * math.pi * frequency * torch.arange(int(RATE * seconds), dtype=torch.float64) / RATE)


def test_si_sdr_does_not_count_loudness():
    signal = torch.stack([tone(440), tone(660)])
    error = torch.stack([tone(1000, level=0.05), tone(1000, level=0.005)])  # orthogonal over whole periods
    assert si_sdr_db(signal, 2 * signal).tolist() == [math.inf, math.inf]
    assert si_sdr_db(signal, signal + error).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)
    assert si_sdr_db(signal, 3 * (signal + error)).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)
    silent = torch.zeros(1, 50)
    assert si_sdr_db(silent, silent).item() == math.inf
    assert si_sdr_db(silent, silent + 1).item() == -math.inf


def test_log_spectral_distance_of_a_louder_copy_is_its_gain():
    signal = (noise(2, RATE) - 0.5).double()
    assert log_spectral_distance_db(signal, signal).tolist() == [0, 0]
    expected = 20 * math.log10(2)
    assert log_spectral_distance_db(signal, 2 * signal).tolist() == pytest.approx([expected] * 2, rel=1e-6)


def test_a_full_scale_sine_has_zero_decibels():
    spectrum = spectrogram_db(tone(1000, level=1.0))
    assert spectrum.max().item() == pytest.approx(0, abs=0.01)
    assert spectrum.max(0).indices.tolist() == [128] * spectrum.shape[1], "1000 Hz of 16 kHz in 2048 samples"


@pytest.mark.parametrize("samples", [0, 1, -1, 667, -2000])
def test_a_lag_of_the_sound_is_found_to_the_sample(samples):
    signal = torch.stack([noise(RATE), noise(RATE, seed=1)]) - 0.5
    assert audio_shift(signal, signal.roll(samples, -1), RATE) == pytest.approx(samples * 24 / RATE)


def test_sound_that_cannot_tell_has_no_lag():
    assert audio_shift(torch.zeros(2, 4000), torch.zeros(2, 4000), RATE) == 0
    assert math.isnan(audio_shift(torch.full((2, 100), math.nan), torch.ones(2, 100), RATE))


@pytest.mark.parametrize("frames", [-1, 1, 0])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_hum_that_swells_is_told_from_its_copy_a_period_further_on(frames, noise):
    at = torch.arange(4 * RATE) / RATE
    signal = (0.1 + 0.1 * at) * torch.sin(2 * math.pi * 120 * at)  # in a frame five periods go by
    signal = torch.stack([signal, 0.5 * signal.flip(0)])
    moved = signal.roll(frames * RATE // 24, -1) + noise * torch.randn(
        signal.shape, generator=torch.Generator().manual_seed(0)
    )
    assert audio_shift(signal, moved, RATE) == pytest.approx(frames, abs=0.01)


@pytest.mark.parametrize("frames", [0, 2, -3])
def test_a_lag_of_the_picture_is_found_and_offsets_that_of_the_sound(frames):
    video = noise(30, 3, 16, 16)
    moved = video.roll(frames, 0)
    assert video_shift(video, moved) == frames
    still = video[:1].expand(30, -1, -1, -1)
    assert video_shift(still, still) == 0
    signal = noise(2, RATE) - 0.5
    later = signal.roll(RATE // 24 * 2, -1)
    assert av_offset((video, moved), (signal, later), RATE) == pytest.approx(2 - frames, abs=0.01)
