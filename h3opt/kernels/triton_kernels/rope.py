"""Per-head RMSNorm + rotary embedding of q or k, optionally cast to e4m3 with static scales: one pass over memory.

A head of 128 channels is 32 lanes of four, so ATen's reduction of one head (its warps 1-3 are empty) is one warp's,
and the rotate-half partner of a lane's four channels is another lane's four: `half / 4` lanes away.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h3opt.kernels.triton_kernels.device import (
    EXACT_LAUNCH,
    VECTOR,
    add_packed,
    add_rounded,
    add_squares,
    fma,
    fold_lanes,
    high_bf16,
    low_bf16,
    multiply_packed,
    multiply_rounded,
    narrow,
    negate,
    pack_bf16,
    rms_reciprocal,
    round_to,
    saturate_e4m3,
    widen,
)

# Measured choices (see bench.py --tune). Bits do not depend on them.
HEADS_PER_PROGRAM, NUM_WARPS = 64, 8


QUANTIZE_HEADS_PER_PROGRAM, QUANTIZE_NUM_WARPS = 8, 1


HADAMARD_HEADS, HADAMARD_NUM_WARPS = 16, 2


SHUFFLE, PAIRS, STEPS = True, True, 7


MAX_HEAD_DIM = 128


@triton.jit
def norm_rope_tile(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, first_head, head_stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, SHUFFLE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of the token at x_ptr: (rotated [BLOCK * LANES, 4] in x's dtype, heads, columns, mask).

    Unless WEIGHTED, weight_ptr is not read and the norm's result not multiplied.

    Memory is addressed by flat rows (head, lane) of four channels, arithmetic is on [BLOCK, LANES, 4]: so every
    compiler version puts a head across the lanes of one warp, and nothing moves through shared memory.
    """
    HALF: tl.constexpr = ROTARY // 2
    rows = tl.arange(0, BLOCK * LANES)[:, None]
    vector = tl.arange(0, VECTOR)[None, :]
    head = first_head + rows // LANES
    column = (rows % LANES) * VECTOR + vector
    inside = (head < HEADS) & (column < HEAD_DIM)
    tile = tl.load(x_ptr + head * head_stride + column, mask=inside, other=0.0)
    dtype: tl.constexpr = tile.dtype
    x = widen(tl.reshape(tile, (BLOCK, LANES, VECTOR)))
    rstd = rms_reciprocal(fold_lanes(add_squares(x, tl.zeros((BLOCK, LANES), tl.float32)), LANES, BLOCK), HEAD_DIM, eps)
    rstd = rstd[:, None, None]
    lane = tl.arange(0, LANES)[:, None]
    channel = lane * VECTOR + vector
    normed = rstd * x
    if WEIGHTED:
        normed = widen(tl.load(weight_ptr + channel, mask=channel < HEAD_DIM, other=0.0))[None, :, :] * normed
    normed = narrow(normed, dtype)

    # The partner of a channel: HALF to the right in the first half, to the left in the second. By whole lanes where
    # it can be: for a shuffle between lanes, or so that the compiler sees four neighbours and loads them at once.
    step: tl.constexpr = ROTARY // 8
    if SHUFFLE:
        pair_lane = tl.where(lane < step, lane + step, tl.where(lane < 2 * step, lane - step, lane))
        partner = tl.gather(normed, tl.broadcast_to(pair_lane[None, :, :], (BLOCK, LANES, VECTOR)), 1)
    else:
        if ROTARY % 8 == 0:
            row_lane = rows % LANES
            row_pair = tl.where(
                row_lane < step, row_lane + step, tl.where(row_lane < 2 * step, row_lane - step, row_lane)
            )
            row_pair = row_pair * VECTOR + vector
            pair_lane = tl.where(lane < step, lane + step, tl.where(lane < 2 * step, lane - step, lane))
            pair = pair_lane * VECTOR + vector
        else:
            row_pair = tl.where(column < HALF, column + HALF, tl.where(column < ROTARY, column - HALF, column))
            pair = tl.where(channel < HALF, channel + HALF, tl.where(channel < ROTARY, channel - HALF, channel))
        pair_tile = tl.load(x_ptr + head * head_stride + row_pair, mask=inside, other=0.0)
        pair_x = widen(tl.reshape(pair_tile, (BLOCK, LANES, VECTOR)))
        partner = rstd * pair_x
        if WEIGHTED:
            partner = widen(tl.load(weight_ptr + pair, mask=channel < HEAD_DIM, other=0.0))[None, :, :] * partner
        partner = narrow(partner, dtype)

    turning = channel < ROTARY
    cos = narrow(widen(tl.load(cos_ptr + channel, mask=turning, other=0.0)), dtype)
    sin = round_to(widen(tl.load(sin_ptr + channel, mask=turning, other=0.0)), dtype)
    # rotate-half negates the first half's partners: as well their sines, once per token instead of once per head.
    sin = narrow(tl.where(channel < HALF, negate(sin), sin), dtype)
    shape: tl.constexpr = (BLOCK, LANES, VECTOR)
    rotated = add_rounded(
        multiply_rounded(normed, tl.broadcast_to(cos[None, :, :], shape)),
        multiply_rounded(partner, tl.broadcast_to(sin[None, :, :], shape)),
    )
    out = tl.where(turning[None, :, :], rotated, normed)
    return tl.reshape(out, (BLOCK * LANES, VECTOR)), head, column, inside


