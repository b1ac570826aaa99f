"""Measures of video agree with their definitions, worked out another way."""

from __future__ import annotations

import math

import pytest
import torch

from h3opt.errors import PipelineError
from h3opt.metrics.video import denormalize, psnr_db, ssim_per_frame, temporal_difference, video_shift


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_psnr_is_the_closed_form() -> None:
    reference = torch.zeros(2, 3, 4, 4)
    assert psnr_db(reference, reference + 0.1) == pytest.approx(20.0, abs=1e-5)
    assert psnr_db(reference, reference + 0.1, peak=10.0) == pytest.approx(40.0, abs=1e-5)
    assert psnr_db(reference, reference) == math.inf
    assert math.isnan(psnr_db(reference, reference + math.nan))
    with pytest.raises(PipelineError, match="empty"):
        psnr_db(reference[:0], reference[:0])


@pytest.mark.parametrize("measure", [psnr_db])
def test_other_shapes_and_dtypes_are_refused(measure) -> None:  # type: ignore[no-untyped-def]
    video = torch.rand(1, 2, 3, 32, 32)
    with pytest.raises(PipelineError, match="shapes"):
        measure(video, video[:, :1])
    with pytest.raises(PipelineError, match="cast one"):
        measure(video, video.double())


def test_ssim_of_flat_frames_is_that_of_their_means():
    for a, b in ((0.2, 0.8), (0.5, 0.5), (0.0, 1.0)):
        first, second = (torch.full((1, 3, 16, 20), level) for level in (a, b))
        expected = (2 * a * b + 1e-4) / (a * a + b * b + 1e-4)
        assert ssim_per_frame(first, second).item() == pytest.approx(expected, rel=1e-4)


def test_ssim_agrees_with_sums_over_every_window():
    a, b = noise(2, 3, 14, 13), noise(2, 3, 14, 13, seed=1)
    weights = [math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / 4.5) for i in range(11) for j in range(11)]
    weights = [weight / sum(weights) for weight in weights]
    expected = []
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
        expected.append(sum(values) / len(values))
    assert ssim_per_frame(a, b).tolist() == pytest.approx(expected, rel=1e-6)
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


@pytest.mark.parametrize("measure", [ssim_per_frame, temporal_difference, video_shift])
def test_videos_of_different_length_are_refused(measure):
    with pytest.raises(PipelineError, match="equal requests"):
        measure(noise(3, 3, 16, 16), noise(2, 3, 16, 16))


@pytest.mark.parametrize("measure", [temporal_difference, video_shift])
def test_what_is_no_video_is_refused(measure):
    with pytest.raises(PipelineError, match="must be floating point"):
        measure(noise(3, 16, 16), noise(3, 16, 16))
    with pytest.raises(PipelineError, match="at least 11x11"):
        ssim_per_frame(noise(1, 3, 8, 16), noise(1, 3, 8, 16))


def test_pixels_are_those_of_the_decode_step():
    decoded = torch.tensor([-2.0, 0.0, 1.0, 9.0]).view(1, 1, 4, 1, 1).expand(1, 3, 4, 2, 2)
    pixels = denormalize(decoded, [0.5, 0.25, 0.5], [0.25, 0.25, 0.125])
    assert pixels.shape == (1, 4, 3, 2, 2) and pixels.dtype == torch.float32
    assert pixels[0, :, :, 0, 0].tolist() == [[0.0, 0.0, 0.25], [0.5, 0.25, 0.5], [0.75, 0.5, 0.625], [1.0, 1.0, 1.0]]


def test_a_slow_picture_that_comes_late_is_seen_through_noise():
    at, x = torch.arange(60).view(-1, 1, 1, 1), torch.arange(96).view(1, 1, 1, -1)
    video = torch.sigmoid(x - 0.4 * at - 20).expand(60, 3, 64, 96)
    noise = 0.01 * torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    assert [video_shift(video, video.roll(frames, 0) + noise) for frames in (0, 1, -1)] == [0, 1, -1]
