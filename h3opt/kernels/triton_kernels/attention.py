"""FP8 attention in Triton, for devices and machines without a library that has it, and the merge of chunks of keys.

Online softmax over blocks of keys; the order of the sums is the block's, so this is close to the definition in
`attention.py`, not equal to it. V is read as its transpose, since Hopper's FP8 tensor cores take both operands with the
summed dimension contiguous. A tensor core sums one block of keys only: float32 adds the blocks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from h3opt.kernels.triton_kernels.device import narrow, narrow_e4m3, saturate_e4m3, widen

BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES = 128, 64, 8, 3  # measured on an H200; another choice, another rounding


MERGE_ROWS, MERGE_NUM_WARPS, MERGE_UNROLL = 16, 2, 2  # measured on an H200; bits do not depend on them


LOG2_E = math.log2(math.e)


@triton.jit
def fp8_attention_kernel(
    q_ptr, k_ptr, v_t_ptr, out_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, v_mean_ptr, out_scale_ptr,
    queries, tokens, padded, chunk, chunks, softmax_scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP8_OUT: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    base = (item.to(tl.int64) * queries * HEADS + head) * HEAD_DIM
    k_base = (item.to(tl.int64) * tokens * HEADS + head) * HEAD_DIM
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel, lane = tl.arange(0, WIDTH), tl.arange(0, BLOCK_N)
    in_head = channel < HEAD_DIM
    row_offset = rows.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + channel[None, :]
    in_rows = (rows < queries)[:, None] & in_head[None, :]
    q = tl.load(q_ptr + base + row_offset, mask=in_rows, other=0.0)
    logit_scale = softmax_scale / (tl.load(q_scale_ptr + head) * tl.load(k_scale_ptr + head))  # in powers of two
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    v_t_base = v_t_ptr + tl.program_id(1).to(tl.int64) * HEAD_DIM * padded
    for number in range(chunks):
        end = tl.minimum((number + 1) * chunk, tokens)
        of_chunk = (item * chunks + number) * HEADS + head
        descale = 1.0 / (256.0 * tl.load(v_scale_ptr + of_chunk))
        in_chunk = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(number * chunk, end, BLOCK_N):
            keys = start + lane
            k_offset = keys.to(tl.int64)[None, :] * (HEADS * HEAD_DIM) + channel[:, None]
            k = tl.load(k_ptr + k_base + k_offset, mask=(keys < end)[None, :] & in_head[:, None], other=0.0)
            logits = tl.where((keys < end)[None, :], tl.dot(q, k) * logit_scale, float("-inf"))
            now = tl.maximum(highest, tl.max(logits, 1))
            weights = tl.exp2(logits - now[:, None])
            shrink = tl.exp2(highest - now)
            total = total * shrink
            in_chunk = in_chunk * shrink + tl.sum(weights, 1)
            v_offset = channel[None, :] * padded + keys[:, None]  # padded with zeros up to whole blocks
            v = tl.load(v_t_base + v_offset, mask=(keys < end)[:, None] & in_head[None, :], other=0.0)
            # A fresh accumulator each block: what a tensor core adds up stays short, float32 has the rest.
            out = out * shrink[:, None] + tl.dot(narrow_e4m3(weights * 256.0), v) * descale
            highest = now
        mean = tl.load(v_mean_ptr + of_chunk * HEAD_DIM + channel, mask=in_head, other=0.0)
        out += in_chunk[:, None] * mean[None, :]
        total += in_chunk
    out = out / total[:, None]
    if FP8_OUT:
        tl.store(out_ptr + base + row_offset, saturate_e4m3(out * tl.load(out_scale_ptr)), mask=in_rows)
    else:
        tl.store(out_ptr + base + row_offset, narrow(out, out_ptr.dtype.element_ty), mask=in_rows)


@triton.jit
def merge_chunks_kernel(
    partial_ptr, lse_ptr, mean_ptr, out_ptr, out_scale_ptr,
    rows, chunks, chunk_stride, item_stride, lse_chunk_stride, out_item_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr, FP8_OUT: tl.constexpr,
):  # fmt: skip
    """ROWS query rows of one head: the average of the chunks' results and means, weighted by exp(lse), in float32."""
    head, item = tl.program_id(0), tl.program_id(2).to(tl.int64)
    chunk_stride = item * 0 + chunk_stride  # in 64 bits, for partial results of more than 2³¹ elements
    row, channel = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_rows, in_head = row < rows, channel < HEAD_DIM
    inside = in_rows[:, None] & in_head[None, :]
    offset = row.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + channel[None, :]
    lse_row = lse_ptr + (item * HEADS + head) * rows + row
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    for number in range(chunks):
        highest = tl.maximum(highest, tl.load(lse_row + number * lse_chunk_stride, mask=in_rows, other=0.0))
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    for number in tl.range(0, chunks, loop_unroll_factor=UNROLL):
        lse = tl.load(lse_row + number * lse_chunk_stride, mask=in_rows, other=0.0)
        # Every chunk has a key, so a sum of zero can only stand for NaN, as FlashAttention-3 has it.
        weight = tl.where(lse == float("-inf"), float("nan"), tl.exp(lse - highest))
        partial = tl.load(partial_ptr + number * chunk_stride + item * item_stride + offset, mask=inside, other=0.0)
        of_chunk = ((item * chunks + number) * HEADS + head) * HEAD_DIM
        mean = tl.load(mean_ptr + of_chunk + channel, mask=in_head, other=0.0)
        out += weight[:, None] * (widen(partial) + mean[None, :])
        total += weight
    out = out / total[:, None]
    if FP8_OUT:
        tl.store(out_ptr + item * out_item_stride + offset, saturate_e4m3(out * tl.load(out_scale_ptr)), mask=inside)
    else:
        tl.store(out_ptr + item * out_item_stride + offset, narrow(out, out_ptr.dtype.element_ty), mask=inside)


