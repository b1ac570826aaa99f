"""e4m3 quantize. Row-wise: the row is read once and held in registers between its amax and its division. By head:
the scales are given, so it is one product and one cast. Values: one read for the mean and the spread of each chunk of
tokens, one for the cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.ops import attention
from h3opt.kernels.triton_kernels.device import (
    EXACT_LAUNCH,
    SCALE_AMAX_MIN_BITS,
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


SPREAD_NUM_WARPS, SPREAD_UNROLL = 4, 1


VALUES_ROWS, VALUES_NUM_WARPS = 32, 4


INFINITY_BITS = tl.constexpr(0x7F800000)


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
    """The largest finite magnitude of each head over ROWS tokens.

    As bits: those of non-negative floats order as integers.
    """
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    inside = (head < HEADS)[:, None] & (channel < HEAD_DIM)[None, :]
    offset = head[:, None] * head_stride + channel[None, :]
    largest = tl.zeros((BLOCK, WIDTH), x_ptr.dtype.element_ty)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for step in range(ROWS):
        row = first + step
        x = tl.load(x_ptr + row * token_stride + offset, mask=inside & (row < rows), other=0.0)
        largest = max_magnitude(largest, tl.where(abs_bits(widen(x)) < INFINITY_BITS, x, tl.zeros_like(x)))
    tl.atomic_max(amax_ptr + head, tl.max(abs_bits(widen(largest)), 1), mask=head < HEADS, sem="relaxed")


@triton.jit
def fold_rows(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """x: [ROWS, WIDTH] -> [WIDTH]: the sum of both halves of the rows, again and again."""
    if ROWS >= 64:
        x = tl.sum(tl.reshape(x, (2, 32, WIDTH)), 0)
    if ROWS >= 32:
        x = tl.sum(tl.reshape(x, (2, 16, WIDTH)), 0)
    if ROWS >= 16:
        x = tl.sum(tl.reshape(x, (2, 8, WIDTH)), 0)
    if ROWS >= 8:
        x = tl.sum(tl.reshape(x, (2, 4, WIDTH)), 0)
    if ROWS >= 4:
        x = tl.sum(tl.reshape(x, (2, 2, WIDTH)), 0)
    return tl.sum(x, 0)


@triton.jit
def values_spread_kernel(
    v_ptr, partial_ptr, tokens, chunk, pieces, item_stride, token_stride, head_stride, plane,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum, smallest and largest value of each channel of one head over one piece of a chunk: three planes."""
    head, item = tl.program_id(0), tl.program_id(2).to(tl.int64)
    number, piece = tl.program_id(1) // pieces, tl.program_id(1) % pieces
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_head = channel < HEAD_DIM
    first = number.to(tl.int64) * chunk + piece * PIECE
    count = tl.minimum(tl.minimum(tokens - first, chunk - piece * PIECE), PIECE)  # none past the end of a last chunk
    tile_ptr = v_ptr + item * item_stride + first * token_stride + head * head_stride
    tile_ptr += row[:, None] * token_stride + channel[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    smallest, largest = (
        tl.full((ROWS, WIDTH), float("inf"), tl.float32),
        tl.full((ROWS, WIDTH), float("-inf"), tl.float32),
    )
    if count > 0:
        for _ in tl.range(0, count // ROWS, loop_unroll_factor=UNROLL):
            x = widen(tl.load(tile_ptr, mask=in_head[None, :], other=0.0))
            total += x
            smallest, largest = tl.minimum(smallest, x), tl.maximum(largest, x)
            tile_ptr += ROWS * token_stride
        if count % ROWS != 0:
            inside = (row < count % ROWS)[:, None] & in_head[None, :]
            x = widen(tl.load(tile_ptr, mask=inside, other=0.0))
            total += x
            smallest = tl.minimum(smallest, tl.where(inside, x, float("inf")))
            largest = tl.maximum(largest, tl.where(inside, x, float("-inf")))
    out = partial_ptr + ((item * tl.num_programs(1) + tl.program_id(1)) * HEADS + head) * HEAD_DIM + channel
    tl.store(out, fold_rows(total, ROWS, WIDTH), mask=in_head)
    tl.store(out + plane, tl.min(smallest, 0), mask=in_head)
    tl.store(out + 2 * plane, tl.max(largest, 0), mask=in_head)


@triton.jit
def values_scale_kernel(
    partial_ptr, scale_ptr, mean_ptr, tokens, chunk, pieces, plane,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The mean of each channel of one head over one chunk, and 448 over the largest distance from it."""
    head, number, item = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    in_head = channel < HEAD_DIM
    chunks = tl.num_programs(1)
    total = tl.zeros((WIDTH,), tl.float32)
    smallest, largest = tl.full((WIDTH,), float("inf"), tl.float32), tl.full((WIDTH,), float("-inf"), tl.float32)
    first = partial_ptr + (((item * chunks + number) * pieces) * HEADS + head) * HEAD_DIM + channel
    for piece in range(pieces):
        part = first + piece * (HEADS * HEAD_DIM)
        total += tl.load(part, mask=in_head, other=0.0)
        smallest = tl.minimum(smallest, tl.load(part + plane, mask=in_head, other=0.0))
        largest = tl.maximum(largest, tl.load(part + 2 * plane, mask=in_head, other=0.0))
    count = tl.minimum(tokens - number.to(tl.int64) * chunk, chunk)
    mean = tl.div_rn(total, tl.zeros_like(total) + count)
    spread = tl.maximum(largest - mean, mean - smallest)
    bits = tl.where(in_head, abs_bits(spread), 0)  # never negative, and -0 is 0
    bits = tl.max(tl.where(bits < INFINITY_BITS, bits, 0))
    amax = tl.maximum(bits, SCALE_AMAX_MIN_BITS).to(tl.float32, bitcast=True)
    of_chunk = (item * chunks + number) * HEADS + head
    tl.store(mean_ptr + of_chunk * HEAD_DIM + channel, mean, mask=in_head)
    tl.store(scale_ptr + of_chunk, tl.div_rn(tl.zeros_like(amax) + 448.0, amax))


@triton.jit
def quantize_values_kernel(
    v_ptr, scale_ptr, mean_ptr, q_ptr, tokens, chunk, chunks, item_stride, token_stride, head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one head minus the mean of their chunk, times its scale; a chunk begins a new block of rows."""
    head, item = tl.program_id(0), tl.program_id(2).to(tl.int64)
    blocks = (chunk + ROWS - 1) // ROWS
    number, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    row, channel = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_head = channel < HEAD_DIM
    token = (number.to(tl.int64) * chunk + row)[:, None]
    inside = (row < chunk)[:, None] & (token < tokens) & in_head[None, :]
    x = widen(
        tl.load(
            v_ptr + item * item_stride + token * token_stride + head * head_stride + channel, mask=inside, other=0.0
        )
    )
    of_chunk = (item * chunks + number) * HEADS + head
    mean = tl.load(mean_ptr + of_chunk * HEAD_DIM + channel, mask=in_head, other=0.0)
    codes = saturate_e4m3((x - mean[None, :]) * tl.load(scale_ptr + of_chunk))
    tl.store(q_ptr + ((item * tokens + token) * HEADS + head) * HEAD_DIM + channel, codes, mask=inside)


def quantize_values(
    v: torch.Tensor, chunk: int, num_warps: int | None = None, unroll: int | None = None, rows: int | None = None,
    cast_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launch the three kernels of `quantize_values` on v [batch, tokens, heads, head_dim], not empty."""
    v = v if v.stride(3) == 1 else v.contiguous()
    batch, tokens, heads, head_dim = v.shape
    chunks, rows = triton.cdiv(tokens, chunk), rows or VALUES_ROWS
    scale = torch.empty((batch, chunks, heads), dtype=torch.float32, device=v.device)
    mean = torch.empty((batch, chunks, heads, head_dim), dtype=torch.float32, device=v.device)
    q = torch.empty(v.shape, dtype=torch.float8_e4m3fn, device=v.device)
    sizes = {"HEADS": heads, "HEAD_DIM": head_dim, "WIDTH": triton.next_power_of_2(head_dim)}
    strides = v.stride()[:3]
    pieces = triton.cdiv(min(chunk, tokens), attention.VALUE_PIECE)
    partial = torch.empty((3, batch, chunks * pieces, heads, head_dim), dtype=torch.float32, device=v.device)
    values_spread_kernel[(heads, chunks * pieces, batch)](
        v, partial, tokens, chunk, pieces, *strides, partial[0].numel(), **sizes, ROWS=attention.VALUE_ROWS,
        PIECE=attention.VALUE_PIECE, UNROLL=unroll or SPREAD_UNROLL, num_warps=num_warps or SPREAD_NUM_WARPS,
        **EXACT_LAUNCH,
    )  # fmt: skip
    values_scale_kernel[(heads, chunks, batch)](
        partial, scale, mean, tokens, chunk, pieces, partial[0].numel(), **sizes, num_warps=4, **EXACT_LAUNCH
    )
    quantize_values_kernel[(heads, chunks * triton.cdiv(min(chunk, tokens), rows), batch)](
        v, scale, mean, q, tokens, min(chunk, tokens), chunks, *strides, **sizes, ROWS=rows,
        num_warps=cast_warps or VALUES_NUM_WARPS, **EXACT_LAUNCH,
    )  # fmt: skip
    return q, scale, mean


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
    """Launch `heads_amax_kernel` on x [..., heads, head_dim] -> float32 [heads]; NaN and inf are left out."""
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
