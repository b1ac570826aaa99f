"""RMSNorm + AdaLN modulation, optionally after gate*y + residual and before the e4m3 quantize: one pass over memory.

One program holds one row in registers as tiles [128, 4], reduces it in ATen's order, then modulates and stores it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.triton_kernels.device import (
    EXACT_LAUNCH,
    TILE,
    add_rounded,
    as_rows,
    empty_quantized,
    load_columns,
    load_row,
    multiply_rounded,
    narrow,
    quantize_row,
    rms_reciprocal,
    row_sum_of_squares,
    store_columns,
    vector_columns,
    widen,
)

# Measured choices (see bench.py --tune). Bits do not depend on them.
NUM_WARPS = {
    "gated_residual": 4,
    "norm_modulate": 4,
    "norm_modulate_quantize": 2,
    "residual_norm_modulate": 4,
    "residual_norm_modulate_quantize": 2,
}


@triton.jit
def add_gated_row(residual_ptr, y_ptr, gate_ptr, hidden_ptr, D: tl.constexpr):
    """hidden = residual + gate * y for one row; stored, and returned as tiles."""
    columns = vector_columns()
    tiles = ()
    for k in tl.static_range((D + TILE - 1) // TILE):
        residual = load_columns(residual_ptr, columns, D, k * TILE, TILE)
        y = load_columns(y_ptr, columns, D, k * TILE, TILE)
        gate = load_columns(gate_ptr, columns, D, k * TILE, TILE)
        tiles = tiles + (add_rounded(residual, multiply_rounded(gate, y)),)  # noqa: RUF005 (not in triton)
    for k in tl.static_range((D + TILE - 1) // TILE):
        store_columns(hidden_ptr, columns, tiles[k], D, k * TILE, TILE)
    return tiles


@triton.jit
def modulate_tile(x, rstd, columns, weight_ptr, scale_ptr, shift_ptr, D: tl.constexpr, START: tl.constexpr):
    """weight * (rstd * x), times (1 + scale), plus shift: each rounded to x's dtype. Returns x's dtype."""
    dtype: tl.constexpr = x.dtype
    weight = load_columns(weight_ptr, columns, D, START, TILE)
    scale = load_columns(scale_ptr, columns, D, START, TILE)
    shift = load_columns(shift_ptr, columns, D, START, TILE)
    normed = narrow(widen(weight) * (rstd * widen(x)), dtype)
    one = narrow(tl.full(scale.shape, 1.0, tl.float32), dtype)
    return add_rounded(multiply_rounded(normed, add_rounded(scale, one)), shift)


@triton.jit
def modulate_row(tiles, weight_ptr, scale_ptr, shift_ptr, D: tl.constexpr, eps):
    rstd = rms_reciprocal(row_sum_of_squares(tiles, D), D, eps)
    columns = vector_columns()
    out = ()
    for k in tl.static_range((D + TILE - 1) // TILE):
        tile = modulate_tile(tiles[k], rstd, columns, weight_ptr, scale_ptr, shift_ptr, D, k * TILE)
        out = out + (tile,)  # noqa: RUF005 (not in triton)
    return out


@triton.jit
def store_row(out_ptr, tiles, D: tl.constexpr):
    columns = vector_columns()
    for k in tl.static_range((D + TILE - 1) // TILE):
        store_columns(out_ptr, columns, tiles[k], D, k * TILE, TILE)


@triton.jit
def norm_modulate_kernel(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, index_ptr, out_ptr,
    tokens, x_stride, scale_stride, shift_stride, eps, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(index_ptr + tl.program_id(0) % tokens)
    x = load_row(x_ptr + row * x_stride, D)
    out = modulate_row(x, weight_ptr, scale_ptr + entry * scale_stride, shift_ptr + entry * shift_stride, D, eps)
    store_row(out_ptr + row * D, out, D)


@triton.jit
def norm_modulate_quantize_kernel(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, index_ptr, q_ptr, q_scale_ptr,
    tokens, x_stride, scale_stride, shift_stride, eps, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(index_ptr + tl.program_id(0) % tokens)
    x = load_row(x_ptr + row * x_stride, D)
    out = modulate_row(x, weight_ptr, scale_ptr + entry * scale_stride, shift_ptr + entry * shift_stride, D, eps)
    quantize_row(q_ptr + row * D, q_scale_ptr + row, out, vector_columns(), D, TILE)


@triton.jit
def residual_norm_modulate_kernel(
    residual_ptr, y_ptr, gate_ptr, weight_ptr, scale_ptr, shift_ptr, index_ptr, hidden_ptr, out_ptr,
    tokens, residual_stride, y_stride, gate_stride, scale_stride, shift_stride, eps, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(index_ptr + tl.program_id(0) % tokens)
    hidden = add_gated_row(
        residual_ptr + row * residual_stride, y_ptr + row * y_stride, gate_ptr + entry * gate_stride,
        hidden_ptr + row * D, D,
    )  # fmt: skip
    out = modulate_row(hidden, weight_ptr, scale_ptr + entry * scale_stride, shift_ptr + entry * shift_stride, D, eps)
    store_row(out_ptr + row * D, out, D)


@triton.jit
def residual_norm_modulate_quantize_kernel(
    residual_ptr, y_ptr, gate_ptr, weight_ptr, scale_ptr, shift_ptr, index_ptr, hidden_ptr, q_ptr, q_scale_ptr,
    tokens, residual_stride, y_stride, gate_stride, scale_stride, shift_stride, eps, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(index_ptr + tl.program_id(0) % tokens)
    hidden = add_gated_row(
        residual_ptr + row * residual_stride, y_ptr + row * y_stride, gate_ptr + entry * gate_stride,
        hidden_ptr + row * D, D,
    )  # fmt: skip
    out = modulate_row(hidden, weight_ptr, scale_ptr + entry * scale_stride, shift_ptr + entry * shift_stride, D, eps)
    quantize_row(q_ptr + row * D, q_scale_ptr + row, out, vector_columns(), D, TILE)


@triton.jit
def gated_residual_kernel(
    residual_ptr, y_ptr, gate_ptr, index_ptr, hidden_ptr,
    tokens, residual_stride, y_stride, gate_stride, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(index_ptr + tl.program_id(0) % tokens)
    add_gated_row(
        residual_ptr + row * residual_stride, y_ptr + row * y_stride, gate_ptr + entry * gate_stride,
        hidden_ptr + row * D, D,
    )  # fmt: skip


def gated_residual(residual, y, gate_table, index, num_warps=None):
    """Launch `gated_residual_kernel`: residual and y [..., tokens, D]; the gate table may be strided by row."""
    residual_rows, y_rows, D = as_rows(residual), as_rows(y), y.shape[-1]
    gate = as_rows(gate_table)
    hidden = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y_rows.shape[0]:
        gated_residual_kernel[(y_rows.shape[0],)](
            residual_rows, y_rows, gate, index.contiguous(), hidden,
            index.shape[0], residual_rows.stride(0), y_rows.stride(0), gate.stride(0), D=D,
            num_warps=num_warps or NUM_WARPS["gated_residual"], **EXACT_LAUNCH,
        )  # fmt: skip
    return hidden


def norm_modulate(x, weight, scale_table, shift_table, index, eps, num_warps=None):
    """Launch `norm_modulate_kernel`: x [..., tokens, D], D % 4 == 0; tables [rows, D] may be strided by row."""
    rows, D = as_rows(x), x.shape[-1]
    scale, shift = as_rows(scale_table), as_rows(shift_table)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        norm_modulate_kernel[(rows.shape[0],)](
            rows, weight.contiguous(), scale, shift, index.contiguous(), out,
            index.shape[0], rows.stride(0), scale.stride(0), shift.stride(0), eps, D=D,
            num_warps=num_warps or NUM_WARPS["norm_modulate"], **EXACT_LAUNCH,
        )  # fmt: skip
    return out


def norm_modulate_quantize(x, weight, scale_table, shift_table, index, eps, num_warps=None):
    """Launch `norm_modulate_quantize_kernel`: arguments as `norm_modulate`."""
    rows, D = as_rows(x), x.shape[-1]
    scale, shift = as_rows(scale_table), as_rows(shift_table)
    q, q_scale = empty_quantized(x.shape, x.device)
    if rows.shape[0]:
        norm_modulate_quantize_kernel[(rows.shape[0],)](
            rows, weight.contiguous(), scale, shift, index.contiguous(), q, q_scale,
            index.shape[0], rows.stride(0), scale.stride(0), shift.stride(0), eps, D=D,
            num_warps=num_warps or NUM_WARPS["norm_modulate_quantize"], **EXACT_LAUNCH,
        )  # fmt: skip
    return q, q_scale


def residual_norm_modulate(residual, y, gate_table, weight, scale_table, shift_table, index, eps, num_warps=None):
    """Launch `residual_norm_modulate_kernel`: residual and y [..., tokens, D]; the rest as `norm_modulate`."""
    residual_rows, y_rows, D = as_rows(residual), as_rows(y), y.shape[-1]
    gate, scale, shift = as_rows(gate_table), as_rows(scale_table), as_rows(shift_table)
    hidden = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    out = torch.empty_like(hidden)
    if y_rows.shape[0]:
        residual_norm_modulate_kernel[(y_rows.shape[0],)](
            residual_rows, y_rows, gate, weight.contiguous(), scale, shift, index.contiguous(), hidden, out,
            index.shape[0], residual_rows.stride(0), y_rows.stride(0),
            gate.stride(0), scale.stride(0), shift.stride(0), eps, D=D,
            num_warps=num_warps or NUM_WARPS["residual_norm_modulate"], **EXACT_LAUNCH,
        )  # fmt: skip
    return hidden, out


def residual_norm_modulate_quantize(
    residual, y, gate_table, weight, scale_table, shift_table, index, eps, num_warps=None
):
    """Launch `residual_norm_modulate_quantize_kernel`: arguments as `residual_norm_modulate`."""
    residual_rows, y_rows, D = as_rows(residual), as_rows(y), y.shape[-1]
    gate, scale, shift = as_rows(gate_table), as_rows(scale_table), as_rows(shift_table)
    hidden = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    q, q_scale = empty_quantized(y.shape, y.device)
    if y_rows.shape[0]:
        residual_norm_modulate_quantize_kernel[(y_rows.shape[0],)](
            residual_rows, y_rows, gate, weight.contiguous(), scale, shift, index.contiguous(),
            hidden, q, q_scale,
            index.shape[0], residual_rows.stride(0), y_rows.stride(0),
            gate.stride(0), scale.stride(0), shift.stride(0), eps, D=D,
            num_warps=num_warps or NUM_WARPS["residual_norm_modulate_quantize"], **EXACT_LAUNCH,
        )  # fmt: skip
    return hidden, q, q_scale
