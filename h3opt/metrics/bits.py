"""Exact distances between two tensors: bits, units in the last place, relative error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from h3opt.errors import PipelineError

_CHUNK = 1 << 24  # elements at a time: int64 keys of a whole video would take gigabytes
_UNCOUNTABLE = torch.iinfo(torch.int64).max
# The integer type of the same size. All floating point types are sign-magnitude with the sign in the top bit.
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
    """The result of :func:`bits_equal`; true when no bit differs.

    Attributes:
        elements: how many elements were compared.
        differing: how many of them differ in bits. All NaNs are equal, whatever the payload; +0 and -0 differ.
        max_abs: the largest absolute difference; infinite where only one side is NaN, or infinities differ.
        max_ulps: the largest :func:`ulp_distance`.
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
    """Compare two tensors bit for bit, except for the payloads and signs of NaNs.

    Args:
        a, b: of one shape and dtype, with any strides: float64, float32, float16, bfloat16, float8_e4m3fn,
            float8_e5m2, bool or an integer type. ``b`` is copied to the device of ``a`` where devices differ.

    Raises:
        PipelineError: shapes or dtypes differ, or the dtype is not supported.
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
    """Count the steps between representable values from ``a`` to ``b``: 0 for equal values, 1 for neighbours.

    The distance of +0 and -0 is 0, as is that of two NaNs; infinity is the neighbour of the largest finite value. For a
    NaN and a number, and beyond the range of int64, the distance is ``torch.iinfo(torch.int64).max``. For integers it
    is ``|a - b|``.

    Args:
        a, b: as for :func:`bits_equal`.

    Returns:
        int64 of the same shape, on the device of ``a``.

    Raises:
        PipelineError: shapes or dtypes differ, or the dtype is not supported.
    """
    require_same(a, b)
    b = b.to(a.device)
    key_a, key_b = _ordered(a), _ordered(b)
    distance = key_a - key_b
    # The subtraction overflowed where the operands differ in sign and the result has not the sign of the first operand.
    wrapped = ((key_a ^ key_b) & (key_a ^ distance)) < 0
    distance = distance.abs().masked_fill(wrapped | (distance == torch.iinfo(torch.int64).min), _UNCOUNTABLE)
    if a.is_floating_point():
        nan_a, nan_b = _isnan(a), _isnan(b)
        distance = distance.masked_fill(nan_a ^ nan_b, _UNCOUNTABLE).masked_fill(nan_a & nan_b, 0)
    return distance


def row_ulps(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Compute the largest difference in units in the last place of the largest magnitude in the row (last dimension).

    Another order of summation changes a sum by a fraction of the summands, even if the sum itself is near zero; so the
    row gives the scale, not the element.

    Args:
        reference, candidate: floating point, of equal shape and dtype.

    Returns:
        0 for equal tensors, with NaN in the same places; infinity where only one side is finite or NaN.
    """
    require_same(reference, candidate)
    if not reference.numel():
        return 0.0
    a, b = (torch.atleast_1d(x.to(reference.device).double()) for x in (reference, candidate))
    same = (a == b) | (a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    largest = a.abs().where(a.isfinite(), 0.0).amax(-1, keepdim=True)
    info = torch.finfo(reference.dtype)
    ulp = torch.exp2(torch.log2(largest.clamp(min=info.tiny)).floor()) * info.eps
    distance = ((a - b).abs() / ulp).where(finite, float("inf")).masked_fill(same, 0.0)
    return float(distance.max())


def relative_error(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Compute ``‖candidate − reference‖ / ‖reference‖`` in float64; for a zero reference ``‖candidate‖``."""
    require_same(reference, candidate)
    distance = float((candidate.to(reference.device).double() - reference.double()).norm())
    size = float(reference.double().norm())
    return distance / size if size else distance


def require_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check that two tensors can be compared.

    Raises:
        PipelineError: shapes or dtypes differ.
    """
    if a.shape != b.shape:
        raise PipelineError(f"cannot compare shapes {list(a.shape)} and {list(b.shape)}; pass equal requests")
    if a.dtype != b.dtype:
        raise PipelineError(f"cannot compare {a.dtype} with {b.dtype}; cast one of them first")


def paired_chunks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield equal parts of two tensors, flattened, on the device of ``a``: temporaries stay small."""
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
    """Map values to int64 keys in the same order, consecutive for neighbouring values; both zeros have key 0."""
    bits = _bits(tensor)
    if tensor.dtype in _INTEGERS:
        return bits.to(torch.int64)
    magnitude = (bits & torch.iinfo(bits.dtype).max).to(torch.int64)
    return torch.where(bits < 0, -magnitude, magnitude)


def _isnan(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan()
