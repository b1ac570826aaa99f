"""Every planted fault is reported by name, and clean clips raise nothing."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import h3opt
from h3opt.errors import PipelineError
from h3opt.metrics.bits import bits_equal
from h3opt.pipeline.generation import GenerationSettings, Media, generate, reference_pipeline
from h3opt.pipeline.tiling.plan import tile_borders
from h3opt.pipeline.view import PipelineView
from h3opt.reference.scenes import all_scenes
from h3opt.verification.faults import FAULTS, find_faults, head_gains
from h3opt.verification.latents import LatentTrace, adjacent_cell_cosine, trace_latents

FRAMES, HEIGHT, WIDTH, RATE, FPS = 48, 64, 96, 16000, 24
BORDERS = ([32], [40, 56])


def clip(seed: int, noise: float = 0.0) -> Media:
    """A shape that moves over a shaded ground, and a tone in each ear that swells when it turns round."""
    draw = torch.Generator().manual_seed(seed)
    r = torch.rand(12, generator=draw).tolist()
    time = torch.arange(FRAMES) / FPS
    y, x = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    ground = torch.stack([0.2 + 0.3 * c * y / HEIGHT + 0.3 * (1 - c) * x / WIDTH for c in r[:3]])
    ground = ground + 0.05 * torch.sin(x * (0.1 + r[3])) * torch.cos(y * (0.1 + r[4]))
    turn = 2 * math.pi * (0.4 + r[5]) * time + 6 * r[6]  # it goes round and never stands still
    cx, cy = WIDTH * (0.5 + 0.3 * torch.sin(turn)), HEIGHT * (0.5 + (0.2 + 0.1 * r[7]) * torch.cos(turn))
    distance = ((x - cx[:, None, None]) ** 2 + (y - cy[:, None, None]) ** 2).sqrt()
    mask = (8 + 8 * r[9] - distance).clamp(0, 1)[:, None]
    colour = torch.tensor([r[10], 1 - r[10], r[11]]).view(1, 3, 1, 1)
    video = ground * (1 - mask) + colour * mask
    at = torch.arange(RATE * FRAMES // FPS) / RATE
    swell = 0.1 + 0.4 * torch.sin(math.pi * (1 + r[5]) * at + r[6]) ** 8
    left = swell * torch.sin(2 * math.pi * (200 + 600 * r[0]) * at)
    right = swell.flip(0) * torch.sin(2 * math.pi * (200 + 600 * r[1]) * at)
    audio = torch.stack([left, right])
    video = (video + noise * torch.randn(video.shape, generator=draw)).clamp(0, 1)
    audio = audio + noise * 0.1 * torch.randn(audio.shape, generator=draw)
    return Media(video[None], audio[None], RATE)


def trace(seed: int) -> LatentTrace:
    """Gaussian noise to start from, and smooth latents at the end."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 24, 5, 3, 4, generator=draw)
    final = torch.nn.functional.interpolate(coarse, (10, 16, 24), mode="trilinear", align_corners=True)
    final = final + 0.1 * torch.randn(final.shape, generator=draw)
    return LatentTrace(torch.randn(600, 96, generator=draw), torch.randn(200, 32, generator=draw), final)


def found(media: Media, seed: int = 0, **given: Any) -> set[str]:
    given.setdefault("reference", clip(seed))
    return {one.name for one in find_faults(media, latents=given.pop("latents", trace(seed)), borders=BORDERS, **given)}


def with_video(media: Media, edit: Any) -> Media:
    video = media.video.clone()
    edit(video[0])
    return dataclasses.replace(media, video=video)


def with_audio(media: Media, audio: torch.Tensor) -> Media:
    return dataclasses.replace(media, audio=audio)


# --- clean -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_clip_raises_nothing(seed):
    assert find_faults(clip(seed), latents=trace(seed), borders=BORDERS) == []
    nearly = clip(seed, noise=0.004)
    assert find_faults(nearly, reference=clip(seed), latents=trace(seed), borders=BORDERS) == []
    assert find_faults(nearly, reference=clip(seed)) == [], "every line is looked at"
    heads = {"block 0": (torch.randn(40, 6, 16), torch.randn(40, 6, 16))}
    heads["block 0"] = (heads["block 0"][0], heads["block 0"][0] + 0.05 * heads["block 0"][1])
    assert find_faults(nearly, heads=heads) == []


def test_a_still_fine_texture_is_no_noise():
    latents = trace(0)
    draw = torch.Generator().manual_seed(1)
    dark, light = torch.randn(2, 24, 1, 1, 1, generator=draw)
    at = torch.arange(16)[:, None] + torch.arange(24)
    latents.final = torch.where(at % 2 == 0, dark, light)[None].repeat(1, 1, 10, 1, 1)
    latents.final = latents.final + 0.3 * torch.randn(latents.final.shape, generator=draw)
    assert adjacent_cell_cosine(latents.final).mean < 0.3, "neighbours are unlike"
    assert find_faults(clip(0), latents=latents) == []


