"""LPIPS agrees with the lpips package, and refuses other tensors than videos and damaged weights."""

from __future__ import annotations

import importlib.resources
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3opt.errors import CheckpointError, MissingDependencyError, PipelineError
from h3opt.metrics.lpips import LPIPS_MIN_SIZE, lpips_per_frame

WEIGHTS = Path(str(importlib.resources.files("h3opt.reference"))) / "weights" / "lpips_alexnet.safetensors"


@pytest.fixture(scope="module")
def video() -> torch.Tensor:
    # Smooth shapes: LPIPS of white noise against white noise says little.
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(5, 3, 6, 8, generator=generator)
    return torch.nn.functional.interpolate(small, (64, 96), mode="bicubic").clamp(0, 1)[None]


def noisy(video: torch.Tensor, amount: float) -> torch.Tensor:
    noise = torch.randn(video.shape, generator=torch.Generator().manual_seed(1))
    return (video + amount * noise).clamp(0, 1)


def test_lpips_is_that_of_the_lpips_package(video: torch.Tensor) -> None:
    import lpips

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = lpips.LPIPS(net="alex", pretrained=True, pnet_rand=True, verbose=False)  # the package's own heads
    network.load_state_dict({k: v for k, v in load_file(WEIGHTS).items() if k.startswith("net.")}, strict=False)
    candidate = noisy(video, 0.1)
    with torch.no_grad():
        expected = network(2 * video[0] - 1, 2 * candidate[0] - 1)
    measured = lpips_per_frame(video, candidate, batch_size=2)
    assert measured.shape == (5,)
    assert torch.allclose(measured, expected.flatten(), rtol=1e-4, atol=1e-6)


def test_lpips_is_zero_for_identical_frames_and_grows_with_noise(video: torch.Tensor) -> None:
    assert not lpips_per_frame(video, video).any()
    means = [float(lpips_per_frame(video, noisy(video, amount)).mean()) for amount in (0.01, 0.05, 0.2)]
    assert 0 < means[0] < means[1] < means[2]


def test_lpips_gives_one_value_a_frame_in_order(video: torch.Tensor) -> None:
    candidate = video.clone()
    candidate[0, 3] = noisy(video, 0.2)[0, 3]
    values = lpips_per_frame(video, candidate, batch_size=2)
    assert (values > 0).tolist() == [False, False, False, True, False]
    assert torch.allclose(values, lpips_per_frame(video[0], candidate[0], batch_size=5), atol=1e-6)


def test_lpips_of_a_frame_with_nan_is_nan_and_no_bound_accepts_it(video: torch.Tensor) -> None:
    candidate = video.clone()
    candidate[0, 1, 0, 5, 5] = math.nan
    values = lpips_per_frame(video, candidate)
    assert values.isnan().tolist() == [False, True, False, False, False]
    assert not (values <= 0.05).all()


def test_lpips_leaves_the_global_random_state_alone(video: torch.Tensor) -> None:
    from h3opt.metrics.lpips import _lpips_network

    _lpips_network.cache_clear()
    before = torch.get_rng_state()
    lpips_per_frame(video, video)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [(LPIPS_MIN_SIZE - 1, 64), (64, LPIPS_MIN_SIZE - 1)])
def test_frames_too_small_for_lpips_are_refused_with_the_minimum(size: tuple[int, int]) -> None:
    small = torch.rand(1, 2, 3, *size)
    with pytest.raises(PipelineError, match="at least 31x31"):
        lpips_per_frame(small, small)


def test_the_smallest_frame_has_an_lpips() -> None:
    frame = torch.rand(1, 3, LPIPS_MIN_SIZE, LPIPS_MIN_SIZE)
    assert lpips_per_frame(frame, 1 - frame) > 0


@pytest.mark.parametrize(
    ("video", "message"),
    [
        (torch.rand(3, 64, 64), "must be floating point"),
        (torch.rand(1, 2, 64, 64, 3), "must be floating point"),
        (torch.rand(0, 3, 64, 64), "must be floating point"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), "must be floating point"),
        (torch.rand(1, 3, 64, 64) * 255, r"\[0, 1\]"),
        (torch.rand(1, 3, 64, 64) - 1, r"\[0, 1\]"),
    ],
)
def test_what_is_not_a_video_in_zero_to_one_is_refused(video: torch.Tensor, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        lpips_per_frame(video, video)


def test_missing_weights_are_named(video: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h3opt.metrics.lpips._weights_path", lambda: tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match=r"gone\.safetensors are missing"):
        lpips_per_frame(video, video)


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_truncated_weights_are_named(
    video: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(WEIGHTS.read_bytes()[:kept])
    monkeypatch.setattr("h3opt.metrics.lpips._weights_path", lambda: path)
    with pytest.raises(CheckpointError, match=r"cannot read the LPIPS weights .*cut\.safetensors"):
        lpips_per_frame(video, video)


def test_weights_with_other_keys_or_shapes_are_named(
    video: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = load_file(WEIGHTS)
    head = state.pop("lin2.model.1.weight")
    save_file(state, tmp_path / "lacking.safetensors")
    monkeypatch.setattr("h3opt.metrics.lpips._weights_path", lambda: tmp_path / "lacking.safetensors")
    with pytest.raises(CheckpointError, match=r"lacking\.safetensors lacks.* lin2\.model\.1\.weight"):
        lpips_per_frame(video, video)
    save_file(state | {"lin2.model.1.weight": head[:, :5].contiguous()}, tmp_path / "shape.safetensors")
    monkeypatch.setattr("h3opt.metrics.lpips._weights_path", lambda: tmp_path / "shape.safetensors")
    with pytest.raises(CheckpointError, match=r"lin2\.model\.1\.weight is \[1, 5, 1, 1\]"):
        lpips_per_frame(video, video)


def test_a_missing_lpips_package_comes_with_the_command(video: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from h3opt.metrics.lpips import _lpips_network

    _lpips_network.cache_clear()
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(MissingDependencyError, match="pip install lpips"):
        lpips_per_frame(video, video)


def test_importing_quality_and_media_imports_no_optional_package() -> None:
    code = (
        "import sys, h3opt.metrics.lpips, h3opt.render.media;"
        "print(sorted({'lpips', 'torchvision', 'av', 'PIL', 'diffusers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("measure", [lpips_per_frame])
def test_other_shapes_and_dtypes_are_refused(measure) -> None:  # type: ignore[no-untyped-def]
    video = torch.rand(1, 2, 3, 32, 32)
    with pytest.raises(PipelineError, match="shapes"):
        measure(video, video[:, :1])
    with pytest.raises(PipelineError, match="cast one"):
        measure(video, video.double())
