"""e4m3 quantize. Row-wise: the row is read once and held in registers between its amax and its division. By head:
the scales are given, so it is one product and one cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.device import (
    EXACT_LAUNCH,
    as_rows,
    empty_quantized,
    load_columns,
    narrow_e4m3,
    quantize_row,
    widen,
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


@triton.jit
def quantize_heads_kernel(
    x_ptr, head_scale_ptr, q_ptr, token_stride, head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    head, channel = column // HEAD_DIM, column % HEAD_DIM
    inside = column < HEADS * HEAD_DIM
    x = widen(tl.load(x_ptr + row * token_stride + head * head_stride + channel, mask=inside, other=0.0))
    scale = tl.load(head_scale_ptr + head, mask=inside, other=0.0)
    scaled = tl.clamp(x * scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(q_ptr + row * (HEADS * HEAD_DIM) + column, narrow_e4m3(scaled), mask=inside)


def quantize_heads(x: torch.Tensor, head_scale: torch.Tensor, width: int = 2048) -> torch.Tensor:
    """Launch `quantize_heads_kernel` on x [..., heads, head_dim]; head_scale float32 [heads]."""
    heads, head_dim = x.shape[-2:]
    rows = x.reshape(-1, heads, head_dim)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    width = min(width, triton.next_power_of_2(heads * head_dim))
    quantize_heads_kernel[(rows.shape[0], triton.cdiv(heads * head_dim, width))](
        rows, head_scale.contiguous(), q, rows.stride(0), rows.stride(1),
        HEADS=heads, HEAD_DIM=head_dim, WIDTH=width, num_warps=4, **EXACT_LAUNCH,
    )  # fmt: skip
    return q