SEEDS = range(20)


@pytest.mark.slow
def test_twenty_clips_of_the_reference_and_of_the_optimized_pipeline_raise_nothing():
    pipe = reference_pipeline(torch.float32)
    view = PipelineView.of(pipe)
    scenes = all_scenes()[:: 432 // len(SEEDS)]
    clips = [GenerationSettings(prompt=scenes[seed].caption, seed=seed) for seed in SEEDS]
    borders = tile_borders(pipe.vae, clips[0].height, clips[0].width)

    def generated() -> list[tuple[Media, LatentTrace]]:
        made: list[tuple[Media, LatentTrace]] = []
        with ExitStack() as undo:
            latents = trace_latents(view, undo)
            for settings in clips:
                media = generate(pipe, settings)
                made.append((media, latents.snapshot()))
        return made

    unmodified = generated()
    alone = {
        seed: [str(one) for one in find_faults(media, latents=latents, borders=borders)]
        for seed, (media, latents) in zip(SEEDS, unmodified, strict=True)
    }
    assert not any(alone.values()), alone
    with h3opt.optimize(pipe, ["fp8_linear", "vae_fp8_linear", "tile_batch", "norm_modulate"], "cpu"):
        optimized = generated()
    moved = [not bits_equal(old[0].video, new[0].video) for old, new in zip(unmodified, optimized, strict=True)]
    assert all(moved), "there was something to look at"
    against = {
        seed: find_faults(new[0], reference=old[0], latents=new[1], reference_latents=old[1], borders=borders)
        for seed, old, new in zip(SEEDS, unmodified, optimized, strict=True)
    }
    assert not any(against.values()), against


# --- planted ---------------------------------------------------------------------------------------------------


def nan_in_a_tile(video):
    video[3:5, :, 32:64, 56:96] = math.nan


def freeze(video):
    video[20] = video[19]


def blacken(video):
    video[7] = 0.0


def brighten_beyond_the_border(video):
    video[..., 56:] = video[..., 56:] * 0.8 + 0.2


def brighten_slightly(video):
    video[..., 56:] = video[..., 56:] * 0.98 + 0.02


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("nan", nan_in_a_tile),
        ("frozen_frames", freeze),
        ("black_frames", blacken),
        ("seam", brighten_beyond_the_border),
    ],
)
@pytest.mark.parametrize("alone", [False, True], ids=["against the reference", "alone"])
def test_a_fault_of_the_picture_is_named(name, edit, alone):
    for seed in range(3):
        planted = with_video(clip(seed), edit)
        names = found(planted, seed, **({"reference": None} if alone else {}))
        assert names == {name}


def tint(video):
    video *= torch.tensor([1.1, 1.0, 0.9]).view(1, 3, 1, 1)


def darken(video):
    video -= 0.06  # no pixel of these clips is darker than this, so that contrast stays


def move_right(video):
    video.copy_(video.roll(1, -1))


def move_up_by_two(video):
    video.copy_(video.roll(-2, -2))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("colour_cast", tint),
        ("brightness", darken),
        ("picture_shift", move_right),
        ("picture_shift", move_up_by_two),
    ],
)
def test_a_fault_of_the_whole_picture_is_named_against_the_reference(name, edit):
    for seed in range(3):
        planted = with_video(clip(seed), edit)
        assert found(planted, seed) == {name}
        assert found(planted, seed, reference=None) == set(), "alone, nobody can tell"


def test_less_contrast_is_named_and_a_little_less_is_not():
    for seed in range(3):
        for factor, expected in ((0.7, True), (0.97, False)):
            flat = with_video(clip(seed), lambda video, factor=factor: video.sub_(0.4).mul_(factor).add_(0.4))
            assert ("contrast" in found(flat, seed)) is expected


def test_slight_changes_of_the_whole_picture_are_no_fault():
    def slightly(video):
        video *= torch.tensor([1.004, 1.0, 0.996]).view(1, 3, 1, 1)
        video -= 0.004

    for seed in range(3):
        assert found(with_video(clip(seed), slightly), seed) == set()


def test_against_a_reference_a_seam_too_weak_to_see_in_texture_is_named():
    for seed in range(3):
        assert found(with_video(clip(seed), brighten_slightly), seed) == {"seam"}
        (finding,) = find_faults(with_video(clip(seed), brighten_slightly), reference=clip(seed))
        assert finding.where == "column 56", "without borders every line is looked at"


