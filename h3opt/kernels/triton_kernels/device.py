"""Device functions shared by every kernel: loads, casts, ATen's reduction order, exact division, e4m3 rows.

Importing this module imports triton. The package imports it on the first CUDA launch, never before.

Two rules keep the fused kernels equal to ATen bit for bit. Arithmetic is in float32 and rounds to the tensor's
dtype after every operation of the unfused chain (`narrow` then `widen`). And the order of a sum is spelled by
reshapes and sums of two elements, which have one association only, so that neither `num_warps` nor a compiler's
choice of layout can change it.

With TRITON_INTERPRET=1 at import the same kernels run on the CPU. Triton 3.6-3.8's interpreter truncates float32
to bfloat16, mangles subnormals in such casts, and has neither libdevice, inline PTX nor a fused multiply-add; the
functions in the `INTERPRETED` branches below replace exactly these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = bool(triton.knobs.runtime.interpret)


# enable_fp_fusion folds bf16 round trips away and contracts a*b+c; reflect_ftz would flush subnormals in libdevice,
# which nvcc's build of ATen does not do.
EXACT_LAUNCH = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


SCALE_AMAX_MIN_BITS = tl.constexpr(0x2B8CBCCC)  # float32 1e-12


ABS_MASK = tl.constexpr(0x7FFFFFFF)


THREADS = tl.constexpr(128)  # ATen's vectorized layer norm: 4 warps of 32 lanes


VECTOR = tl.constexpr(4)  # elements per lane and step


TILE = tl.constexpr(512)  # elements per step of the whole block


if INTERPRETED:

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def rsqrt(x):
        return tl.rsqrt(x)

    @triton.jit
    def sin(x):
        return tl.sin(x)

    @triton.jit
    def reciprocal_approx(x):
        """Not approximate here: float32 1/x."""
        return tl.div_rn(tl.zeros_like(x) + 1.0, x)

    @triton.jit
    def fma(x, y, z):
        """Fused up to a double rounding (float64, then float32) that no drawn test input is known to hit."""
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)

    @triton.jit
    def widen(x):
        """Any float tensor -> float32, exactly."""
        if x.dtype == tl.bfloat16:
            return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            return x.to(tl.float32)

    @triton.jit
    def narrow(x, dtype: tl.constexpr):
        """float32 -> dtype, to nearest, ties to even."""
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
            rounded = tl.where(x == x, rounded, 0x7FC0)
            return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            return x.to(dtype)

    @triton.jit
    def narrow_e4m3(x):
        """float32 in [-448, 448] or NaN -> e4m3, to nearest, ties to even."""
        bits = x.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = bits & ABS_MASK
        normal = ((magnitude + ((magnitude >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
        # Below 2**-6 e4m3 has steps of 2**-9, which is the last place of a float32 at 2**14.
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, small, normal)
        code = tl.where(x == x, code, 0x7F)
        return (code | sign).to(tl.int8).to(tl.float8e4nv, bitcast=True)

    @triton.jit
    def saturate_e4m3(x):
        """float32 -> e4m3, to nearest, ties to even; beyond ±448 it is ±448, and NaN stays NaN."""
        return narrow_e4m3(tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL))

    @triton.jit
    def max_magnitude(x, y):
        """Of two floats of one dtype one with the larger magnitude, NaN above inf; its sign does not matter."""
        return tl.where(abs_bits(widen(y)) > abs_bits(widen(x)), y, x)

    @triton.jit
    def multiply_rounded(x, y):
        """x · y, both in one narrow dtype and rounded to it."""
        return narrow(widen(x) * widen(y), x.dtype)

    @triton.jit
    def add_rounded(x, y):
        """x + y, both in one narrow dtype and rounded to it."""
        return narrow(widen(x) + widen(y), x.dtype)

    @triton.jit
    def multiply_packed(x, y):
        """x · y of pairs of bf16 in 32 bits, each rounded to bf16."""
        return pack_bf16(low_bf16(x) * low_bf16(y), high_bf16(x) * high_bf16(y))

    @triton.jit
    def add_packed(x, y):
        """x + y of pairs of bf16 in 32 bits, each rounded to bf16."""
        return pack_bf16(low_bf16(x) + low_bf16(y), high_bf16(x) + high_bf16(y))

    @triton.jit
    def pack_bf16(low, high):
        """Two float32 -> int32 that holds both rounded to bf16, to nearest, ties to even."""
        low_bits, high_bits = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
        low_bits = ((low_bits + ((low_bits >> 16) & 1) + 0x7FFF) >> 16) & 0xFFFF
        high_bits = (high_bits + ((high_bits >> 16) & 1) + 0x7FFF) & -65536
        return tl.where(low == low, low_bits, 0x7FC0) | tl.where(high == high, high_bits, 0x7FC00000)

else:

    @triton.jit
    def exp(x):
        return libdevice.exp(x)

    @triton.jit
    def rsqrt(x):
        return libdevice.rsqrt(x)

    @triton.jit
    def sin(x):
        return libdevice.sin(x)

    @triton.jit
    def reciprocal_approx(x):
        """rcp.approx.ftz: one MUFU, at most 1 ulp off for normal x and 1/x."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def fma(x, y, z):
        return tl.fma(x, y, z)

    @triton.jit
    def widen(x):
        """Any float tensor -> float32, exactly."""
        return x.to(tl.float32)

    @triton.jit
    def narrow(x, dtype: tl.constexpr):
        """float32 -> dtype, to nearest, ties to even."""
        return x.to(dtype)

    @triton.jit
    def narrow_e4m3(x):
        """float32 in [-448, 448] or NaN -> e4m3, to nearest, ties to even."""
        return x.to(tl.float8e4nv)

    @triton.jit
    def saturate_e4m3(x):
        """float32 -> e4m3, to nearest, ties to even; beyond ±448 it is ±448, NaN is NaN: cvt.satfinite."""
        return x.to(tl.float8e4nv)

    @triton.jit
    def max_magnitude(x, y):
        """Of two floats of one dtype one with the larger magnitude, NaN above inf; its sign does not matter.

        bf16 two at a time; the instruction gives NaN where either is.
        """
        if x.dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a, b; abs.bf16x2 a, $1; abs.bf16x2 b, $2; max.NaN.bf16x2 $0, a, b; }",
                "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.where(abs_bits(widen(y)) > abs_bits(widen(x)), y, x)

    @triton.jit
    def multiply_rounded(x, y):
        """x · y, both in one narrow dtype and rounded to it; bf16 two at a time.

        A product or sum of two bf16 numbers that is rounded to float32 first rounds to the same bf16: float32 has
        more than twice its digits and two (Figueroa 1995, When is double rounding innocuous?). x · y + (-0) is x · y.
        """
        if x.dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
                "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return narrow(widen(x) * widen(y), x.dtype)

    @triton.jit
    def add_rounded(x, y):
        """x + y, both in one narrow dtype and rounded to it; bf16 two at a time, as x · 1 + y."""
        if x.dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }",
                "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return narrow(widen(x) + widen(y), x.dtype)

    @triton.jit
    def multiply_packed(x, y):
        """As `multiply_rounded`, of pairs of bf16 in 32 bits."""
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def add_packed(x, y):
        """As `add_rounded`, of pairs of bf16 in 32 bits."""
        return tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }",
            "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def pack_bf16(low, high):
        """Two float32 -> int32 that holds both rounded to bf16, to nearest, ties to even: one instruction."""
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def low_bf16(x):
    """The lower of two bf16 in 32 bits, as float32."""
    return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_bf16(x):
    """The upper of two bf16 in 32 bits, as float32."""
    return (x & -65536).to(tl.float32, bitcast=True)


