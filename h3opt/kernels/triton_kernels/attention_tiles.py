"""Codes of q, k and v written as the tiles that the Hopper attention kernel copies into shared memory.

The layout is defined in plain torch in `h3opt/kernels/ops/hopper_attention.py`. Codes move as 32-bit words of four; a
program reads and writes pieces of 16 bytes, four words each, so that a swizzled piece stays one access to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS = 128  # of a program; a tile of v has as many keys


@triton.jit
def row_tiles_kernel(
    q_ptr, k_ptr, q_tiles_ptr, k_tiles_ptr, queries, keys, q_rows, k_rows, HEADS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Programs of even number in the last axis write q, the others k: ROWS tokens of one head."""
    head, first, item = tl.program_id(0), tl.program_id(1) * ROWS, tl.program_id(2) // 2
    if tl.program_id(2) % 2 == 0:
        _write_row_tiles(q_ptr, q_tiles_ptr, queries, q_rows, head, first, item, HEADS, ROWS)
    else:
        _write_row_tiles(k_ptr, k_tiles_ptr, keys, k_rows, head, first, item, HEADS, ROWS)


@triton.jit
def _write_row_tiles(
    codes_ptr, tiles_ptr, tokens, rows, head, first, item, HEADS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Tokens from `first` on, zero from `tokens` on, nothing from `rows` on."""
    row = first + tl.arange(0, ROWS)[:, None, None]
    piece, word = tl.arange(0, 8)[None, :, None], tl.arange(0, 4)[None, None, :]
    codes_ptr += (item.to(tl.int64) * tokens + first) * HEADS * 32
    tiles_ptr += ((item.to(tl.int64) * HEADS + head) * rows + first) * 32
    source = ((row - first) * HEADS + head) * 32 + piece * 4 + word
    codes = tl.load(codes_ptr + source, mask=row < tokens, other=0)
    tl.store(tiles_ptr + (row - first) * 32 + (piece ^ (row % 8)) * 4 + word, codes, mask=row < rows)


@triton.jit
def value_tiles_kernel(v_ptr, tiles_ptr, tokens, blocks, HEADS: tl.constexpr):
    """One block of 128 keys of one head: its transpose, a row for each channel.

    Four codes of a word of v are four channels of one key; those of a word of the tile are one channel of four keys. So
    four words of four keys are transposed in registers.
    """
    head, block, item = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    four_channels = tl.arange(0, 32)[:, None, None]
    piece, word = tl.arange(0, 8)[None, :, None], tl.arange(0, 4)[None, None, :]
    key = piece * 16 + word * 2  # the first of a word's four keys: it, its successor, and the two that follow by 8
    left = tokens - block * 128
    v_ptr += (item.to(tl.int64) * tokens + block * 128) * HEADS * 32 + head * 32 + four_channels
    words = ()
    for offset in tl.static_range(4):
        this = key + (offset % 2 + 8 * (offset // 2))
        words = words + (tl.load(v_ptr + this * (HEADS * 32), mask=this < left, other=0),)  # noqa: RUF005
    tiles_ptr += ((item.to(tl.int64) * HEADS + head) * blocks + block) * (128 * 32)
    for offset in tl.static_range(4):
        row = four_channels * 4 + offset
        packed = _byte(words[0], offset) | (_byte(words[1], offset) << 8)
        packed |= (_byte(words[2], offset) << 16) | (_byte(words[3], offset) << 24)
        tl.store(tiles_ptr + row * 32 + (piece ^ (row % 8)) * 4 + word, packed)


@triton.jit
def _byte(word, number: tl.constexpr):
    return (word >> (8 * number)) & 0xFF


def row_tiles(
    q: torch.Tensor, k: torch.Tensor, q_rows: int, k_rows: int, num_warps: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `row_tiles_kernel` on e4m3 q [batch, queries, heads, 128] and k [batch, keys, heads, 128].

    Returns uint8 tiles of q_rows queries and of k_rows keys: [batch, heads, tiles, q_rows or k_rows, 128].
    """
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    q_tiles, k_tiles = _empty_tiles(q, q_rows), _empty_tiles(k, k_rows)
    all_q, all_k = q_tiles.shape[2] * q_rows, k_tiles.shape[2] * k_rows
    row_tiles_kernel[(heads, triton.cdiv(max(all_q, all_k), TOKENS), 2 * batch)](
        _words(q), _words(k), _words(q_tiles), _words(k_tiles), queries, keys, all_q, all_k,
        HEADS=heads, ROWS=TOKENS, num_warps=num_warps,
    )  # fmt: skip
    return q_tiles, k_tiles


def value_tiles(v: torch.Tensor, num_warps: int = 4) -> torch.Tensor:
    """Launch `value_tiles_kernel` on e4m3 v [batch, keys, heads, 128] -> uint8 [batch, heads, tiles, 128, 128]."""
    batch, keys, heads, _ = v.shape
    tiles = _empty_tiles(v, TOKENS)  # [..., channels, keys]: as many of both
    value_tiles_kernel[(heads, tiles.shape[2], batch)](
        _words(v), _words(tiles), keys, tiles.shape[2], HEADS=heads, num_warps=num_warps
    )
    return tiles


def _empty_tiles(x: torch.Tensor, rows: int) -> torch.Tensor:
    batch, tokens, heads, head_dim = x.shape
    return torch.empty((batch, heads, triton.cdiv(tokens, rows), rows, head_dim), dtype=torch.uint8, device=x.device)


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)
