"""Every measure agrees with its definition and refuses what it cannot measure."""

from __future__ import annotations

import importlib.resources
import math
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from h3opt.errors import CheckpointError, MissingDependencyError, PipelineError
from h3opt.metrics.audio import audio_snr_db
from h3opt.metrics.bits import Comparison, bits_equal, ulp_distance
from h3opt.metrics.lpips import LPIPS_MIN_SIZE, lpips_per_frame
from h3opt.metrics.seams import seam_visibility
from h3opt.metrics.video import psnr_db

WEIGHTS = Path(str(importlib.resources.files("h3opt.reference"))) / "weights" / "lpips_alexnet.safetensors"
LARGEST = torch.iinfo(torch.int64).max

# Bit patterns of every kind: normal and subnormal numbers, both zeros, infinities, NaNs of many payloads.
BITS = {
    torch.float16: (16, torch.int16),
    torch.bfloat16: (16, torch.int16),
    torch.float32: (32, torch.int32),
    torch.float64: (64, torch.int64),
    torch.float8_e4m3fn: (8, torch.int8),
    torch.float8_e5m2: (8, torch.int8),
}
dtypes = st.sampled_from(list(BITS))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = draw(dtypes)
    width, integer = BITS[dtype]
    patterns = st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    size = draw(st.integers(0, 20))
    left, right = (draw(st.lists(patterns, min_size=size, max_size=size)) for _ in range(2))
    shared = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    right = [x if same else y for x, y, same in zip(left, right, shared, strict=True)]
    return torch.tensor(left, dtype=integer).view(dtype), torch.tensor(right, dtype=integer).view(dtype)


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64).isnan()


def rank(value: torch.Tensor, width: int) -> int:
    """The definition in plain integers: the position of a number among all of its dtype."""
    pattern = int(value.view(BITS[value.dtype][1])) % 2**width
    magnitude = pattern % 2 ** (width - 1)
    return -magnitude if pattern >= 2 ** (width - 1) else magnitude


@given(pairs())
@settings(deadline=None)
def test_ulp_distance_is_the_difference_of_positions(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = pair
    width = BITS[a.dtype][0]
    for x, y, distance in zip(a, b, ulp_distance(a, b), strict=True):
        if is_nan(x) or is_nan(y):
            assert distance == (0 if is_nan(x) and is_nan(y) else LARGEST)
        else:
            assert distance == min(abs(rank(x, width) - rank(y, width)), LARGEST)


@given(pairs())
@settings(deadline=None)
def test_ulp_distance_is_symmetric_and_zero_to_itself(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = pair
    assert torch.equal(ulp_distance(a, b), ulp_distance(b, a))
    assert not ulp_distance(a, a).any()


@given(pairs())
@settings(deadline=None)
def test_bits_equal_counts_what_a_loop_counts(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = pair
    integer = BITS[a.dtype][1]
    differing = [
        (x, y)
        for x, y in zip(a, b, strict=True)
        if x.view(integer) != y.view(integer) and not (is_nan(x) and is_nan(y))
    ]
    comparison = bits_equal(a, b)
    assert (comparison.elements, comparison.differing) == (a.numel(), len(differing))
    assert bool(comparison) == comparison.equal == (not differing)
    gaps = [abs(float(x) - float(y)) for x, y in differing]
    assert comparison.max_abs == max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)
    assert comparison.max_ulps == max((int(ulp_distance(x, y)) for x, y in differing), default=0)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(1, 50))
def test_ulp_distance_counts_steps_of_nextafter(start: float, steps: int) -> None:
    value = origin = torch.tensor(start, dtype=torch.float32)
    for _ in range(steps):
        value = torch.nextafter(value, torch.tensor(-math.inf))
    if value.isfinite():
        # Both zeros share a position, so a walk through zero has one step that is not counted.
        crossed = origin >= 0 and (value < 0 or (value == 0 and torch.signbit(value) != torch.signbit(origin)))
        assert int(ulp_distance(origin, value)) in ({steps, steps - 1} if crossed else {steps})


def test_nan_payloads_are_equal_and_zeros_of_two_signs_are_not() -> None:
    nans = torch.frombuffer(bytearray(struct.pack("<2I", 0x7FC00000, 0xFFC12345)), dtype=torch.float32)
    assert bits_equal(nans[:1], nans[1:])
    zeros = bits_equal(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert zeros == Comparison(elements=2, differing=1, max_abs=0.0, max_ulps=0)
    assert not zeros


def test_nan_against_a_number_is_the_largest_difference() -> None:
    comparison = bits_equal(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]))
    assert comparison == Comparison(elements=2, differing=1, max_abs=math.inf, max_ulps=LARGEST)
    assert "uncountable" in str(comparison)


def test_bits_equal_reports_count_size_and_ulps() -> None:
    a = torch.ones(4, 8, dtype=torch.bfloat16)
    b = a.clone()
    b[1, 3], b[2, 2] = 1 + 2**-7, 1 + 2**-6
    comparison = bits_equal(a, b)
    assert comparison == Comparison(elements=32, differing=2, max_abs=2**-6, max_ulps=2)
    assert str(comparison) == "2 of 32 elements differ (6.25%), by up to 0.0156 (2 ulps)"


