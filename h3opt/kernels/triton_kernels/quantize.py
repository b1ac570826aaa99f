"""e4m3 quantize. Row-wise: the row is read once and held in registers between its amax and its division. By head:
the scales are given, so it is one product and one cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.triton_kernels.device import (
    EXACT_LAUNCH,
    abs_bits,
    as_rows,
    empty_quantized,
    load_columns,
    max_magnitude,
    quantize_row,
    saturate_e4m3,
    widen,
)

# Measured choices (see bench.py --tune). Bits do not depend on them.
NUM_WARPS = 4


ELEMENTS_PER_LANE = 8


HEADS_PER_PROGRAM = 16


AMAX_ROWS = 64


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
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    inside = (head < HEADS)[:, None] & (channel < HEAD_DIM)[None, :]
    offset = head[:, None] * head_stride + channel[None, :]
    x = widen(tl.load(x_ptr + row * token_stride + offset, mask=inside, other=0.0))
    scale = tl.load(head_scale_ptr + head, mask=head < HEADS, other=0.0)[:, None]
    out = row * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + channel[None, :]
    tl.store(q_ptr + out, saturate_e4m3(x * scale), mask=inside)


@triton.jit
def heads_amax_kernel(
    x_ptr, amax_ptr, rows, token_stride, head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each head over ROWS tokens, as bits: those of non-negative floats order as integers."""
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    inside = (head < HEADS)[:, None] & (channel < HEAD_DIM)[None, :]
    offset = head[:, None] * head_stride + channel[None, :]
    largest = tl.zeros((BLOCK, WIDTH), x_ptr.dtype.element_ty)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for step in range(ROWS):
        row = first + step
        x = tl.load(x_ptr + row * token_stride + offset, mask=inside & (row < rows), other=0.0)
        largest = max_magnitude(largest, x)
    tl.atomic_max(amax_ptr + head, tl.max(abs_bits(widen(largest)), 1), mask=head < HEADS, sem="relaxed")


def quantize_heads(
    x: torch.Tensor, head_scale: torch.Tensor, block: int | None = None, num_warps: int = 4
) -> torch.Tensor:
    """Launch `quantize_heads_kernel` on x [..., heads, head_dim]; head_scale float32 [heads]."""
    rows, heads, head_dim = _rows_of_heads(x), *x.shape[-2:]
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    block = min(block or HEADS_PER_PROGRAM, triton.next_power_of_2(heads))
    quantize_heads_kernel[(rows.shape[0], triton.cdiv(heads, block))](
        rows, head_scale.contiguous(), q, rows.stride(0), rows.stride(1), HEADS=heads, HEAD_DIM=head_dim,
        BLOCK=block, WIDTH=triton.next_power_of_2(head_dim), num_warps=num_warps, **EXACT_LAUNCH,
    )  # fmt: skip
    return q


def heads_amax(x: torch.Tensor, rows_per_program: int | None = None, block: int = 16) -> torch.Tensor:
    """Launch `heads_amax_kernel` on x [..., heads, head_dim] -> float32 [heads]; a NaN is larger than any number."""
    rows, heads, head_dim = _rows_of_heads(x), *x.shape[-2:]
    amax = torch.zeros(heads, dtype=torch.int32, device=x.device)
    step = rows_per_program or AMAX_ROWS
    block = min(block, triton.next_power_of_2(heads))
    heads_amax_kernel[(triton.cdiv(rows.shape[0], step), triton.cdiv(heads, block))](
        rows, amax, rows.shape[0], rows.stride(0), rows.stride(1), HEADS=heads, HEAD_DIM=head_dim,
        BLOCK=block, WIDTH=triton.next_power_of_2(head_dim), ROWS=step, num_warps=4, **EXACT_LAUNCH,
    )  # fmt: skip
    return amax.view(torch.float32)


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, *x.shape[-2:])
    return rows if rows.stride(2) == 1 else rows.contiguous()
