"""Exact distances between two tensors: bits, units in the last place, relative error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from h3opt.errors import PipelineError

_CHUNK = 1 << 24  # elements compared at a time: int64 keys of a whole video would take gigabytes


_UNCOUNTABLE = torch.iinfo(torch.int64).max


# The integer type to view a floating point type as. All are sign-magnitude with the sign in the top bit.
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}


_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True)
class Comparison:
    """The outcome of `bits_equal`; true when no bit differs.

    Attributes:
        elements: compared.
        differing: elements whose bits differ. NaNs are equal whatever their payload; +0 and -0 differ.
        max_abs: the largest absolute difference; infinite where one side alone is NaN, or infinities differ.
        max_ulps: the largest `ulp_distance`.
    """

    elements: int
    differing: int
    max_abs: float
    max_ulps: int

    @property
    def equal(self) -> bool:
        return self.differing == 0

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            return f"equal bits ({self.elements} elements)"
        ulps = "uncountable" if self.max_ulps == _UNCOUNTABLE else self.max_ulps
        return (
            f"{self.differing} of {self.elements} elements differ ({self.differing / self.elements:.2%}), "
            f"by up to {self.max_abs:.3g} ({ulps} ulps)"
        )


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> Comparison:
    """Compare two tensors bit for bit, NaN payloads and signs aside.

    Args:
        a, b: of one shape and dtype, any strides: float64, float32, float16, bfloat16, float8_e4m3fn,
            float8_e5m2, bool or an integer type. `b` is moved to `a`'s device where they differ.

    Raises:
        PipelineError: when shapes or dtypes differ, or the dtype is another one.
    """
    require_same(a, b)
    elements = differing = max_ulps = 0
    max_abs = 0.0
    for part_a, part_b in paired_chunks(a, b):
        elements += part_a.numel()
        differs = _bits(part_a) != _bits(part_b)
        if a.is_floating_point():
            differs &= ~(_isnan(part_a) & _isnan(part_b))
        if not differs.any():
            continue
        # Indexed as integers: not every device can index 8-bit floating point.
        part_a, part_b = (_bits(part)[differs].view(part.dtype) for part in (part_a, part_b))
        differing += part_a.numel()
        gap = (part_a.double() - part_b.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        max_abs = max(max_abs, gap.max().item())
        max_ulps = max(max_ulps, int(ulp_distance(part_a, part_b).max().item()))
    return Comparison(elements, differing, max_abs, max_ulps)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable values of the dtype apart each pair of elements is: 0 equal, 1 neighbours, ...

    +0 and -0 are 0 apart, infinity is the neighbour of the largest finite value, two NaNs are 0 apart. A NaN
    and a number, and distances beyond int64, are `torch.iinfo(torch.int64).max` apart. Integers: |a - b|.

    Args:
        a, b: as `bits_equal`.

    Returns:
        int64 of their shape, on `a`'s device.

    Raises:
        PipelineError: when shapes or dtypes differ, or the dtype is none of those that `bits_equal` takes.
    """
    require_same(a, b)
    b = b.to(a.device)
    key_a, key_b = _ordered(a), _ordered(b)
    distance = key_a - key_b
    # Subtraction wrapped round where the operands' signs differ and the result's is not the first one's.
    wrapped = ((key_a ^ key_b) & (key_a ^ distance)) < 0
    distance = distance.abs().masked_fill(wrapped | (distance == torch.iinfo(torch.int64).min), _UNCOUNTABLE)
    if a.is_floating_point():
        nan_a, nan_b = _isnan(a), _isnan(b)
        distance = distance.masked_fill(nan_a ^ nan_b, _UNCOUNTABLE).masked_fill(nan_a & nan_b, 0)
    return distance


def row_ulps(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """The largest difference, in units in the last place of the largest magnitude of its row (the last dimension).

    What another order of summation moves is a fraction of the summands, not of a sum that happens to be near zero.

    Args:
        reference, candidate: floating point, of equal shape and dtype.

    Returns:
        0 where bits agree or both are NaN; infinity where only one is finite, or only one NaN.
    """
    require_same(reference, candidate)
    if not reference.numel():
        return 0.0
    one, other = reference.double(), candidate.to(reference.device).double()
    one, other = (x.unsqueeze(0) if x.ndim == 0 else x for x in (one, other))
    same = (one == other) | (one.isnan() & other.isnan())
    both = one.isfinite() & other.isfinite()
    largest = one.abs().where(one.isfinite(), 0.0).amax(-1, keepdim=True)
    info = torch.finfo(reference.dtype)
    step = torch.exp2(torch.log2(largest.clamp(min=info.tiny)).floor()) * info.eps
    distance = ((one - other).abs() / step).where(both, float("inf")).masked_fill(same, 0.0)
    return float(distance.max())


def relative_error(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """``‖candidate − reference‖ / ‖reference‖`` in float64; 0 for two zeros."""
    require_same(reference, candidate)
    distance = float((candidate.to(reference.device).double() - reference.double()).norm())
    size = float(reference.double().norm())
    return distance / size if size else distance


def require_same(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape:
        raise PipelineError(f"cannot compare shapes {list(a.shape)} and {list(b.shape)}; pass equal requests")
    if a.dtype != b.dtype:
        raise PipelineError(f"cannot compare {a.dtype} with {b.dtype}; cast one of them first")


def paired_chunks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, flat_a.numel(), _CHUNK):
        part = flat_a[start : start + _CHUNK]
        yield part, flat_b[start : start + _CHUNK].to(part.device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _INTEGERS:
        return tensor
    if tensor.dtype not in _BITS:
        raise PipelineError(f"cannot compare bits of {tensor.dtype}; view it as an integer type of its size first")
    return tensor.detach().view(_BITS[tensor.dtype])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """int64 keys in the order of the values, consecutive for neighbouring values; both zeros have key 0."""
    bits = _bits(tensor)
    if tensor.dtype in _INTEGERS:
        return bits.to(torch.int64)
    magnitude = (bits & torch.iinfo(bits.dtype).max).to(torch.int64)
    return torch.where(bits < 0, -magnitude, magnitude)


def _isnan(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan()
