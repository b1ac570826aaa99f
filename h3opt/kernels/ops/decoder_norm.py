"""The video decoder: float32 RMSNorm of 16-bit data and scaled residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from h3opt.kernels.ops.quantize import quantize_rows_definition
from h3opt.kernels.ops.registry import DTYPES, NORM_MAX_COLUMNS, empty_quantized, launch, promoted_dtype, register_op


def scaled_residual_definition(residual: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """residual + y * scale, the video decoder's LayerScale and residual sum, in the dtype all three promote to.

    residual, y [..., D], scale [D]. With a float32 scale the sum is float32 whatever the others are.
    Source: diffusers' MiniMaxH3VideoTransformerBlock.
    """
    return (residual + y * scale).contiguous()


def wide_norm_definition(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm in float32 of x [..., D] in any dtype, weight float32 [D]; rounded to `dtype` once, at the end.

    Source: diffusers' MiniMaxH3VideoTransformerBlock.
    """
    return torch.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(dtype).contiguous()


def wide_norm_quantize_definition(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `wide_norm`, which is rounded to `dtype` first: (e4m3 [..., D], scale float32 [..., 1])."""
    return quantize_rows_definition(wide_norm_definition(x, weight, eps, dtype))


def scaled_residual_norm_definition(
    residual: Tensor, y: Tensor, scale: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """hidden = `scaled_residual`, and `wide_norm` of it: (hidden [..., D], normed [..., D] in `dtype`)."""
    hidden = scaled_residual_definition(residual, y, scale)
    return hidden, wide_norm_definition(hidden, weight, eps, dtype)


def scaled_residual_norm_quantize_definition(
    residual: Tensor, y: Tensor, scale: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `scaled_residual_norm`, the normed output quantized: (hidden, q e4m3 [..., D], scale float32 [..., 1])."""
    hidden, normed = scaled_residual_norm_definition(residual, y, scale, weight, eps, dtype)
    return hidden, *quantize_rows_definition(normed)


def _scaled_residual_fake(residual, y, scale):
    return y.new_empty(y.shape, dtype=promoted_dtype(residual, y, scale))


def _wide_norm_fake(x, weight, eps, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _wide_norm_quantize_fake(x, weight, eps, dtype):
    return empty_quantized(x, x.shape[-1])


def _scaled_residual_norm_fake(residual, y, scale, weight, eps, dtype):
    return _scaled_residual_fake(residual, y, scale), y.new_empty(y.shape, dtype=dtype)


def _scaled_residual_norm_quantize_fake(residual, y, scale, weight, eps, dtype):
    return _scaled_residual_fake(residual, y, scale), *empty_quantized(y, y.shape[-1])


def _norm_of_fresh_served(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether ATen norms a fresh float32 tensor of x's shape as vectors of four, and the kernel holds a row."""
    return (
        x.ndim >= 1
        and x.dtype in DTYPES
        and dtype in DTYPES
        and 0 < x.shape[-1] <= NORM_MAX_COLUMNS
        and x.shape[-1] % 4 == 0
        and weight.dtype == torch.float32
        and weight.shape == x.shape[-1:]
        and not (weight.is_contiguous() and weight.data_ptr() % 16)
    )


def _wide_norm_served(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    # A float32 copy of 16-bit x is fresh and aligned whatever x is.
    misaligned = x.dtype == torch.float32 and x.is_contiguous() and x.data_ptr() % 16
    return _norm_of_fresh_served(x, weight, dtype) and not misaligned


def _scaled_residual_served(residual: Tensor, y: Tensor, scale: Tensor) -> bool:
    return (
        residual.shape == y.shape
        and residual.dtype in DTYPES
        and y.dtype in DTYPES
        and y.ndim >= 1
        and 0 < y.shape[-1] <= NORM_MAX_COLUMNS
        and scale.dtype == torch.float32
        and scale.shape == y.shape[-1:]
    )


def _scaled_residual_cuda(residual, y, scale):
    if not _scaled_residual_served(residual, y, scale):
        return scaled_residual_definition(residual, y, scale)
    return launch("wide_norm", "scaled_residual", residual, y, scale)


def _wide_norm_cuda(x, weight, eps, dtype):
    if not _wide_norm_served(x, weight, dtype):
        return wide_norm_definition(x, weight, eps, dtype)
    return launch("wide_norm", "wide_norm", x, weight, eps, dtype)


def _wide_norm_quantize_cuda(x, weight, eps, dtype):
    if not _wide_norm_served(x, weight, dtype):
        return wide_norm_quantize_definition(x, weight, eps, dtype)
    return launch("wide_norm", "wide_norm_quantize", x, weight, eps, dtype)


def _scaled_residual_norm_cuda(residual, y, scale, weight, eps, dtype):
    args = (residual, y, scale, weight, eps, dtype)
    if not (_scaled_residual_served(residual, y, scale) and _norm_of_fresh_served(y, weight, dtype)):
        return scaled_residual_norm_definition(*args)
    return launch("wide_norm", "scaled_residual_norm", *args)


def _scaled_residual_norm_quantize_cuda(residual, y, scale, weight, eps, dtype):
    args = (residual, y, scale, weight, eps, dtype)
    if not (_scaled_residual_served(residual, y, scale) and _norm_of_fresh_served(y, weight, dtype)):
        return scaled_residual_norm_quantize_definition(*args)
    return launch("wide_norm", "scaled_residual_norm_quantize", *args)


_WIDE_NORM = "Tensor weight, float eps, ScalarType dtype)"


scaled_residual = register_op(
    "scaled_residual",
    "(Tensor residual, Tensor y, Tensor scale) -> Tensor",
    scaled_residual_definition,
    _scaled_residual_cuda,
    _scaled_residual_fake,
    "scaled_residual_kernel",
)


wide_norm = register_op(
    "wide_norm",
    f"(Tensor x, {_WIDE_NORM} -> Tensor",
    wide_norm_definition,
    _wide_norm_cuda,
    _wide_norm_fake,
    "wide_norm_kernel",
)


wide_norm_quantize = register_op(
    "wide_norm_quantize",
    f"(Tensor x, {_WIDE_NORM} -> (Tensor, Tensor)",
    wide_norm_quantize_definition,
    _wide_norm_quantize_cuda,
    _wide_norm_quantize_fake,
    "wide_norm_quantize_kernel",
    version=2,
)


scaled_residual_norm = register_op(
    "scaled_residual_norm",
    f"(Tensor residual, Tensor y, Tensor scale, {_WIDE_NORM} -> (Tensor, Tensor)",
    scaled_residual_norm_definition,
    _scaled_residual_norm_cuda,
    _scaled_residual_norm_fake,
    "scaled_residual_norm_kernel",
)


scaled_residual_norm_quantize = register_op(
    "scaled_residual_norm_quantize",
    f"(Tensor residual, Tensor y, Tensor scale, {_WIDE_NORM} -> (Tensor, Tensor, Tensor)",
    scaled_residual_norm_quantize_definition,
    _scaled_residual_norm_quantize_cuda,
    _scaled_residual_norm_quantize_fake,
    "scaled_residual_norm_quantize_kernel",
    version=2,
)
