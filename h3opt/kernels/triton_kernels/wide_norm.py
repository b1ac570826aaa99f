"""The video decoder's float32 residual stream: LayerScale, residual sum, RMSNorm, cast or e4m3 quantize.

One program holds one row in float32 registers as tiles [128, 4], whatever the dtypes in memory: ATen promotes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.triton_kernels.device import (
    EXACT_LAUNCH,
    TILE,
    as_rows,
    empty_quantized,
    load_columns,
    narrow,
    quantize_row,
    rms_reciprocal,
    row_sum_of_squares,
    vector_columns,
    widen,
)
from h3opt.kernels.triton_kernels.norm import store_row

# Measured (see bench.py --tune): 1 to 8 are within 6 % but for wide_norm_quantize's 8. Bits do not depend on them.
NUM_WARPS = {
    "scaled_residual": 4,
    "wide_norm": 4,
    "wide_norm_quantize": 4,
    "scaled_residual_norm": 4,
    "scaled_residual_norm_quantize": 4,
}


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def load_wide_row(row_ptr, D: tl.constexpr):
    """A whole row as float32 tiles [128, 4]."""
    columns = vector_columns()
    tiles = ()
    for k in tl.static_range((D + TILE - 1) // TILE):
        tiles = tiles + (widen(load_columns(row_ptr, columns, D, k * TILE, TILE)),)  # noqa: RUF005 (not in triton)
    return tiles


@triton.jit
def add_scaled_row(residual_ptr, y_ptr, scale_ptr, hidden_ptr, D: tl.constexpr):
    """hidden = residual + y * scale for one row, each rounded to float32; stored, and returned as tiles."""
    columns = vector_columns()
    tiles = ()
    for k in tl.static_range((D + TILE - 1) // TILE):
        residual = widen(load_columns(residual_ptr, columns, D, k * TILE, TILE))
        y = widen(load_columns(y_ptr, columns, D, k * TILE, TILE))
        scale = load_columns(scale_ptr, columns, D, k * TILE, TILE)
        tiles = tiles + (residual + y * scale,)  # noqa: RUF005 (not in triton)
    store_row(hidden_ptr, tiles, D)
    return tiles


@triton.jit
def norm_wide_row(tiles, weight_ptr, D: tl.constexpr, eps, DTYPE: tl.constexpr):
    """weight * (rstd * x) of float32 tiles, rounded to DTYPE once."""
    rstd = rms_reciprocal(row_sum_of_squares(tiles, D), D, eps)
    columns = vector_columns()
    out = ()
    for k in tl.static_range((D + TILE - 1) // TILE):
        weight = load_columns(weight_ptr, columns, D, k * TILE, TILE)
        out = out + (narrow(weight * (rstd * tiles[k]), DTYPE),)  # noqa: RUF005 (not in triton)
    return out


@triton.jit
def scaled_residual_kernel(
    residual_ptr, y_ptr, scale_ptr, hidden_ptr, residual_stride, y_stride, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    add_scaled_row(residual_ptr + row * residual_stride, y_ptr + row * y_stride, scale_ptr, hidden_ptr + row * D, D)


@triton.jit
def wide_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = load_wide_row(x_ptr + row * x_stride, D)
    store_row(out_ptr + row * D, norm_wide_row(x, weight_ptr, D, eps, DTYPE), D)


@triton.jit
def wide_norm_quantize_kernel(
    x_ptr, weight_ptr, q_ptr, q_scale_ptr, x_stride, eps, D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x = load_wide_row(x_ptr + row * x_stride, D)
    out = norm_wide_row(x, weight_ptr, D, eps, DTYPE)
    quantize_row(q_ptr + row * D, q_scale_ptr + row, out, vector_columns(), D, TILE)


@triton.jit
def scaled_residual_norm_kernel(
    residual_ptr, y_ptr, scale_ptr, weight_ptr, hidden_ptr, out_ptr,
    residual_stride, y_stride, eps, D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    hidden = add_scaled_row(
        residual_ptr + row * residual_stride, y_ptr + row * y_stride, scale_ptr, hidden_ptr + row * D, D
    )
    store_row(out_ptr + row * D, norm_wide_row(hidden, weight_ptr, D, eps, DTYPE), D)


@triton.jit
def scaled_residual_norm_quantize_kernel(
    residual_ptr, y_ptr, scale_ptr, weight_ptr, hidden_ptr, q_ptr, q_scale_ptr,
    residual_stride, y_stride, eps, D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    hidden = add_scaled_row(
        residual_ptr + row * residual_stride, y_ptr + row * y_stride, scale_ptr, hidden_ptr + row * D, D
    )
    out = norm_wide_row(hidden, weight_ptr, D, eps, DTYPE)
    quantize_row(q_ptr + row * D, q_scale_ptr + row, out, vector_columns(), D, TILE)


def scaled_residual(residual, y, scale, num_warps=None):
    """Launch `scaled_residual_kernel`: residual, y [..., D], scale float32 [D] -> float32 [..., D]."""
    residual_rows, y_rows, D = as_rows(residual), as_rows(y), y.shape[-1]
    hidden = torch.empty(y.shape, dtype=torch.float32, device=y.device)
    if y_rows.shape[0]:
        scaled_residual_kernel[(y_rows.shape[0],)](
            residual_rows, y_rows, scale.contiguous(), hidden, residual_rows.stride(0), y_rows.stride(0), D=D,
            num_warps=num_warps or NUM_WARPS["scaled_residual"], **EXACT_LAUNCH,
        )  # fmt: skip
    return hidden


def wide_norm(x, weight, eps, dtype, num_warps=None):
    """Launch `wide_norm_kernel`: x [..., D], D % 4 == 0, weight float32 [D] -> [..., D] in dtype."""
    rows, D = as_rows(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if rows.shape[0]:
        wide_norm_kernel[(rows.shape[0],)](
            rows, weight.contiguous(), out, rows.stride(0), eps, D=D, DTYPE=TRITON_DTYPES[dtype],
            num_warps=num_warps or NUM_WARPS["wide_norm"], **EXACT_LAUNCH,
        )  # fmt: skip
    return out


def wide_norm_quantize(x, weight, eps, dtype, num_warps=None):
    """Launch `wide_norm_quantize_kernel`: arguments as `wide_norm`."""
    rows, D = as_rows(x), x.shape[-1]
    q, q_scale = empty_quantized(x.shape, x.device)
    if rows.shape[0]:
        wide_norm_quantize_kernel[(rows.shape[0],)](
            rows, weight.contiguous(), q, q_scale, rows.stride(0), eps, D=D, DTYPE=TRITON_DTYPES[dtype],
            num_warps=num_warps or NUM_WARPS["wide_norm_quantize"], **EXACT_LAUNCH,
        )  # fmt: skip
    return q, q_scale


def scaled_residual_norm(residual, y, scale, weight, eps, dtype, num_warps=None):
    """Launch `scaled_residual_norm_kernel`: residual and y [..., D]; the rest as `wide_norm`."""
    residual_rows, y_rows, D = as_rows(residual), as_rows(y), y.shape[-1]
    hidden = torch.empty(y.shape, dtype=torch.float32, device=y.device)
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    if y_rows.shape[0]:
        scaled_residual_norm_kernel[(y_rows.shape[0],)](
            residual_rows, y_rows, scale.contiguous(), weight.contiguous(), hidden, out,
            residual_rows.stride(0), y_rows.stride(0), eps, D=D, DTYPE=TRITON_DTYPES[dtype],
            num_warps=num_warps or NUM_WARPS["scaled_residual_norm"], **EXACT_LAUNCH,
        )  # fmt: skip
    return hidden, out


def scaled_residual_norm_quantize(residual, y, scale, weight, eps, dtype, num_warps=None):
    """Launch `scaled_residual_norm_quantize_kernel`: arguments as `scaled_residual_norm`."""
    residual_rows, y_rows, D = as_rows(residual), as_rows(y), y.shape[-1]
    hidden = torch.empty(y.shape, dtype=torch.float32, device=y.device)
    q, q_scale = empty_quantized(y.shape, y.device)
    if y_rows.shape[0]:
        scaled_residual_norm_quantize_kernel[(y_rows.shape[0],)](
            residual_rows, y_rows, scale.contiguous(), weight.contiguous(), hidden, q, q_scale,
            residual_rows.stride(0), y_rows.stride(0), eps, D=D, DTYPE=TRITON_DTYPES[dtype],
            num_warps=num_warps or NUM_WARPS["scaled_residual_norm_quantize"], **EXACT_LAUNCH,
        )  # fmt: skip
    return hidden, q, q_scale
