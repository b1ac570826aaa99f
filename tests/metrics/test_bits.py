"""Exact distances between tensors agree with their definitions."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h3opt.errors import PipelineError
from h3opt.metrics.bits import Comparison, bits_equal, relative_error, row_ulps, ulp_distance

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


@pytest.mark.parametrize("measure", [bits_equal, ulp_distance, row_ulps, relative_error])
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
