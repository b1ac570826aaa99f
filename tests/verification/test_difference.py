"""Differences over several clips: the worst, the mean with its bound, and multiples of the noise floor."""

from __future__ import annotations

import math

import pytest
import torch

from h3opt.errors import PipelineError
from h3opt.pipeline.generation import Media
from h3opt.verification.difference import Difference, Spread, spreads


def media(seed: int = 0, noise: float = 0.0) -> Media:
    draw = torch.Generator().manual_seed(seed)
    video, audio = torch.rand(1, 8, 3, 32, 40, generator=draw), torch.rand(1, 2, 8000, generator=draw) - 0.5
    video = (video + noise * torch.randn(video.shape, generator=draw)).clamp(0, 1)
    return Media(video, audio + noise * torch.randn(audio.shape, generator=draw), 16000)


def test_equal_clips_have_no_difference_and_noisier_ones_more():
    assert Difference.between(media(), media()) == Difference() and Difference().equal
    little, more = (Difference.between(media(), media(noise=noise)) for noise in (0.01, 0.05))
    for name in ("lpips", "worst_frame_lpips", "temporal_difference", "audio_log_spectral_db"):
        assert 0 < getattr(little, name) < getattr(more, name), name
    for name in ("psnr_db", "audio_snr_db", "audio_si_sdr_db", "ssim"):
        assert math.inf > getattr(little, name) > getattr(more, name), name
    assert little.worst_frame_lpips > little.lpips and little.av_offset_frames == 0


def test_sound_that_comes_late_is_seen_in_frames():
    late = Media(media().video, media().audio.roll(667, -1), 16000)
    assert Difference.between(media(), late).av_offset_frames == pytest.approx(1, abs=0.01)


def test_the_worse_channel_of_the_sound_counts():
    noise = torch.randn(1, 2, 8000, generator=torch.Generator().manual_seed(1))
    noisy = Media(media().video, media().audio + noise * torch.tensor([[0.001], [0.01]]), 16000)
    found = Difference.between(media(), noisy)
    expected = 20 * math.log10(12**-0.5 / 0.01)  # uniform sound against the noise of the second channel
    assert found.audio_snr_db == pytest.approx(expected, abs=0.5)
    assert found.audio_si_sdr_db == pytest.approx(expected, abs=0.5)


def test_clips_of_different_length_are_refused():
    short = Media(media().video[:, :-1], media().audio, 16000)
    with pytest.raises(PipelineError, match="shapes"):
        Difference.between(media(), short)


def test_the_worst_of_several_is_the_worst_of_each_measure_and_nan_beats_all():
    one = Difference(3, 0, 0.1, 40.0, math.inf, 0.2, 0.9, 0.0, math.inf, 0.0, -2.0)
    other = Difference(1, 5, 0.2, 50.0, 30.0, 0.1, 0.8, 0.1, 20.0, 1.0, 1.0)
    assert Difference.worst([one, other]) == Difference(3, 5, 0.2, 40.0, 30.0, 0.2, 0.8, 0.1, 20.0, 1.0, -2.0)
    broken = Difference(1, 1, math.nan, math.nan, math.nan, ssim=math.nan)
    worst = Difference.worst([one, broken, other])
    assert all(math.isnan(getattr(worst, name)) for name in ("lpips", "psnr_db", "audio_snr_db", "ssim"))


def test_a_multiple_of_the_noise_floor_is_the_larger_of_picture_and_sound():
    floor = Difference(1, 1, 0.01, 60.0, 60.0)
    assert Difference().over(floor) == 0
    assert Difference(1, 1, 0.004, 60.0, 70.0).over(floor) == pytest.approx(0.4)
    assert Difference(1, 1, 0.004, 60.0, 54.0).over(floor) == pytest.approx(10 ** (6 / 20))
    assert Difference(1, 0, 0.004).over(Difference()) == math.inf
    assert math.isnan(Difference(1, 0, math.nan).over(floor))


def test_the_bound_is_that_of_student():
    # t(0.95, 4) = 2.1318 from the table of the distribution; s = 1.5811, n = 5
    found = Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.clips, found.worst, found.mean) == (5, 5.0, 3.0)
    assert found.bound == pytest.approx(3 + 2.1318 * math.sqrt(2.5 / 5), rel=1e-4)


def test_the_bound_lies_on_the_worse_side_and_needs_two_finite_clips():
    one, other = Difference(1, 1, 0.1, 40.0, 30.0), Difference(1, 1, 0.2, 42.0, 34.0)
    found = spreads([one, other])
    assert found["lpips"].worst == 0.2 and found["lpips"].bound > found["lpips"].mean
    assert found["audio_snr_db"].worst == 30.0 and found["audio_snr_db"].bound < found["audio_snr_db"].mean
    assert found["audio_si_sdr_db"].bound is None, "infinite"
    assert spreads([one])["lpips"].bound is None


def test_the_bound_holds_as_often_as_it_says():
    draw = torch.Generator().manual_seed(0)
    samples = torch.randn(2000, 6, generator=draw)
    held = sum((Spread.of(row).bound or 0.0) >= 0 for row in samples.tolist())
    assert 0.935 < held / 2000 < 0.965
