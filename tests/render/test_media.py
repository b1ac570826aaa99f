"""Written files read back as what was written, and a failed write leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from h3opt.errors import MissingDependencyError, PipelineError
from h3opt.render.media import write_frame_strip, write_mp4

RATE = 32_000


@pytest.fixture
def video() -> torch.Tensor:
    """30 frames whose left half brightens and whose right half is red."""
    frames = torch.zeros(1, 30, 3, 64, 96)
    frames[..., :48] = torch.linspace(0, 1, 30).reshape(1, 30, 1, 1, 1)
    frames[:, :, 0, :, 48:] = 1
    return frames


@pytest.fixture
def audio() -> torch.Tensor:
    """1.25 s: 440 Hz on the left, silence on the right."""
    tone = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(40_000) / RATE)
    return torch.stack([tone, torch.zeros(40_000)])[None]


def read(path: Path) -> dict[str, Any]:
    import av

    with av.open(str(path)) as container:
        picture: Any = container.streams.video[0]
        sound: Any = container.streams.audio[0]
        facts: dict[str, Any] = {
            "codecs": (picture.codec_context.name, sound.codec_context.name),
            "pix_fmt": picture.pix_fmt,
            "size": (picture.height, picture.width),
            "fps": float(picture.average_rate),
            "rate": sound.rate,
            "channels": sound.channels,
            "audio_seconds": float(sound.duration * sound.time_base),
            "video_seconds": float(picture.duration * picture.time_base),
        }
        facts["frames"] = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        container.seek(0)
        facts["samples"] = torch.cat(
            [torch.from_numpy(frame.to_ndarray()) for frame in container.decode(audio=0)], dim=1
        )
    return facts


def test_mp4_reads_back_with_its_frames_rate_and_sound(
    tmp_path: Path, video: torch.Tensor, audio: torch.Tensor
) -> None:
    path = tmp_path / "fox.mp4"
    write_mp4(path, video, audio, RATE)
    facts = read(path)
    assert facts["codecs"] == ("h264", "aac")
    assert facts["pix_fmt"] == "yuv420p"
    assert (facts["size"], facts["fps"], len(facts["frames"])) == ((64, 96), 24.0, 30)
    assert (facts["rate"], facts["channels"]) == (RATE, 2)
    assert facts["audio_seconds"] == pytest.approx(1.25, abs=0.05)
    assert facts["video_seconds"] == pytest.approx(30 / 24)
    assert list(tmp_path.iterdir()) == [path]


def test_mp4_has_the_pixels_and_the_channels_it_was_given(
    tmp_path: Path, video: torch.Tensor, audio: torch.Tensor
) -> None:
    path = tmp_path / "fox.mp4"
    write_mp4(path, video[0], audio[0], RATE)
    facts = read(path)
    for index in (0, 15, 29):
        frame = facts["frames"][index]
        assert frame[20:40, 10:30].mean() == pytest.approx(255 * index / 29, abs=6)
        assert frame[20:40, 60:90, 0].mean() == pytest.approx(255, abs=10)
        assert frame[20:40, 60:90, 1].mean() == pytest.approx(0, abs=10)
    left, right = facts["samples"][:, 4_000:30_000]
    assert left.square().mean().sqrt() == pytest.approx(0.5 / 2**0.5, rel=0.05)
    assert right.abs().max() < 0.01


def test_mp4_takes_another_frame_rate(tmp_path: Path, video: torch.Tensor, audio: torch.Tensor) -> None:
    write_mp4(tmp_path / "slow.mp4", video, audio, RATE, fps=12)
    facts = read(tmp_path / "slow.mp4")
    assert (facts["fps"], len(facts["frames"])) == (12.0, 30)
    assert facts["audio_seconds"] == pytest.approx(1.25, abs=0.05)


@pytest.mark.parametrize("seconds", [0.02, 3.0])
def test_mp4_keeps_sound_shorter_or_longer_than_the_picture(
    tmp_path: Path, video: torch.Tensor, seconds: float
) -> None:
    write_mp4(tmp_path / "x.mp4", video, torch.zeros(2, int(seconds * RATE)), RATE)
    facts = read(tmp_path / "x.mp4")
    assert len(facts["frames"]) == 30
    assert facts["audio_seconds"] == pytest.approx(seconds, abs=0.05)


def test_mp4_pads_odd_sizes_with_the_last_row_and_column(tmp_path: Path, audio: torch.Tensor) -> None:
    write_mp4(tmp_path / "odd.mp4", torch.ones(6, 3, 45, 67), audio, RATE)
    facts = read(tmp_path / "odd.mp4")
    assert facts["size"] == (46, 68)
    assert facts["frames"][0][-1].mean() > 245 and facts["frames"][0][:, -1].mean() > 245


def test_mp4_writes_nan_as_black_and_silence(tmp_path: Path) -> None:
    write_mp4(tmp_path / "nan.mp4", torch.full((6, 3, 32, 32), torch.nan), torch.full((2, 8_000), torch.nan), RATE)
    facts = read(tmp_path / "nan.mp4")
    assert facts["frames"][0].max() < 5
    assert facts["samples"].abs().max() < 1e-3


def test_an_existing_file_is_replaced(tmp_path: Path, video: torch.Tensor, audio: torch.Tensor) -> None:
    path = tmp_path / "fox.mp4"
    path.write_text("old")
    write_mp4(path, video, audio, RATE)
    assert len(read(path)["frames"]) == 30


@pytest.mark.parametrize("name", ["missing/fox", "file/fox", "folder"])
def test_a_path_that_cannot_be_written_is_named_and_nothing_is_left(
    tmp_path: Path, video: torch.Tensor, audio: torch.Tensor, name: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PipelineError, match=f"cannot write .*{name}"):
        write_mp4(tmp_path / name, video, audio, RATE)
    with pytest.raises(PipelineError, match=f"cannot write .*{name}"):
        write_frame_strip(tmp_path / name, {"reference": video})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_rate_the_encoder_refuses_leaves_the_old_file(
    tmp_path: Path, video: torch.Tensor, audio: torch.Tensor
) -> None:
    path = tmp_path / "fox.mp4"
    path.write_text("old")
    with pytest.raises(PipelineError, match="cannot encode"):
        write_mp4(path, video, audio, 32_001)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shape", [(2, 6, 3, 32, 32), (6, 32, 32, 3), (3, 32, 32), (0, 3, 32, 32)])
def test_what_is_not_one_video_is_refused(tmp_path: Path, audio: torch.Tensor, shape: tuple[int, ...]) -> None:
    with pytest.raises(PipelineError, match="a video must be"):
        write_mp4(tmp_path / "x.mp4", torch.zeros(shape), audio, RATE)
    with pytest.raises(PipelineError, match="a video must be"):
        write_frame_strip(tmp_path / "x.png", {"a": torch.zeros(shape)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(1, 1, 100), (2, 2, 100), (100,), (2, 0)])
def test_what_is_not_stereo_is_refused(tmp_path: Path, video: torch.Tensor, shape: tuple[int, ...]) -> None:
    with pytest.raises(PipelineError, match="audio must be"):
        write_mp4(tmp_path / "x.mp4", video, torch.zeros(shape), RATE)


def test_a_strip_has_a_row_a_label_with_evenly_spaced_frames(tmp_path: Path, video: torch.Tensor) -> None:
    path = tmp_path / "strip.png"
    write_frame_strip(path, {"reference": video, "optimized": video[0]}, frames=4)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (4 + 4 * (96 + 4), 2 * (20 + 64 + 4))
        # The left half's grey is the position in the video: first, third, two thirds, last.
        for row in (20, 108):
            grey = np.asarray(image)[row + 30, 14:414:100, 0].tolist()
            assert grey == [round(255 * index / 29) for index in (0, 10, 19, 29)]
        assert np.asarray(image)[:20].std() > 0, "no label"
    assert list(tmp_path.iterdir()) == [path]


def test_a_strip_scales_wide_frames_down_and_takes_other_sizes(tmp_path: Path, video: torch.Tensor) -> None:
    wide = torch.rand(2, 3, 60, 640)
    write_frame_strip(tmp_path / "strip.png", {"wide": wide, "small": video}, frames=3)
    with Image.open(tmp_path / "strip.png") as image:
        assert image.size == (4 + 3 * 324, 20 + 30 + 4 + 20 + 64 + 4)


def test_a_strip_of_nothing_is_refused(tmp_path: Path, video: torch.Tensor) -> None:
    with pytest.raises(PipelineError, match="needs a video"):
        write_frame_strip(tmp_path / "strip.png", {})
    with pytest.raises(PipelineError, match="needs a video"):
        write_frame_strip(tmp_path / "strip.png", {"a": video}, frames=0)


def test_missing_packages_come_with_the_command(
    tmp_path: Path, video: torch.Tensor, audio: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingDependencyError, match="pip install av"):
        write_mp4(tmp_path / "x.mp4", video, audio, RATE)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match="pip install pillow"):
        write_frame_strip(tmp_path / "x.png", {"a": video})
