"""Row-wise e4m3 quantize: the row is read once and held in registers between its amax and its division."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.device import (
    EXACT_LAUNCH,
    as_rows,
    empty_quantized,
    load_columns,
    quantize_row,
)

# Measured choices (see bench.py --tune). Bits do not depend on them.
NUM_WARPS = 4
ELEMENTS_PER_LANE = 8

MAX_COLUMNS = 32768  # a wider row would spill; the op then uses its definition


@triton.jit
def quantize_rows_kernel(x_ptr, q_ptr, q_scale_ptr, x_stride, D: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    tiles = ()
    for k in tl.static_range((D + WIDTH - 1) // WIDTH):
        tile = load_columns(x_ptr + row * x_stride, columns, D, k * WIDTH, WIDTH)
        tiles = tiles + (tile,)  # noqa: RUF005 (not in triton)
    quantize_row(q_ptr + row * D, q_scale_ptr + row, tiles, columns, D, WIDTH)


def quantize_rows(x: torch.Tensor, num_warps: int | None = None, lane: int | None = None):
    """Launch `quantize_rows_kernel` on x [..., D], D <= MAX_COLUMNS."""
    rows, D = as_rows(x), x.shape[-1]
    q, q_scale = empty_quantized(x.shape, x.device)
    num_warps = num_warps or (NUM_WARPS if D <= 8192 else 2 * NUM_WARPS)
    if rows.shape[0]:
        quantize_rows_kernel[(rows.shape[0],)](
            rows, q, q_scale, rows.stride(0), D=D, WIDTH=32 * num_warps * (lane or ELEMENTS_PER_LANE),
            num_warps=num_warps, **EXACT_LAUNCH,
        )  # fmt: skip
    return q, q_scale