@triton.jit
def negate(x):
    """-x with the sign of zero right (triton's unary minus is 0 - x), and free: it folds into its user."""
    return x * -1.0


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 -> dtype -> float32: one rounding point of the unfused chain."""
    return widen(narrow(x, dtype))


@triton.jit
def vector_columns():
    """[128, 4] column numbers of one tile, as ATen's block reads it: thread t holds columns 4t .. 4t+3."""
    return tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def load_columns(row_ptr, columns, D: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """Load `columns + START` of one row; masked (zeros) only where the tile of WIDTH crosses the end of the row."""
    if START + WIDTH <= D:
        return tl.load(row_ptr + START + columns)
    else:
        return tl.load(row_ptr + START + columns, mask=columns < D - START, other=0.0)


@triton.jit
def store_columns(row_ptr, columns, value, D: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    if START + WIDTH <= D:
        tl.store(row_ptr + START + columns, value)
    else:
        tl.store(row_ptr + START + columns, value, mask=columns < D - START)


@triton.jit
def load_row(row_ptr, D: tl.constexpr):
    """A whole row into registers: a tuple of ceil(D / 512) tiles [128, 4] in the row's dtype."""
    columns = vector_columns()
    tiles = ()
    for k in tl.static_range((D + TILE - 1) // TILE):
        tiles = tiles + (load_columns(row_ptr, columns, D, k * TILE, TILE),)  # noqa: RUF005 (not in triton)
    return tiles


@triton.jit
def add_squares(x, total):
    """x: float32 [..., 4], total: float32 [...]. Adds the four squares in order, each by one fma."""
    even, odd = tl.split(x.reshape(x.shape[:-1] + (2, 2)))  # noqa: RUF005 (not in triton)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    total = fma(x0, x0, total)
    total = fma(x1, x1, total)
    total = fma(x2, x2, total)
    return fma(x3, x3, total)


@triton.jit
def fold_lanes(x, LANES: tl.constexpr, OUTER: tl.constexpr):
    """x: [OUTER, LANES] -> [OUTER], in the order of shuffle-down by LANES/2, ..., 2, 1."""
    if LANES >= 32:
        x = tl.sum(tl.reshape(x, (OUTER, 2, 16)), 1)
    if LANES >= 16:
        x = tl.sum(tl.reshape(x, (OUTER, 2, 8)), 1)
    if LANES >= 8:
        x = tl.sum(tl.reshape(x, (OUTER, 2, 4)), 1)
    if LANES >= 4:
        x = tl.sum(tl.reshape(x, (OUTER, 2, 2)), 1)
    return tl.sum(x, 1)  # of two; of one where LANES == 1


@triton.jit
def row_sum_of_squares(tiles, D: tl.constexpr):
    """Sum of squares of a row in registers, in the order of ATen's vectorized layer norm (D % 4 == 0)."""
    total = tl.zeros((THREADS,), tl.float32)
    for k in tl.static_range((D + TILE - 1) // TILE):
        total = add_squares(widen(tiles[k]), total)
    warps = fold_lanes(tl.reshape(total, (4, 32)), 32, 4)
    # Across warps: w0 + w2 and w1 + w3, then the two.
    return tl.sum(tl.sum(tl.reshape(warps, (2, 2)), 0), 0)


@triton.jit
def rms_reciprocal(sum_of_squares, D: tl.constexpr, eps):
    """1 / sqrt(sum / D + eps), the division IEEE."""
    if (D & (D - 1)) == 0:
        mean = sum_of_squares * (1.0 / D)  # a power of two: the product rounds as the quotient does
    else:
        mean = tl.div_rn(sum_of_squares, tl.zeros_like(sum_of_squares) + D)
    return rsqrt(mean + eps)


@triton.jit
def abs_bits(x):
    """float32 -> int32 that orders as |x| does, with NaN above inf: an integer max propagates NaN."""
    return x.to(tl.int32, bitcast=True) & ABS_MASK


@triton.jit
def refine_quotient(quotient, numerator, denominator, inverse):
    """One step towards numerator / denominator. The excess is taken, not the remainder: it keeps the sign of -0."""
    excess = fma(quotient, denominator, negate(numerator))
    return fma(negate(excess), inverse, quotient)


@triton.jit
def e4m3_scale(amax_bits):
    """int32 bits of a row's amax -> float32 scale = clamp(amax, min=1e-12) / 448 (IEEE division)."""
    amax = tl.maximum(amax_bits, SCALE_AMAX_MIN_BITS).to(tl.float32, bitcast=True)
    return tl.div_rn(amax, tl.zeros_like(amax) + 448.0)


@triton.jit
def max_abs_bits(tiles, COUNT: tl.constexpr):
    """amax of a row in registers, as float32 bits: tiles is a tuple of COUNT tiles."""
    largest = tiles[0]
    for k in tl.static_range(1, COUNT):
        largest = max_magnitude(largest, tiles[k])
    return tl.max(abs_bits(widen(largest)))


@triton.jit
def quantize_row(q_ptr, scale_ptr, tiles, columns, D: tl.constexpr, WIDTH: tl.constexpr):
    """Write a row held as tiles of WIDTH columns as e4m3, and its scale.

    No clamp: |x| * (1 / scale) exceeds 448 by a few roundings at most, which e4m3 rounds to 448, and is never infinite.
    """
    scale = e4m3_scale(max_abs_bits(tiles, (D + WIDTH - 1) // WIDTH))
    tl.store(scale_ptr, scale)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    for k in tl.static_range((D + WIDTH - 1) // WIDTH):
        store_columns(q_ptr, columns, narrow_e4m3(widen(tiles[k]) * inverse), D, k * WIDTH, WIDTH)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [rows, D] with stride 1 along D: a view where the strides allow, else a copy."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def empty_quantized(shape, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (q, scale) for a tensor of `shape`: e4m3 of that shape, float32 [..., 1]."""
    q = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return q, torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device)
