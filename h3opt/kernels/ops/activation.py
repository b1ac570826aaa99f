"""SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from h3opt.kernels.ops.quantize import quantize_rows_definition
from h3opt.kernels.ops.registry import DTYPES, empty_quantized, launch, register_op


def swiglu_definition(x: Tensor) -> Tensor:
    """x [..., 2F] -> first half * silu(second half), [..., F]. Source: diffusers' SwiGLU activation."""
    value, gate = x.chunk(2, dim=-1)
    return (value * F.silu(gate)).contiguous()


def swiglu_quantize_definition(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `swiglu`: x [..., 2F] -> (q e4m3 [..., F], scale float32 [..., 1])."""
    return quantize_rows_definition(swiglu_definition(x))


def _swiglu_fake(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _swiglu_quantize_fake(x):
    return empty_quantized(x, x.shape[-1] // 2)


def _swiglu_cuda(x):
    if x.dtype not in DTYPES or x.shape[-1] % 2:
        return swiglu_definition(x)
    return launch("swiglu", "swiglu", x)


def _swiglu_quantize_cuda(x):
    if x.dtype not in DTYPES or x.shape[-1] % 2 or not 0 < x.shape[-1] // 2 <= 32768:
        return swiglu_quantize_definition(x)
    return launch("swiglu", "swiglu_quantize", x)


swiglu = register_op("swiglu", "(Tensor x) -> Tensor", swiglu_definition, _swiglu_cuda, _swiglu_fake, "swiglu_kernel")


swiglu_quantize = register_op(
    "swiglu_quantize",
    "(Tensor x) -> (Tensor, Tensor)",
    swiglu_quantize_definition,
    _swiglu_quantize_cuda,
    _swiglu_quantize_fake,
    "swiglu_quantize_kernel",
    version=2,
)