def fp8_attention(q, k, v, q_scale, k_scale, v_scale, v_mean, chunk, out, out_scale=None, blocks=None) -> torch.Tensor:
    """Launch `fp8_attention_kernel` into out, contiguous, of q's shape: any dtype, or e4m3 times out_scale."""
    (batch, queries, heads, head_dim), tokens = q.shape, k.shape[1]
    block_m, block_n, num_warps, num_stages = blocks or (BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES)
    padded = triton.cdiv(tokens, 16) * 16
    v_t = torch.zeros((batch, heads, head_dim, padded), dtype=torch.uint8, device=q.device)
    v_t[..., :tokens] = v.view(torch.uint8).permute(0, 2, 3, 1)
    fp8_attention_kernel[(triton.cdiv(queries, block_m), batch * heads)](
        q.contiguous(), k.contiguous(), v_t.view(torch.float8_e4m3fn), out, q_scale, k_scale,
        v_scale.contiguous(), v_mean.contiguous(), v_scale if out_scale is None else out_scale,
        queries, tokens, padded, chunk, v_scale.shape[1], head_dim**-0.5 * LOG2_E,
        HEADS=heads, HEAD_DIM=head_dim, WIDTH=max(triton.next_power_of_2(head_dim), 32),
        BLOCK_M=block_m, BLOCK_N=block_n, FP8_OUT=out_scale is not None,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def merge_chunks(
    partial, lse, mean, out, out_scale=None, rows=MERGE_ROWS, num_warps=MERGE_NUM_WARPS, unroll=MERGE_UNROLL
) -> torch.Tensor:
    """Launch `merge_chunks_kernel` on partial [chunks, batch, rows, heads, D] and lse [chunks, batch, heads, rows].

    Both are contiguous; mean float32 [batch, chunks, heads, D]. Writes into out [batch, rows, heads, D], rows of a
    contiguous tensor: any dtype, or e4m3 times out_scale.
    """
    chunks, batch, tokens, heads, head_dim = partial.shape
    merge_chunks_kernel[(heads, triton.cdiv(tokens, rows), batch)](
        partial, lse, mean.contiguous(), out, lse if out_scale is None else out_scale,
        tokens, chunks, partial.stride(0), partial.stride(1), lse.stride(0), out.stride(0),
        HEADS=heads, HEAD_DIM=head_dim, WIDTH=triton.next_power_of_2(head_dim), ROWS=rows,
        UNROLL=unroll, FP8_OUT=out_scale is not None, num_warps=num_warps,
    )  # fmt: skip
    return out