@pytest.mark.parametrize(
    ("stop", "step", "count"), [(slice(10, None), 1, 37), (slice(0, None), 2, 24)], ids=["to the end", "every other"]
)
def test_a_clip_of_which_most_is_frozen_is_named(stop, step, count):
    def stops(video):
        frames = video[stop].clone()
        video[stop] = frames[::2].repeat_interleave(2, 0) if step == 2 else frames[:1]

    for reference in (None, clip(0)):
        findings = find_faults(with_video(clip(0), stops), reference=reference)
        assert [one.name for one in findings] == ["frozen_frames"] * count


def test_a_nan_is_located():
    (finding,) = find_faults(with_video(clip(0), nan_in_a_tile))
    assert finding.where == "video, frames 3-4, rows 32-63, columns 56-95"
    assert "nan: video" in str(finding) and finding.to_dict()["measured"] == 2 * 3 * 32 * 40
    latents = trace(0)
    assert latents.final is not None
    latents.final[0, :, 2, 3, 4] = math.inf
    (finding,) = find_faults(clip(0), latents=latents)
    assert finding.where == "final video latents, channels 0-23, frames 2-2, rows 3-3, columns 4-4"


def played(audio: torch.Tensor, speed: float) -> torch.Tensor:
    """Play sound faster or slower, cut to the same number of samples; where it ends early, it starts again."""
    at = (torch.arange(audio.shape[-1]) * speed) % (audio.shape[-1] - 1)
    return torch.lerp(audio[..., at.long()], audio[..., at.long() + 1], at - at.floor())


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("swapped_channels", lambda audio: audio.flip(1)),
        ("av_shift", lambda audio: torch.nn.functional.pad(audio, (RATE // FPS, 0))[..., : audio.shape[-1]]),
        ("av_shift", lambda audio: torch.nn.functional.pad(audio, (0, RATE // FPS))[..., RATE // FPS :]),
        ("clipping", lambda audio: (audio * 20).clamp(-1, 1)),
        ("silence", lambda audio: audio * torch.tensor([1.0, 0.0]).view(1, 2, 1)),
        ("loudness", lambda audio: audio * 0.5),
        ("loudness", lambda audio: audio * 1.2),
        ("polarity", lambda audio: -audio),
        ("polarity", lambda audio: audio * torch.tensor([1.0, -1.0]).view(1, 2, 1)),
        ("sound_speed", lambda audio: played(audio, 0.99)),
        ("sound_speed", lambda audio: played(audio, 1.01)),
        ("nan", lambda audio: torch.where(torch.arange(audio.shape[-1]) == 99, math.nan, audio)),
    ],
    ids=[
        *("swapped", "late", "early", "clipping", "silence", "softer", "louder", "upside down", "right upside down"),
        *("slower", "faster", "nan"),
    ],
)
def test_a_fault_of_the_sound_is_named(name, edit):
    for seed in range(3):
        assert found(with_audio(clip(seed), edit(clip(seed).audio)), seed) == {name}


def test_slight_changes_of_the_sound_are_no_fault():
    for seed in range(3):
        audio = clip(seed).audio
        noise = 0.003 * torch.randn(audio.shape, generator=torch.Generator().manual_seed(seed))
        for changed in (audio * 1.05, played(audio, 1.001), audio + noise):
            assert found(with_audio(clip(seed), changed), seed) == set()


def test_sound_that_only_touches_full_scale_is_not_clipping():
    at = torch.arange(clip(0).audio.shape[-1]) % 50
    for samples, names in ((2, set()), (3, {"clipping"})):
        audio = torch.where(at < samples, 1.0, clip(0).audio)
        assert {one.name for one in find_faults(with_audio(clip(0), audio))} == names


def test_half_a_frame_is_the_least_that_is_a_shift():
    for frames, names in ((0.4, set()), (0.6, {"av_shift"})):
        late = round(frames * RATE / FPS)
        audio = torch.nn.functional.pad(clip(0).audio, (late, 0))[..., : clip(0).audio.shape[-1]]
        assert found(with_audio(clip(0), audio)) == names


def test_a_picture_that_comes_late_is_a_shift_too():
    late = with_video(clip(1), lambda video: video.copy_(torch.cat([video[:1] * 0.99, video[:-1]])))
    (finding,) = find_faults(late, reference=clip(1))
    assert finding.name == "av_shift" and finding.measured == pytest.approx(-1.0, abs=0.1)
    assert "early" in finding.where


def white(latents):
    latents.final = torch.randn(latents.final.shape, generator=torch.Generator().manual_seed(1))


def white_and_still(latents):
    white(latents)
    latents.final = latents.final[:, :, :1].expand_as(latents.final)


def white_and_nearly_still(latents):
    white_and_still(latents)
    draw = torch.Generator().manual_seed(2)
    latents.final = latents.final[:, :, :, :4, :6] + 0.5 * torch.randn(1, 24, 10, 4, 6, generator=draw)


def patch_grid(latents):
    coarse = torch.randn(1, 24, 10, 8, 12, generator=torch.Generator().manual_seed(1))
    latents.final = coarse.repeat_interleave(2, 3).repeat_interleave(2, 4)


def scrambled_within_patches(latents):
    cells = latents.final.unflatten(3, (8, 2)).unflatten(5, (12, 2))
    latents.final = cells.flip(4).flip(6).flatten(5, 6).flatten(3, 4) * torch.tensor([1.0, -1.0]).repeat(12)


def uniform(latents):
    latents.initial = (torch.rand(latents.initial.shape, generator=torch.Generator().manual_seed(1)) - 0.5) * 12**0.5


def heavy_tailed(latents):
    latents.audio_initial = latents.audio_initial**3


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("white_latents", white),
        ("white_latents", white_and_still),
        ("white_latents", white_and_nearly_still),
        ("patch_grid_latents", patch_grid),
        ("uniform_initial_noise", uniform),
        ("non_gaussian_initial_noise", heavy_tailed),
    ],
)
def test_a_fault_of_the_latents_is_named(name, edit):
    for seed in range(3):
        latents = trace(seed)
        edit(latents)
        assert found(clip(seed), seed, latents=latents) == {name}


def test_few_samples_may_be_less_gaussian_than_many():
    def tailed(count):
        gaussian = 2**0.5 * torch.erfinv(2 * (torch.arange(count, dtype=torch.float64) + 0.5) / count - 1)
        return gaussian.sign() * gaussian.abs() ** 1.15

    for count, names in ((1000, set()), (57600, {"non_gaussian_initial_noise"})):
        latents = trace(0)
        latents.initial = tailed(count)
        assert found(clip(0), latents=latents) == names


def test_a_head_scaled_by_less_than_two_is_named_from_a_limit_on():
    reference = torch.randn(1, 50, 8, 16, generator=torch.Generator().manual_seed(0))
    for gain, count in ((1.3, 0), (1.5, 1), (1 / 1.3, 0), (1 / 1.5, 1)):
        candidate = reference.clone()
        candidate[:, :, 5] *= gain
        assert len(find_faults(clip(0), heads={"block 3": (reference, candidate)})) == count


def test_a_head_scaled_by_two_is_named():
    reference = torch.randn(1, 50, 8, 16, generator=torch.Generator().manual_seed(0))
    candidate = reference + 0.05 * torch.randn(reference.shape, generator=torch.Generator().manual_seed(1))
    candidate[:, :, 5] *= 2
    (finding,) = find_faults(clip(0), heads={"block 3": (reference, candidate)})
    assert finding.name == "head_scale" and finding.where == "block 3, head 5"
    assert finding.measured == pytest.approx(2, rel=0.05)
    candidate[:, :, 5] /= 4
    (finding,) = find_faults(clip(0), heads={"block 3": (reference, candidate)})
    assert finding.measured == pytest.approx(0.5, rel=0.05)
    assert head_gains(reference, 3 * reference).tolist() == pytest.approx([3.0] * 8)


def test_what_the_reference_has_too_is_not_reported():
    still = with_video(clip(0), freeze)
    assert find_faults(still, reference=still) == []
    noisy = trace(0)
    white(noisy)
    assert found(clip(0), latents=noisy, reference_latents=noisy) == set()
    assert found(clip(0), latents=noisy, reference_latents=trace(0)) == {"white_latents"}


def test_every_name_is_documented_and_reported_somewhere_above():
    planted = {mark.args[1][n][0] for test in TESTS for mark in marks(test) for n in range(len(mark.args[1]))}
    assert planted | {"head_scale", "contrast"} == set(FAULTS)


def marks(test):
    return [mark for mark in test.pytestmark if mark.args[0] == ("name", "edit")]


TESTS = (
    test_a_fault_of_the_picture_is_named,
    test_a_fault_of_the_whole_picture_is_named_against_the_reference,
    test_a_fault_of_the_sound_is_named,
    test_a_fault_of_the_latents_is_named,
)


def test_clips_of_different_length_are_refused():
    short = Media(clip(0).video[:, :-1], clip(0).audio, RATE)
    with pytest.raises(PipelineError, match="Compare clips of one request"):
        find_faults(short, reference=clip(0))
    with pytest.raises(PipelineError, match="audio"):
        find_faults(Media(clip(0).video, clip(0).audio[..., :-5], RATE), reference=clip(0))
