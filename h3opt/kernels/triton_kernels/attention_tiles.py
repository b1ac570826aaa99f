"""Codes of V written as the tiles that the Hopper attention kernel copies into shared memory.

The layout is defined in plain torch by `value_tiles_definition` of `h3opt/kernels/ops/hopper_attention.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS = 128  # of a tile


NUM_WARPS = 4  # measured on an H200; bits do not depend on it


@triton.jit
def value_tiles_kernel(v_ptr, tiles_ptr, tokens, HEADS: tl.constexpr):
    """One block of 128 keys of a head: its transpose, a row for each channel.

    Codes move as 32-bit words of four: in v, four channels of one key; in a tile, one channel of four keys. So four
    words of four keys are transposed in registers. A thread loads and stores pieces of 16 bytes, four words, at once.
    """
    block, head, item = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0)
    four_channels = tl.arange(0, 32)[:, None, None]
    piece, word = tl.arange(0, 8)[None, :, None], tl.arange(0, 4)[None, None, :]
    key = piece * 16 + word * 2  # a word's first key; the others follow by 1, 8 and 9
    left = tokens - block * 128
    v_ptr += ((item * tokens + block * 128) * HEADS + head) * 32 + four_channels
    words = ()
    for number in tl.static_range(4):
        this = key + (number % 2 + 8 * (number // 2))
        words = words + (tl.load(v_ptr + this * (HEADS * 32), mask=this < left, other=0),)  # noqa: RUF005 (not in triton)
    tiles_ptr += ((item * HEADS + head) * blocks + block) * (128 * 32)
    for number in tl.static_range(4):
        channel = four_channels * 4 + number
        packed = _byte(words[0], number) | (_byte(words[1], number) << 8)
        packed |= (_byte(words[2], number) << 16) | (_byte(words[3], number) << 24)
        tl.store(tiles_ptr + channel * 32 + (piece ^ (channel % 8)) * 4 + word, packed)


@triton.jit
def _byte(word, number: tl.constexpr):
    return (word >> (8 * number)) & 0xFF


@triton.jit
def code_sums_kernel(
    v_ptr, sums_ptr, tokens, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr
):
    """The sum of each channel of one head over ROWS * STEPS tokens, in float32."""
    part, head, item = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, channel = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    total = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for step in tl.static_range(STEPS):
        token = (part * STEPS + step) * ROWS + row
        offset = ((item * tokens + token[:, None]) * HEADS + head) * HEAD_DIM + channel[None, :]
        total += tl.load(v_ptr + offset, mask=(token < tokens)[:, None], other=0.0).to(tl.float32)
    out = ((item * tl.num_programs(0) + part) * HEADS + head) * HEAD_DIM + channel
    tl.store(sums_ptr + out, tl.sum(total, 0))


def code_sums(v: torch.Tensor, rows: int = 32, steps: int = 8) -> torch.Tensor:
    """Launch `code_sums_kernel` on e4m3 v [batch, keys, heads, 128] -> float32 [batch, heads, 128], sums over keys.

    Each program sums rows * steps keys; their results are added in a fixed order, so equal input gives equal bits.
    """
    batch, tokens, heads, head_dim = v.shape
    parts = triton.cdiv(tokens, rows * steps)
    sums = torch.empty((batch, parts, heads, head_dim), dtype=torch.float32, device=v.device)
    code_sums_kernel[(parts, heads, batch)](
        v.contiguous(), sums, tokens, HEADS=heads, HEAD_DIM=head_dim, ROWS=rows, STEPS=steps, num_warps=NUM_WARPS
    )
    return sums.sum(1)


def value_tiles(v: torch.Tensor, num_warps: int | None = None) -> torch.Tensor:
    """Launch `value_tiles_kernel` on e4m3 v [batch, keys, heads, 128] -> uint8 [batch, heads, tiles, 128, 128]."""
    batch, tokens, heads, head_dim = v.shape
    blocks = triton.cdiv(tokens, KEYS)
    tiles = torch.empty((batch, heads, blocks, head_dim, KEYS), dtype=torch.uint8, device=v.device)
    value_tiles_kernel[(blocks, heads, batch)](
        v.contiguous().view(torch.int32), tiles.view(torch.int32), tokens, HEADS=heads, num_warps=num_warps or NUM_WARPS
    )
    return tiles
