"""Measures of picture, sound and latents agree with their definitions, worked out another way."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
import torch
from conftest import assert_same_media

from h3opt.errors import PipelineError
from h3opt.metrics.audio import audio_shift, av_offset, log_spectral_distance_db, si_sdr_db, spectrogram_db, video_shift
from h3opt.metrics.seams import seam_steps, tile_borders
from h3opt.metrics.video import psnr_per_frame, ssim_per_frame, temporal_difference
from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.pipeline.view import PipelineView
from h3opt.verification.latents import adjacent_cell_cosine, excess_kurtosis, trace_latents

RATE = 16000


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# --- picture ---------------------------------------------------------------------------------------------------


def test_psnr_of_each_frame():
    video = torch.full((3, 3, 16, 16), 0.5)
    other = video + torch.tensor([0.0, 0.1, 0.01]).view(3, 1, 1, 1)
    assert psnr_per_frame(video, other).tolist() == pytest.approx([math.inf, 20.0, 40.0], rel=1e-5)


def test_ssim_of_flat_frames_is_that_of_their_means():
    for a, b in ((0.2, 0.8), (0.5, 0.5), (0.0, 1.0)):
        one, other = (torch.full((1, 3, 16, 20), level) for level in (a, b))
        expected = (2 * a * b + 1e-4) / (a * a + b * b + 1e-4)
        assert ssim_per_frame(one, other).item() == pytest.approx(expected, rel=1e-4)


def test_ssim_agrees_with_sums_over_every_window():
    a, b = noise(2, 3, 14, 13), noise(2, 3, 14, 13, seed=1)
    weights = [math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / 4.5) for i in range(11) for j in range(11)]
    weights = [weight / sum(weights) for weight in weights]
    found = []
    for frame in range(2):
        x, y = (0.299 * clip[frame, 0] + 0.587 * clip[frame, 1] + 0.114 * clip[frame, 2] for clip in (a, b))
        values = []
        for top in range(4):
            for left in range(3):
                p, q = (part[top : top + 11, left : left + 11].flatten().tolist() for part in (x, y))
                mp, mq = (sum(w * v for w, v in zip(weights, part, strict=True)) for part in (p, q))
                vp = sum(w * (v - mp) ** 2 for w, v in zip(weights, p, strict=True))
                vq = sum(w * (v - mq) ** 2 for w, v in zip(weights, q, strict=True))
                cov = sum(w * (u - mp) * (v - mq) for w, u, v in zip(weights, p, q, strict=True))
                values.append((2 * mp * mq + 1e-4) * (2 * cov + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
        found.append(sum(values) / len(values))
    assert ssim_per_frame(a, b).tolist() == pytest.approx(found, rel=1e-6)
    assert ssim_per_frame(a, a).tolist() == pytest.approx([1.0, 1.0])


def test_a_frame_with_nan_has_ssim_nan():
    video = noise(2, 3, 16, 16)
    broken = video.clone()
    broken[1, 0, 8, 8] = math.nan
    first, second = ssim_per_frame(video, broken).tolist()
    assert first == pytest.approx(1.0) and math.isnan(second)


def test_flicker_is_what_a_still_does_not_show():
    video = noise(40, 3, 12, 12) * 0.5
    assert temporal_difference(video, video + 0.25).max() < 1e-6, "a constant offset does not flicker"
    flickering = video.clone()
    flickering[::2] += 0.1
    assert temporal_difference(video, flickering).tolist() == pytest.approx([0.1] * 39, rel=1e-4)


@pytest.mark.parametrize("measure", [psnr_per_frame, ssim_per_frame, temporal_difference, video_shift])
def test_videos_of_different_length_are_refused(measure):
    with pytest.raises(PipelineError, match="equal requests"):
        measure(noise(3, 3, 16, 16), noise(2, 3, 16, 16))


def test_what_is_no_video_is_refused():
    with pytest.raises(PipelineError, match="must be floating point"):
        psnr_per_frame(noise(3, 16, 16), noise(3, 16, 16))
    with pytest.raises(PipelineError, match="at least 11x11"):
        ssim_per_frame(noise(1, 3, 8, 16), noise(1, 3, 8, 16))


def test_a_step_along_a_border_stands_out():
    video = noise(8, 3, 40, 40) * 0.2
    stepped = video.clone()
    stepped[..., 20:, :] += 0.5
    steps = seam_steps(stepped, ([20, 30], [10]))
    assert steps["row", 20] > 3 and steps["row", 30] < 1.5 and steps["column", 10] < 1.5
    against = seam_steps(video + 0.01 * (stepped > 0.5), None, video)
    assert set(against) == {(word, line) for word in ("row", "column") for line in range(1, 40)}
    assert seam_steps(video, ([], []), video) == {}


def test_borders_are_those_of_the_decoder(pipe):
    assert tile_borders(pipe.vae, 64, 96) == ([], [])
    rows, columns = tile_borders(pipe.vae, 544, 960)
    assert rows == [144, 256, 288, 400] and set(columns) >= {256, 704}


# --- sound -----------------------------------------------------------------------------------------------------


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


def test_a_slow_picture_that_comes_late_is_seen_through_noise():
    at, x = torch.arange(60).view(-1, 1, 1, 1), torch.arange(96).view(1, 1, 1, -1)
    video = torch.sigmoid(x - 0.4 * at - 20).expand(60, 3, 64, 96)
    noise = 0.01 * torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    assert [video_shift(video, video.roll(frames, 0) + noise) for frames in (0, 1, -1)] == [0, 1, -1]


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


# --- latents ---------------------------------------------------------------------------------------------------


def test_neighbouring_cells_of_a_constant_are_alike_and_of_noise_are_not():
    flat = torch.ones(1, 24, 3, 8, 12)
    assert adjacent_cell_cosine(flat).mean == pytest.approx(1)
    white = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    assert abs(adjacent_cell_cosine(white).mean) < 0.05
    assert adjacent_cell_cosine(white).pairs == pytest.approx(1, abs=0.05)
    grid = white.repeat_interleave(2, 3).repeat_interleave(2, 4)
    assert adjacent_cell_cosine(grid).within == pytest.approx(1) and abs(adjacent_cell_cosine(grid).across) < 0.05
    single = adjacent_cell_cosine(white, (1, 1, 1))
    assert math.isnan(single.within) and single.mean == single.across and single.to_dict()["within"] is None
    with pytest.raises(PipelineError, match="Video latents"):
        adjacent_cell_cosine(white[0])


def test_kurtosis_tells_uniform_from_gaussian():
    assert abs(excess_kurtosis(torch.randn(50_000, generator=torch.Generator().manual_seed(0)))[0]) < 0.1
    kurtosis, error = excess_kurtosis(noise(50_000))
    assert kurtosis == pytest.approx(-1.2, abs=0.05) and error == pytest.approx(math.sqrt(24 / 50_000))


def test_a_trace_has_every_step_and_changes_nothing(silent):
    clip = GenerationSettings(num_inference_steps=3)
    view = PipelineView.of(silent)
    plain = generate(silent, clip)
    with ExitStack() as undo:
        trace = trace_latents(view, undo)
        traced = generate(silent, clip)
        first = trace.to_dict()
        generate(silent, clip)
        assert trace.to_dict() == first, "a second generation starts anew"
    assert_same_media(plain, traced)
    assert len(trace.steps) == 2 and set(trace.steps[0]) == {"video", "audio", "video_motion", "audio_motion"}
    assert trace.initial is not None and trace.final is not None and trace.audio_final is not None
    assert trace.patch == tuple(silent.patch_size)
    assert abs(excess_kurtosis(trace.initial)[0]) < 0.3, "MiniMax-H3 starts from Gaussian noise"
    rms = trace.final.float().square().mean().sqrt().item()
    assert trace.steps[-1]["video"] == pytest.approx(rms, rel=1e-4), "the last step is what is decoded"
    generate(silent, clip)
    assert len(trace.steps) == 2, "the hooks are off"


def test_a_bare_model_has_no_trace(silent):
    with pytest.raises(PipelineError, match="cannot be traced"), ExitStack() as undo:
        trace_latents(PipelineView.of(silent.transformer), undo)
