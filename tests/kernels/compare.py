"""Bit comparison of tensors with NaN payloads made equal."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def differing(actual, expected) -> int:
    """How many elements differ in their bits (so -0 differs from 0); every NaN is one value. Shapes, dtypes must agree."""
    if isinstance(expected, tuple):
        assert len(actual) == len(expected)
        return sum(differing(a, e) for a, e in zip(actual, expected, strict=True))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    return int((_bits(actual) != _bits(expected)).sum())


def _bits(x: Tensor) -> Tensor:
    bits = x.contiguous().view(_INTEGERS[x.element_size()])
    nan = (bits & 0x7F) == 0x7F if x.dtype == torch.float8_e4m3fn else x.isnan()
    return bits.masked_fill(nan, torch.iinfo(bits.dtype).max)
