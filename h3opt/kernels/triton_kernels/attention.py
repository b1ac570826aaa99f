"""FP8 attention in Triton, for devices and machines without a library that has it: online softmax over blocks of keys.

The order of the sums is the block's, so this is close to the definition in `attention.py`, not equal to it. V is read
as its transpose, since Hopper's FP8 tensor cores take both operands with the summed dimension contiguous.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from h3opt.kernels.triton_kernels.device import narrow, narrow_e4m3, saturate_e4m3

BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES = 128, 64, 4, 3  # measured on an H200; another choice, another rounding


LOG2_E = math.log2(math.e)


@triton.jit
def fp8_attention_kernel(
    q_ptr, k_ptr, v_t_ptr, out_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_scale_ptr,
    tokens, padded, softmax_scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP8_OUT: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    base = (item.to(tl.int64) * tokens * HEADS + head) * HEAD_DIM
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel, lane = tl.arange(0, WIDTH), tl.arange(0, BLOCK_N)
    in_head = channel < HEAD_DIM
    row_offset = rows.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + channel[None, :]
    in_rows = (rows < tokens)[:, None] & in_head[None, :]
    q = tl.load(q_ptr + base + row_offset, mask=in_rows, other=0.0)
    logit_scale = softmax_scale / (tl.load(q_scale_ptr + head) * tl.load(k_scale_ptr + head))  # in powers of two
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    v_t_base = v_t_ptr + tl.program_id(1).to(tl.int64) * HEAD_DIM * padded
    for start in range(0, tokens, BLOCK_N):
        keys = start + lane
        k_offset = keys.to(tl.int64)[None, :] * (HEADS * HEAD_DIM) + channel[:, None]
        k = tl.load(k_ptr + base + k_offset, mask=(keys < tokens)[None, :] & in_head[:, None], other=0.0)
        logits = tl.where((keys < tokens)[None, :], tl.dot(q, k) * logit_scale, float("-inf"))
        now = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.exp2(logits - now[:, None])
        shrink = tl.exp2(highest - now)
        total = total * shrink + tl.sum(weights, 1)
        v_offset = channel[None, :] * padded + keys[:, None]  # padded with zeros up to whole blocks
        v = tl.load(v_t_base + v_offset, mask=in_head[None, :], other=0.0)
        out = tl.dot(narrow_e4m3(weights * 256.0), v, out * shrink[:, None])
        highest = now
    out = out / (total * 256.0 * tl.load(v_scale_ptr + head))[:, None]
    if FP8_OUT:
        tl.store(out_ptr + base + row_offset, saturate_e4m3(out * tl.load(out_scale_ptr)), mask=in_rows)
    else:
        tl.store(out_ptr + base + row_offset, narrow(out, out_ptr.dtype.element_ty), mask=in_rows)


def fp8_attention(q, k, v, q_scale, k_scale, v_scale, out_scale=None, blocks=None) -> torch.Tensor:
    """Launch `fp8_attention_kernel`: q, k, v e4m3 [batch, tokens, heads, D] -> bf16, or e4m3 times out_scale."""
    batch, tokens, heads, head_dim = q.shape
    block_m, block_n, num_warps, num_stages = blocks or (BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES)
    padded = triton.cdiv(tokens, block_n) * block_n
    v_t = torch.zeros((batch, heads, head_dim, padded), dtype=torch.uint8, device=q.device)
    v_t[..., :tokens] = v.view(torch.uint8).permute(0, 2, 3, 1)
    out = torch.empty(q.shape, dtype=torch.bfloat16 if out_scale is None else torch.float8_e4m3fn, device=q.device)
    fp8_attention_kernel[(triton.cdiv(tokens, block_m), batch * heads)](
        q.contiguous(), k.contiguous(), v_t.view(torch.float8_e4m3fn), out, q_scale, k_scale, v_scale,
        v_scale if out_scale is None else out_scale, tokens, padded, head_dim**-0.5 * LOG2_E,
        HEADS=heads, HEAD_DIM=head_dim, WIDTH=max(triton.next_power_of_2(head_dim), 32),
        BLOCK_M=block_m, BLOCK_N=block_n, FP8_OUT=out_scale is not None,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