@triton.jit
def rotation_pairs(
    weight_ptr, cos_ptr, sin_ptr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """What all heads of a token share: even and odd weights float32 [LANES, 2]; cosines and sines int32 [LANES, 2].

    Two neighbouring angles are rounded to bf16 in 32 bits; rotate-half's minus is in the sines of the first half.
    """
    lane = tl.arange(0, LANES)[:, None]
    channel = lane * VECTOR + tl.arange(0, VECTOR)[None, :]
    weight = widen(tl.load(weight_ptr + channel, mask=channel < HEAD_DIM, other=0.0))
    cos = widen(tl.load(cos_ptr + channel, mask=channel < ROTARY, other=0.0))
    sin = widen(tl.load(sin_ptr + channel, mask=channel < ROTARY, other=0.0))
    sin = tl.where(lane < ROTARY // 8, negate(sin), sin)  # rounds as the sine itself does
    even_weight, odd_weight = tl.split(tl.reshape(weight, (LANES, 2, 2)))
    even_cos, odd_cos = tl.split(tl.reshape(cos, (LANES, 2, 2)))
    even_sin, odd_sin = tl.split(tl.reshape(sin, (LANES, 2, 2)))
    return even_weight, odd_weight, pack_bf16(even_cos, odd_cos), pack_bf16(even_sin, odd_sin)


@triton.jit
def norm_rope_pairs(
    x_ptr, even_weight, odd_weight, cos, sin, first_head, head_stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`norm_rope_tile` of bf16 heads with a weight, whose rotary part is a multiple of eight channels.

    -> (int32 [BLOCK, LANES, 2], heads, columns, mask): two neighbours are rounded by one instruction and stay together
    in 32 bits, through the exchange between lanes and the arithmetic of the rotation.
    """
    rows = tl.arange(0, BLOCK * LANES)[:, None]
    head = first_head + rows // LANES
    column = (rows % LANES) * VECTOR + tl.arange(0, VECTOR)[None, :]
    inside = (head < HEADS) & (column < HEAD_DIM)
    if WHOLE:
        tile = tl.load(x_ptr + head * head_stride + column)
    else:
        tile = tl.load(x_ptr + head * head_stride + column, mask=inside, other=0.0)
    x = widen(tl.reshape(tile, (BLOCK, LANES, VECTOR)))
    rstd = rms_reciprocal(fold_lanes(add_squares(x, tl.zeros((BLOCK, LANES), tl.float32)), LANES, BLOCK), HEAD_DIM, eps)
    rstd = rstd[:, None, None]
    even, odd = tl.split(tl.reshape(x, (BLOCK, LANES, 2, 2)))
    normed = pack_bf16(even_weight[None, :, :] * (rstd * even), odd_weight[None, :, :] * (rstd * odd))
    step: tl.constexpr = ROTARY // 8
    lane = tl.arange(0, LANES)[:, None]
    pair_lane = tl.where(lane < step, lane + step, tl.where(lane < 2 * step, lane - step, lane))
    shape: tl.constexpr = (BLOCK, LANES, 2)
    partner = tl.gather(normed, tl.broadcast_to(pair_lane[None, :, :], shape), 1)
    rotated = add_packed(
        multiply_packed(normed, tl.broadcast_to(cos[None, :, :], shape)),
        multiply_packed(partner, tl.broadcast_to(sin[None, :, :], shape)),
    )
    return tl.where((lane < 2 * step)[None, :, :], rotated, normed), head, column, inside


@triton.jit
def hadamard_tile(even, odd, BLOCK: tl.constexpr, LANES: tl.constexpr, SCALE: tl.constexpr):
    """Orthonormal Hadamard transform of BLOCK heads, LANES a power of two: -> float32 [BLOCK, LANES, 4].

    even and odd, float32 [BLOCK, LANES, 2], are channels 0, 2 and 1, 3 of each lane. Butterflies at distance 1, 2
    within a lane's four channels, then 4, 8, ... between lanes, then one product.
    """
    sum_0, sum_2 = tl.split(even + odd)
    difference_0, difference_2 = tl.split(even - odd)
    low = tl.join(sum_0 + sum_2, sum_0 - sum_2)
    high = tl.join(difference_0 + difference_2, difference_0 - difference_2)
    x = tl.reshape(tl.join(low, high), (BLOCK, LANES, VECTOR))
    lane = tl.arange(0, LANES)[None, :, None]
    for bit in tl.static_range(5):
        if (1 << bit) < LANES:
            pair = tl.broadcast_to(lane ^ (1 << bit), (BLOCK, LANES, VECTOR))
            partner = tl.gather(x, pair, 1)
            # As partner + x or partner - x: one fused multiply-add by ±1, which is exact before its one rounding.
            x = fma(x, tl.where((lane & (1 << bit)) != 0, -1.0, 1.0), partner)
    return x * SCALE


@triton.jit
def hadamard_kernel(
    x_ptr, out_ptr, rows, token_stride, head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    flat = tl.arange(0, BLOCK * LANES)[:, None]
    head = tl.program_id(1) * BLOCK + flat // LANES
    column = (flat % LANES) * VECTOR + tl.arange(0, VECTOR)[None, :]
    inside = head < HEADS
    x = tl.load(x_ptr + row * token_stride + head * head_stride + column, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(widen(x), (BLOCK, LANES, 2, 2)))
    wide = hadamard_tile(even, odd, BLOCK, LANES, SCALE)
    out = tl.reshape(narrow(wide, x.dtype), (BLOCK * LANES, VECTOR))
    tl.store(out_ptr + row * (HEADS * HEAD_DIM) + head * HEAD_DIM + column, out, mask=inside)


@triton.jit
def head_norm_rope_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr,
    tokens, token_stride, head_stride, cos_stride, sin_stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    out, head, column, inside = norm_rope_tile(
        x_ptr + row * token_stride, weight_ptr, cos_ptr + token * cos_stride, sin_ptr + token * sin_stride,
        tl.program_id(1) * BLOCK, head_stride, eps, HEADS, HEAD_DIM, ROTARY, BLOCK, LANES, SHUFFLE, True,
    )  # fmt: skip
    tl.store(out_ptr + row * (HEADS * HEAD_DIM) + head * HEAD_DIM + column, out, mask=inside)


@triton.jit
def unweighted_norm_rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    angle_rows, token_stride, head_stride, cos_stride, sin_stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(0) % angle_rows).to(tl.int64)
    out, head, column, inside = norm_rope_tile(
        x_ptr + row * token_stride, x_ptr, cos_ptr + token * cos_stride, sin_ptr + token * sin_stride,
        tl.program_id(1) * BLOCK, head_stride, eps, HEADS, HEAD_DIM, ROTARY, BLOCK, LANES, SHUFFLE, False,
    )  # fmt: skip
    tl.store(out_ptr + row * (HEADS * HEAD_DIM) + head * HEAD_DIM + column, out, mask=inside)


@triton.jit
def store_codes(
    out_ptr, head_scale_ptr, even, odd, head, column, inside,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """BLOCK heads, channels 0, 2 and 1, 3 of each lane as float32 [BLOCK, LANES, 2], times their scales as e4m3.

    WHOLE: programs and lanes end where heads and channels do, so nothing is masked.
    """
    wide = tl.reshape(tl.join(even, odd), (BLOCK * LANES, VECTOR))
    if WHOLE:
        codes = saturate_e4m3(wide * tl.load(head_scale_ptr + head))
        tl.store(out_ptr + head * HEAD_DIM + column, codes)
    else:
        codes = saturate_e4m3(wide * tl.load(head_scale_ptr + head, mask=head < HEADS, other=0.0))
        tl.store(out_ptr + head * HEAD_DIM + column, codes, mask=inside)


@triton.jit
def head_norm_rope_quantize_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, head_scale_ptr, out_ptr,
    tokens, token_stride, head_stride, cos_stride, sin_stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, SHUFFLE: tl.constexpr,
    PAIRS: tl.constexpr, WHOLE: tl.constexpr, STEPS: tl.constexpr, ROTATE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    x_ptr += row * token_stride
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    out_ptr += row * (HEADS * HEAD_DIM)
    if PAIRS:
        even_weight, odd_weight, cos, sin = rotation_pairs(weight_ptr, cos_ptr, sin_ptr, HEAD_DIM, ROTARY, LANES)
        for step in range(STEPS):
            pairs, head, column, inside = norm_rope_pairs(
                x_ptr, even_weight, odd_weight, cos, sin, (tl.program_id(1) * STEPS + step) * BLOCK, head_stride, eps,
                HEADS, HEAD_DIM, ROTARY, BLOCK, LANES, WHOLE,
            )  # fmt: skip
            even, odd = low_bf16(pairs), high_bf16(pairs)
            if ROTATE:
                turned = tl.reshape(hadamard_tile(even, odd, BLOCK, LANES, SCALE), (BLOCK, LANES, 2, 2))
                even, odd = tl.split(turned)
                pairs = pack_bf16(even, odd)
                even, odd = low_bf16(pairs), high_bf16(pairs)
            store_codes(out_ptr, head_scale_ptr, even, odd, head, column, inside, HEADS, HEAD_DIM, BLOCK, LANES, WHOLE)
    else:
        out, head, column, inside = norm_rope_tile(
            x_ptr, weight_ptr, cos_ptr, sin_ptr,
            tl.program_id(1) * BLOCK, head_stride, eps, HEADS, HEAD_DIM, ROTARY, BLOCK, LANES, SHUFFLE, True,
        )  # fmt: skip
        even, odd = tl.split(tl.reshape(widen(out), (BLOCK, LANES, 2, 2)))
        if ROTATE:
            turned = round_to(hadamard_tile(even, odd, BLOCK, LANES, SCALE), out.dtype)
            even, odd = tl.split(tl.reshape(turned, (BLOCK, LANES, 2, 2)))
        store_codes(out_ptr, head_scale_ptr, even, odd, head, column, inside, HEADS, HEAD_DIM, BLOCK, LANES, WHOLE)


def _launch(kernel, x, weights, cos, sin, extra, out, eps, block, num_warps, shuffle, steps=1, **constants):
    heads, head_dim, rotary = x.shape[-2], x.shape[-1], cos.shape[-1]
    rows = x.reshape(-1, heads, head_dim)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in (cos, sin))
    block = min(block, triton.next_power_of_2(heads))
    shuffle = SHUFFLE if shuffle is None else shuffle
    if out.numel():
        kernel[(rows.shape[0], triton.cdiv(heads, block * steps))](
            rows, *(weight.contiguous() for weight in weights), cos, sin, *extra, out,
            cos.shape[0], rows.stride(0), rows.stride(1), cos.stride(0), sin.stride(0), eps,
            HEADS=heads, HEAD_DIM=head_dim, ROTARY=rotary, BLOCK=block,
            LANES=triton.next_power_of_2(head_dim // 4),
            SHUFFLE=shuffle and rotary % 8 == 0 and rotary > 0,
            num_warps=num_warps, **constants, **EXACT_LAUNCH,
        )  # fmt: skip
    return out


def head_norm_rope(
    x, weight, cos, sin, eps, block=HEADS_PER_PROGRAM, num_warps=NUM_WARPS, shuffle=None
) -> torch.Tensor:
    """Launch `head_norm_rope_kernel` on x [..., tokens, heads, head_dim], head_dim % 4 == 0 and <= MAX_HEAD_DIM."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(head_norm_rope_kernel, x, (weight,), cos, sin, (), out, eps, block, num_warps, shuffle)


def unweighted_norm_rope(x, cos, sin, eps, block=HEADS_PER_PROGRAM, num_warps=NUM_WARPS, shuffle=None) -> torch.Tensor:
    """Launch `unweighted_norm_rope_kernel`; as `head_norm_rope`, with cos and sin [1 or batch, tokens, rotary]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    angles = (one.flatten(0, 1) for one in (cos, sin))
    return _launch(unweighted_norm_rope_kernel, x, (), *angles, (), out, eps, block, num_warps, shuffle)


def hadamard(x: torch.Tensor, block: int = HADAMARD_HEADS, num_warps: int = HADAMARD_NUM_WARPS) -> torch.Tensor:
    """Launch `hadamard_kernel` on x [..., heads, head_dim], head_dim a power of two, >= 4 and <= MAX_HEAD_DIM."""
    heads, head_dim = x.shape[-2:]
    rows = x.reshape(-1, heads, head_dim)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(block, triton.next_power_of_2(heads))
    hadamard_kernel[(rows.shape[0], triton.cdiv(heads, block))](
        rows, out, rows.shape[0], rows.stride(0), rows.stride(1), HEADS=heads, HEAD_DIM=head_dim, BLOCK=block,
        LANES=head_dim // 4, SCALE=head_dim**-0.5, num_warps=num_warps, **EXACT_LAUNCH,
    )  # fmt: skip
    return out


def head_norm_rope_quantize(
    x,
    weight,
    cos,
    sin,
    head_scale,
    eps,
    rotate=False,
    block=QUANTIZE_HEADS_PER_PROGRAM,
    num_warps=QUANTIZE_NUM_WARPS,
    shuffle=None,
    pairs=None,
    steps=None,
) -> torch.Tensor:
    """Launch `head_norm_rope_quantize_kernel`; as `head_norm_rope`, with head_scale float32 [heads].

    With rotate, which needs a head_dim that is a power of two, `hadamard` comes before the cast.
    """
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    bf16 = x.dtype == weight.dtype == torch.bfloat16 and cos.shape[-1] % 8 == 0
    pairs = bf16 and (PAIRS if pairs is None else pairs)
    heads, head_dim = x.shape[-2:]
    block = min(block, triton.next_power_of_2(heads))
    steps = min(STEPS if steps is None else steps, triton.cdiv(heads, block)) if pairs else 1
    whole = heads % (block * steps) == 0 and head_dim in (4, 8, 16, 32, 64, 128)
    constants = {"PAIRS": pairs, "WHOLE": whole, "STEPS": steps, "ROTATE": rotate, "SCALE": head_dim**-0.5}
    launch = (eps, block, num_warps, shuffle, steps)
    extra = (head_scale.contiguous(),)
    return _launch(head_norm_rope_quantize_kernel, x, (weight,), cos, sin, extra, out, *launch, **constants)
