"""SwiGLU, and SwiGLU + e4m3 quantize with the output row held in registers: one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.triton_kernels.device import (
    EXACT_LAUNCH,
    as_rows,
    empty_quantized,
    exp,
    fma,
    load_columns,
    multiply_rounded,
    narrow,
    negate,
    quantize_row,
    reciprocal_approx,
    refine_quotient,
    widen,
)

# Measured choices (see bench.py --tune). Bits do not depend on them.
NUM_WARPS = 8


ELEMENTS_PER_LANE = 8


QUANTIZE_NUM_WARPS = 8


QUANTIZE_ELEMENTS_PER_LANE = 8


MAX_COLUMNS = 32768  # a wider row would spill; the op then uses its definition


@triton.jit
def silu(x, dtype: tl.constexpr, BRANCHLESS: tl.constexpr):
    """x / (1 + exp(-x)) of a float32 tensor that came from dtype, rounded to dtype.

    BRANCHLESS divides by an approximate reciprocal and one remainder step, with both sides scaled by 1/4 so that
    the reciprocal of a large finite denominator stays normal. Its float32 quotient is within an ulp of the rounded
    one; that no bf16 or fp16 input tells the two apart is tested for all 65536 of each, on the GPU and with any
    reciprocal within an ulp that is exact for powers of two. float32 input takes the IEEE division.
    """
    if BRANCHLESS and dtype != tl.float32:
        numerator = x * 0.25
        denominator = fma(exp(negate(x)), 0.25 + tl.zeros_like(x), 0.25 + tl.zeros_like(x))
        inverse = reciprocal_approx(denominator)
        quotient = numerator * inverse
        refined = refine_quotient(quotient, numerator, denominator, inverse)
        # An infinite x or denominator makes the remainder NaN; the quotient is then right as it is.
        out = tl.where(refined == refined, refined, quotient)
    else:
        out = tl.div_rn(x, 1.0 + exp(negate(x)))
    return narrow(out, dtype)


@triton.jit
def swiglu_columns(
    row_ptr, columns, F: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, BRANCHLESS: tl.constexpr
):
    value = load_columns(row_ptr, columns, F, START, WIDTH)
    gate = load_columns(row_ptr + F, columns, F, START, WIDTH)
    return multiply_rounded(value, silu(widen(gate), gate.dtype, BRANCHLESS))


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, x_stride, F, WIDTH: tl.constexpr, BRANCHLESS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < F
    value = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    gate = tl.load(x_ptr + row * x_stride + F + columns, mask=inside, other=0.0)
    out = multiply_rounded(value, silu(widen(gate), gate.dtype, BRANCHLESS))
    tl.store(out_ptr + row * F + columns, out, mask=inside)


@triton.jit
def swiglu_quantize_kernel(
    x_ptr, q_ptr, q_scale_ptr, x_stride, F: tl.constexpr, WIDTH: tl.constexpr, BRANCHLESS: tl.constexpr
):  # fmt: skip
    """The output row stays in registers between its largest value and its division: x is read once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    tiles = ()
    for k in tl.static_range((F + WIDTH - 1) // WIDTH):
        tile = swiglu_columns(x_ptr + row * x_stride, columns, F, k * WIDTH, WIDTH, BRANCHLESS)
        tiles = tiles + (tile,)  # noqa: RUF005 (not in triton)
    quantize_row(q_ptr + row * F, q_scale_ptr + row, tiles, columns, F, WIDTH)


def swiglu(x: torch.Tensor, num_warps: int | None = None, lane: int | None = None, branchless: bool = True):
    """Launch `swiglu_kernel` on x [..., 2F]."""
    rows, F = as_rows(x), x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], F), dtype=x.dtype, device=x.device)
    num_warps = num_warps or NUM_WARPS
    width = 32 * num_warps * (lane or ELEMENTS_PER_LANE)
    if out.numel():
        swiglu_kernel[(rows.shape[0], triton.cdiv(F, width))](
            rows, out, rows.stride(0), F, WIDTH=width, BRANCHLESS=branchless, num_warps=num_warps, **EXACT_LAUNCH
        )
    return out


def swiglu_quantize(x: torch.Tensor, num_warps: int | None = None, lane: int | None = None, branchless: bool = True):
    """Launch `swiglu_quantize_kernel` on x [..., 2F], F <= MAX_COLUMNS."""
    rows, F = as_rows(x), x.shape[-1] // 2
    q, q_scale = empty_quantized((*x.shape[:-1], F), x.device)
    num_warps = num_warps or QUANTIZE_NUM_WARPS
    if q.numel():
        swiglu_quantize_kernel[(rows.shape[0],)](
            rows, q, q_scale, rows.stride(0), F=F, WIDTH=32 * num_warps * (lane or QUANTIZE_ELEMENTS_PER_LANE),
            BRANCHLESS=branchless, num_warps=num_warps, **EXACT_LAUNCH,
        )  # fmt: skip
    return q, q_scale