def test_bits_equal_works_in_chunks_and_on_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h3opt.metrics.bits._CHUNK", 7)
    a = torch.randn(6, 10)
    b = a.clone()
    b[0, 0] += 1
    b[5, 9] += 2
    comparison = bits_equal(a.t(), b.t())
    assert (comparison.elements, comparison.differing) == (60, 2)
    assert comparison.max_abs == pytest.approx(2)
    assert bits_equal(a.t(), a.t().contiguous())


def test_integers_are_compared_by_value() -> None:
    assert bits_equal(torch.tensor([1, -5]), torch.tensor([1, 2])).max_ulps == 7
    extremes = torch.tensor([-(2**63)]), torch.tensor([2**63 - 1])
    assert int(ulp_distance(*extremes)) == LARGEST
    assert not bits_equal(torch.tensor([True]), torch.tensor([False]))


@pytest.mark.parametrize("measure", [bits_equal, ulp_distance, psnr_db, audio_snr_db, lpips_per_frame])
def test_other_shapes_and_dtypes_are_refused(measure) -> None:  # type: ignore[no-untyped-def]
    video = torch.rand(1, 2, 3, 32, 32)
    with pytest.raises(PipelineError, match="shapes"):
        measure(video, video[:, :1])
    with pytest.raises(PipelineError, match="cast one"):
        measure(video, video.double())


def test_a_dtype_without_ulps_is_refused() -> None:
    value = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(PipelineError, match="complex64"):
        bits_equal(value, value)


def test_psnr_is_the_closed_form() -> None:
    reference = torch.zeros(2, 3, 4, 4)
    assert psnr_db(reference, reference + 0.1) == pytest.approx(20.0, abs=1e-5)
    assert psnr_db(reference, reference + 0.1, peak=10.0) == pytest.approx(40.0, abs=1e-5)
    assert psnr_db(reference, reference) == math.inf
    assert math.isnan(psnr_db(reference, reference + math.nan))
    with pytest.raises(PipelineError, match="empty"):
        psnr_db(reference[:0], reference[:0])


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


@pytest.mark.parametrize(
    "audio", [torch.zeros(100), torch.zeros(1, 1, 2, 5), torch.zeros(2, 0), torch.ones(2, 5).long()]
)
def test_audio_of_another_form_is_refused(audio: torch.Tensor) -> None:
    with pytest.raises(PipelineError, match="samples"):
        audio_snr_db(audio, audio)


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


def test_missing_weights_are_named(video: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors are missing"):
        lpips_per_frame(video, video, weights=tmp_path / "gone.safetensors")


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_truncated_weights_are_named(video: torch.Tensor, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(WEIGHTS.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"cannot read the LPIPS weights .*cut\.safetensors"):
        lpips_per_frame(video, video, weights=path)


def test_weights_with_other_keys_or_shapes_are_named(video: torch.Tensor, tmp_path: Path) -> None:
    state = load_file(WEIGHTS)
    head = state.pop("lin2.model.1.weight")
    save_file(state, tmp_path / "lacking.safetensors")
    with pytest.raises(CheckpointError, match=r"lacking\.safetensors lacks.* lin2\.model\.1\.weight"):
        lpips_per_frame(video, video, weights=tmp_path / "lacking.safetensors")
    save_file(state | {"lin2.model.1.weight": head[:, :5].contiguous()}, tmp_path / "shape.safetensors")
    with pytest.raises(CheckpointError, match=r"lin2\.model\.1\.weight is \[1, 5, 1, 1\]"):
        lpips_per_frame(video, video, weights=tmp_path / "shape.safetensors")


def _with_seam(step: float) -> torch.Tensor:
    """A video that changes by 1 at every multiple of 16 columns, and by ``1 + step`` at column 64."""
    columns = torch.arange(128)
    picture = (columns // 16).float() + step * (columns >= 64)
    return picture.expand(2, 3, 64, 128).clone()


def test_a_seam_is_as_visible_as_it_is_larger_than_other_borders_of_patches() -> None:
    assert seam_visibility(_with_seam(0.0), [], [64]) == 1
    assert seam_visibility(_with_seam(2.0), [], [64]) == 3
    assert seam_visibility(_with_seam(2.0), [], [32, 64]) == pytest.approx(3)
    assert seam_visibility(_with_seam(2.0).transpose(-1, -2), [64], []) == 3
    assert seam_visibility(_with_seam(2.0).unsqueeze(0), [16], [64]) == 3, "rows are flat, and so is their border"


def test_a_seam_in_a_flat_picture_is_infinitely_visible() -> None:
    flat = torch.zeros(1, 3, 64, 64)
    assert seam_visibility(flat, [], [32]) == 1
    flat[..., 32:] = 1
    assert seam_visibility(flat, [], [32]) == math.inf
    assert seam_visibility(flat, [], [33]) < 1


@pytest.mark.parametrize(
    ("rows", "columns"), [([], []), ([0], []), ([], [128]), ([], [-3]), ([16, 32, 48], [])], ids=str
)
def test_borders_that_are_none_are_refused(rows: list[int], columns: list[int]) -> None:
    with pytest.raises(PipelineError, match="; pass"):
        seam_visibility(_with_seam(0.0), rows, columns)


def test_seams_are_looked_for_in_videos() -> None:
    with pytest.raises(PipelineError, match="floating point videos"):
        seam_visibility(torch.zeros(3, 64, 64), [32], [])


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
