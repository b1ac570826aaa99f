"""Triton kernels under the interpreter against `cuda_order`: run by test_interpreted.py with TRITON_INTERPRET=1.

Not collected by itself: the interpreter is chosen when triton is imported, once per process.
"""

# ruff: noqa: E402 (the check comes before the imports)
from __future__ import annotations

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_interpreted.py"

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h3opt.bench.kernel_inputs import differing
from h3opt.kernels.ops import attention, hopper_attention
from h3opt.kernels.triton_kernels import attention as attention_triton
from h3opt.kernels.triton_kernels import attention_tiles, device, norm, quantize, resample, rope, swiglu, wide_norm
from h3opt.kernels.triton_kernels.device import reciprocal_approx as exact_reciprocal
from h3opt.metrics.bits import relative_error
from tests.kernels import cuda_order
from tests.kernels.planted_order import reordered_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIALS = ("none", "inf", "nan", "subnormal", "zero")

settings.register_profile(
    "interpreted", max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("interpreted")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def _quiet_numpy():
    with np.errstate(all="ignore"):
        yield


def values(shape, dtype, seed, magnitude=1.0, special="none", strided=False) -> torch.Tensor:
    """Random values of a dtype; `special` plants inf, NaN, subnormals or zeros in half of the rows."""
    generator = torch.Generator().manual_seed(seed)
    full = (*shape[:-1], shape[-1] + 8) if strided else shape
    x = (torch.randn(full, generator=generator) * magnitude).to(dtype)
    if special != "none" and x.numel():
        where = torch.rand(full, generator=generator) < 0.02
        where &= (torch.rand((*full[:-1], 1), generator=generator) < 0.5).expand(full)
        sign = torch.randint(0, 2, full, generator=generator) * 2.0 - 1.0
        tiny = torch.finfo(dtype).smallest_normal * torch.rand(full, generator=generator, dtype=torch.float64)
        planted = {"inf": sign * torch.inf, "nan": sign * torch.nan, "zero": sign * 0.0, "subnormal": sign * tiny}
        where |= special in ("zero", "subnormal") and torch.rand((*full[:-1], 1), generator=generator) < 0.3
        x = torch.where(where, planted[special].to(dtype), x)
    return x[..., 4 : 4 + shape[-1]] if strided else x


drawn = {
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 2**31),
    "magnitude": st.sampled_from((1e-3, 1.0, 30.0, 1e4)),
    "special": st.sampled_from(SPECIALS),
    "strided": st.booleans(),
}
norm_shapes = st.tuples(st.integers(1, 2), st.integers(0, 3), st.integers(1, 300).map(lambda n: 4 * n))


def norm_inputs(shape, dtype, seed, magnitude, special, strided):
    batch, tokens, columns = shape
    x = values((batch, tokens, columns), dtype, seed, magnitude, special, strided)
    y = values((batch, tokens, columns), dtype, seed + 1, magnitude, special, strided)
    rows = 1 + seed % 3
    weight = values((columns,), dtype, seed + 2)
    gate, scale, shift = values((rows, 3 * columns), dtype, seed + 3).chunk(3, -1)
    index = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(seed))
    return x, y, gate, weight, scale, shift, index


@given(shape=norm_shapes, **drawn)
def test_norm_modulate(shape, **kind):
    x, _, _, *rest = norm_inputs(shape, **kind)
    expected = cuda_order.norm_modulate(x, *rest, 1e-5)
    assert differing(norm.norm_modulate(x, *rest, 1e-5), expected) == 0
    assert differing(norm.norm_modulate_quantize(x, *rest, 1e-5), cuda_order.quantize_rows(expected)) == 0


@given(shape=norm_shapes, **drawn)
def test_norm_residual(shape, **kind):
    args = norm_inputs(shape, **kind)
    hidden, normed = cuda_order.residual_norm_modulate(*args, 1e-6)
    assert differing(norm.residual_norm_modulate(*args, 1e-6), (hidden, normed)) == 0
    residual, y, gate, *_, index = args
    assert differing(norm.gated_residual(residual, y, gate, index), hidden) == 0
    quantized = norm.residual_norm_modulate_quantize(*args, 1e-6)
    assert differing(quantized, (hidden, *cuda_order.quantize_rows(normed))) == 0


@settings(max_examples=8)
@given(shape=norm_shapes, first_block=st.booleans(), **drawn)
def test_wide_norm(shape, first_block, dtype, seed, magnitude, special, strided):
    y = values(shape, dtype, seed, magnitude, special, strided)
    residual = values(shape, dtype if first_block else torch.float32, seed + 1, magnitude, special, strided)
    scale, weight = values((2, shape[-1]), torch.float32, seed + 2)
    hidden, normed = cuda_order.scaled_residual_norm(residual, y, scale, weight, 1e-5, dtype)
    quantized = cuda_order.quantize_rows(normed)
    args = (residual, y, scale, weight, 1e-5, dtype)
    assert differing(wide_norm.scaled_residual(residual, y, scale), hidden) == 0
    assert differing(wide_norm.scaled_residual_norm(*args), (hidden, normed)) == 0
    assert differing(wide_norm.scaled_residual_norm_quantize(*args), (hidden, *quantized)) == 0
    assert differing(wide_norm.wide_norm(hidden, weight, 1e-5, dtype), normed) == 0
    assert differing(wide_norm.wide_norm_quantize(hidden, weight, 1e-5, dtype), quantized) == 0
    alone = cuda_order.rms_norm(residual.float(), weight, 1e-5).to(dtype)  # 16 bits in and out, at the first block
    assert differing(wide_norm.wide_norm(residual, weight, 1e-5, dtype), alone) == 0


def test_wide_norm_of_decoder_rows_and_its_mutant_that_rounds_the_sum_are_seen(monkeypatch):
    residual, y = values((2, 2048), torch.float32, 0), values((2, 2048), torch.bfloat16, 1)
    scale, weight = values((2, 2048), torch.float32, 2)
    args = (residual, y, scale, weight, 1e-5, torch.bfloat16)
    expected = cuda_order.scaled_residual_norm(*args)
    assert differing(wide_norm.scaled_residual_norm(*args), expected) == 0

    @triton.jit
    def rounded(x, D: tl.constexpr):
        total = tl.zeros((128,), tl.float32)
        for k in tl.static_range((D + 511) // 512):
            total = device.add_squares(device.round_to(x[k], tl.bfloat16), total)
        return tl.sum(total, 0)

    monkeypatch.setattr(wide_norm, "row_sum_of_squares", rounded)
    assert differing(wide_norm.scaled_residual_norm(*args), expected) > 0


@given(shape=st.tuples(st.integers(0, 3), st.integers(1, 3000)), **drawn)
def test_quantize_rows(shape, **kind):
    x = values(shape, **kind)
    assert differing(quantize.quantize_rows(x), cuda_order.quantize_rows(x)) == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, -6e4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_sees_a_single_value_wherever_it_is(dtype, value):
    places = [0, 1023, 1024, 2047, 2048, 2999]
    x = values((len(places), 3000), dtype, 1, magnitude=1e-3)
    x[range(len(places)), places] = value
    x = torch.cat([x, torch.zeros_like(x[:1])])  # whose scale is the least there is
    assert differing(quantize.quantize_rows(x), cuda_order.quantize_rows(x)) == 0
    heads = values((1, 20, 3, 64), dtype, 2, magnitude=1e-3)
    heads[0, 9, 1, 33] = value
    found, others = quantize.heads_amax(heads, 8), heads[:, :, ::2].float().abs().amax((0, 1, 3))
    assert differing(found[::2], others) == 0
    if heads[0, 9, 1, 33].isfinite():
        assert differing(found[1], heads[0, 9, 1, 33].abs().float()) == 0
    else:  # one bad token does not take the scale of the others
        heads[0, 9, 1, 33] = 0.0
        assert differing(found[1], heads[:, :, 1].float().abs().amax()) == 0


def test_quantize_rounds_every_e4m3_tie_and_its_neighbours():
    codes = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes + torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()) / 2
    for amax in (448.0, 0.7, 3e-5, 2.9e38):
        near = torch.cat([codes, ties]) * (amax / 448.0)
        inf = torch.tensor(torch.inf)
        row = torch.cat([near, near.nextafter(inf), near.nextafter(-inf), torch.tensor([amax])]).clamp(max=amax)
        row = torch.cat([row, -row])[None]
        assert differing(quantize.quantize_rows(row), cuda_order.quantize_rows(row)) == 0


@given(shape=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 1500).map(lambda n: 2 * n)), **drawn)
def test_swiglu(shape, **kind):
    x = values(shape, **kind)
    expected = cuda_order.swiglu(x)
    assert differing(swiglu.swiglu(x), expected) == 0
    assert differing(swiglu.swiglu_quantize(x, num_warps=2), cuda_order.quantize_rows(expected)) == 0


@given(tokens=st.integers(1, 70), heads=st.integers(1, 5), head_dim=st.sampled_from([8, 24, 64, 128]), **drawn)
def test_quantize_heads(tokens, heads, head_dim, **kind):
    x = values((2, tokens, heads, head_dim), **kind)
    scale = torch.rand(heads, generator=torch.Generator().manual_seed(tokens)) * 300
    expected = attention.quantize_heads_definition(x, scale)
    assert differing(quantize.quantize_heads(x, scale, block=2), expected) == 0
    largest = x.float().nan_to_num(0.0, 0.0, 0.0).abs().amax((0, 1, 3))
    assert differing(quantize.heads_amax(x, 8), largest) == 0
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert differing(quantize.quantize_heads(strided, scale), expected) == 0


@settings(max_examples=15)
@given(
    tokens=st.integers(1, 90),
    heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 24]),
    chunk=st.sampled_from([1, 7, 32, 40, 100]),
    **drawn,
)
def test_quantize_values(tokens, heads, head_dim, chunk, **kind):
    v = values((2, tokens, heads, head_dim), **kind)
    expected = attention.quantize_values_definition(v, chunk)
    assert differing(quantize.quantize_values(v, chunk, rows=16), expected) == 0
    strided = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert differing(quantize.quantize_values(strided, chunk), expected) == 0


@pytest.mark.parametrize(("tokens", "chunk"), ((1, 1 << 30), (31, 1 << 30), (70, 1 << 30), (130, 100), (65, 64)))
def test_quantize_values_sums_the_pieces_of_a_chunk_in_sequence(tokens, chunk, monkeypatch):
    monkeypatch.setattr(attention, "VALUE_PIECE", 32)
    v = values((2, tokens, 2, 24), torch.bfloat16, 6, 3.0)
    assert differing(quantize.quantize_values(v, chunk), attention.quantize_values_definition(v, chunk)) == 0


def test_quantize_values_of_constant_and_zero_values_says_them_exactly():
    for value in (0.0, 3.14159, -1e-30):
        v = torch.full((1, 50, 1, 16), value)
        codes, scale, mean = quantize.quantize_values(v, 20)
        each = torch.arange(50) // 20
        found = codes.float() / scale[:, each, :, None] + mean[:, each]
        torch.testing.assert_close(found, v, rtol=1e-7, atol=1e-16)


def test_quantize_values_mutant_with_another_order_of_summation_is_seen(monkeypatch):
    @triton.jit
    def pairs(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
        return tl.sum(tl.sum(tl.reshape(x, (ROWS // 2, 2, WIDTH)), 1), 0)

    v = values((1, 90, 2, 64), torch.float32, 3)
    monkeypatch.setattr(quantize, "fold_rows", pairs)
    assert differing(quantize.quantize_values(v, 60), attention.quantize_values_definition(v, 60)) > 0


def attention_inputs(batch, tokens, heads, head_dim, chunk):
    q, k, v = (values((batch, tokens, heads, head_dim), torch.bfloat16, seed) for seed in range(3))
    v = v + 2 * values((head_dim,), torch.bfloat16, 4)
    scales = [attention.dynamic_head_scale_definition(one, True) for one in (q, k)]
    codes, v_scale, v_mean = attention.quantize_values_definition(v, chunk)
    q, k = map(attention.quantize_heads_definition, (q, k), scales)
    return q, k, codes, *scales, v_scale, v_mean, chunk


BLOCKS = (32, 32, 4, 1)


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 17, 2, 24), (1, 32, 1, 64), (1, 70, 1, 128)])
@pytest.mark.parametrize("chunk", [12, 2464])
@pytest.mark.parametrize("fp8_out", [False, True])
def test_fp8_attention(shape, chunk, fp8_out):
    args = attention_inputs(*shape, chunk)
    if fp8_out:
        expected, descale = attention.fp8_attention_quantized_definition(*args, "triton")
        out = torch.empty(shape[:2] + shape[2:], dtype=torch.float8_e4m3fn)
        found = attention_triton.fp8_attention(*args, out, 1.0 / descale[0, 0], blocks=BLOCKS).flatten(2).float()
        assert relative_error(expected.float(), found) <= 0.03
        return
    out = torch.full(shape, torch.nan, dtype=torch.float32)
    found = attention_triton.fp8_attention(*args, out, blocks=BLOCKS)
    expected = attention.fp8_attention_definition(*args, torch.float32, "triton")
    # one block of keys: the same maximum; several: e4m3 probabilities relative to another one, so other roundings
    assert relative_error(expected, found) <= (1e-5 if min(shape[1], chunk) == shape[1] <= 32 else 0.02)


def test_fp8_attention_of_fewer_queries_than_keys():
    q, *others = attention_inputs(2, 50, 2, 64, 20)
    out = torch.empty(2, 7, 2, 64)
    found = attention_triton.fp8_attention(q[:, :7].contiguous(), *others, out, blocks=BLOCKS)
    expected = attention.fp8_attention_definition(q, *others, torch.float32, "triton")[:, :7]
    assert relative_error(expected, found) < 0.02


def test_fp8_attention_with_a_wrong_scale_or_mean_or_chunk_is_seen():
    args = attention_inputs(1, 100, 2, 64, 40)
    expected = attention.fp8_attention_definition(*args, torch.float32, "triton")
    for place, wrong in ((4, args[4] / 8), (5, args[5] / 2), (6, args[6] * 0), (7, 39)):
        off = (*args[:place], wrong, *args[place + 1 :])
        found = attention_triton.fp8_attention(*off, torch.empty(1, 100, 2, 64), blocks=BLOCKS)
        assert relative_error(expected, found) > 0.02, place


def partial_results(chunks, batch, rows, heads, head_dim):
    partial = values((chunks, batch, rows, heads, head_dim), torch.bfloat16, 0)
    lse = values((chunks, batch, heads, rows), torch.float32, 1, 3.0)
    return partial, lse, values((batch, chunks, heads, head_dim), torch.float32, 2)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 16), (2, 2, 40, 3, 24), (5, 1, 33, 2, 64), (3, 2, 7, 2, 128)])
def test_fp8_attention_merge(shape):
    args = partial_results(*shape)
    expected = attention.merge_chunks_definition(*args)
    whole = torch.full((shape[1], shape[2] + 5, *shape[3:]), torch.nan)
    found = attention_triton.merge_chunks(*args, whole[:, 2:-3], rows=16)
    assert relative_error(expected, found) < 1e-6
    assert whole[:, :2].isnan().all() and whole[:, -3:].isnan().all()
    codes = torch.empty(found.shape, dtype=torch.float8_e4m3fn)
    scale = 448 / expected.abs().amax()
    attention_triton.merge_chunks(*args, codes, scale)
    assert relative_error(expected, codes.float() / scale) < 0.04


def test_fp8_attention_merge_keeps_nan_in_its_row_or_channel():
    partial, lse, mean = partial_results(3, 1, 9, 2, 16)
    expected = attention.merge_chunks_definition(partial, lse, mean)
    for value in (torch.nan, -torch.inf):  # FlashAttention-3 says -inf where a row's sum is NaN
        off = lse.clone()
        off[1, 0, 1, 4] = value
        found = attention_triton.merge_chunks(partial, off, mean, torch.empty(1, 9, 2, 16), rows=16)
        touched = torch.zeros(1, 9, 2, 16, dtype=torch.bool)
        touched[0, 4, 1] = True
        assert found[touched].isnan().all() and relative_error(expected[~touched], found[~touched]) < 1e-6
    mean[0, 2, 1, 5] = torch.nan
    found = attention_triton.merge_chunks(partial, lse, mean, torch.empty(1, 9, 2, 16), rows=16)
    assert found[0, :, 1, 5].isnan().all() and found.isnan().sum() == 9


def test_fp8_attention_merge_mutant_that_weighs_chunks_alike_is_seen():
    partial, lse, mean = partial_results(3, 1, 9, 2, 16)
    found = attention_triton.merge_chunks(partial, lse * 0, mean, torch.empty(1, 9, 2, 16), rows=16)
    assert relative_error(attention.merge_chunks_definition(partial, lse, mean), found) > 0.5


def every_value(dtype) -> torch.Tensor:
    """[1, 2 * 65536]: ones, and every bit pattern of a 16-bit dtype."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.cat([torch.ones_like(gate), gate])[None]


@triton.jit
def inexact(inverse_bits):
    """Finite, positive and no power of two: of a power of two the hardware's reciprocal is exact."""
    return (inverse_bits > 0) & (inverse_bits < 0x7F800000) & ((inverse_bits & 0x7FFFFF) != 0)


@triton.jit
def reciprocal_an_ulp_below(x):
    bits = exact_reciprocal(x).to(tl.int32, bitcast=True)
    return tl.where(inexact(bits), bits - 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_an_ulp_above(x):
    bits = exact_reciprocal(x).to(tl.int32, bitcast=True)
    return tl.where(inexact(bits), bits + 1, bits).to(tl.float32, bitcast=True)


@pytest.mark.parametrize("reciprocal", (exact_reciprocal, reciprocal_an_ulp_below, reciprocal_an_ulp_above))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_swiglu_of_every_16_bit_gate_whatever_the_reciprocal_rounds_to(dtype, reciprocal, monkeypatch):
    monkeypatch.setattr(swiglu, "reciprocal_approx", reciprocal)
    x = every_value(dtype)
    assert differing(swiglu.swiglu(x, num_warps=32, lane=64), cuda_order.swiglu(x)) == 0


rope_shapes = st.tuples(
    st.integers(1, 2), st.integers(0, 2), st.integers(1, 9), st.integers(1, 32).map(lambda n: 4 * n)
)


@given(shape=rope_shapes, part=st.floats(0, 1), shuffle=st.booleans(), **drawn)
def test_rope(shape, part, shuffle, dtype, seed, magnitude, special, strided):
    _, tokens, heads, head_dim = shape
    rotary = max(2, 2 * int(part * head_dim / 2))
    fused = values((*shape[:2], heads * head_dim), dtype, seed, magnitude, special, strided)
    x = fused.unflatten(-1, (heads, head_dim))
    weight = values((head_dim,), dtype, seed + 1)
    cos, sin = values((2, tokens, rotary), torch.float32, seed + 2)
    head_scale = values((heads,), torch.float32, seed + 3, 16.0).abs()
    expected = cuda_order.head_norm_rope(x, weight, cos, sin, 1e-5)
    assert differing(rope.head_norm_rope(x, weight, cos, sin, 1e-5, block=4, shuffle=shuffle), expected) == 0
    quantized = rope.head_norm_rope_quantize(x, weight, cos, sin, head_scale, 1e-5, shuffle=shuffle)
    assert differing(quantized, cuda_order.quantize_heads(expected, head_scale)) == 0
    if head_dim.bit_count() == 1:
        turned = cuda_order.hadamard(expected)
        assert differing(rope.hadamard(expected, block=2), turned) == 0
        quantized = rope.head_norm_rope_quantize(x, weight, cos, sin, head_scale, 1e-5, True, shuffle=shuffle)
        assert differing(quantized, cuda_order.quantize_heads(turned, head_scale)) == 0


@given(shape=rope_shapes, part=st.floats(0, 1), shuffle=st.booleans(), shared=st.booleans(), **drawn)
def test_rope_without_weight(shape, part, shuffle, shared, dtype, seed, magnitude, special, strided):
    batch, tokens, heads, head_dim = shape
    rotary = max(2, 2 * int(part * head_dim / 2))
    x = values((batch, tokens, heads * head_dim), dtype, seed, magnitude, special, strided)
    x = x.unflatten(-1, (heads, head_dim))
    cos, sin = values((2, 1 if shared else batch, tokens, rotary), torch.float32, seed + 2)
    # in float32 and then rounded, as the video decoder does it, and each sample by its own angles
    normed = cuda_order.rms_norm(x.float().contiguous(), torch.ones(head_dim), 1e-5).to(dtype)
    each = zip(normed, cos.expand(batch, -1, -1), sin.expand(batch, -1, -1), strict=True)
    expected = torch.stack([cuda_order.rotate_half(*one) for one in each])
    assert differing(rope.unweighted_norm_rope(x, cos, sin, 1e-5, block=4, shuffle=shuffle), expected) == 0


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_hadamard_of_heads(head_dim, dtype):
    x = values((1, 3, 5, head_dim), dtype, 0)
    weight, (cos, sin) = values((head_dim,), dtype, 1), values((2, 3, head_dim // 4 * 3), torch.float32, 2)
    scale = values((5,), torch.float32, 3, 16.0).abs()
    turned = cuda_order.hadamard(cuda_order.head_norm_rope(x, weight, cos, sin, 1e-5))
    for shuffle in (False, True):
        found = rope.head_norm_rope_quantize(x, weight, cos, sin, scale, 1e-5, True, block=2, pairs=shuffle)
        assert differing(found, cuda_order.quantize_heads(turned, scale)) == 0
        plain = rope.head_norm_rope_quantize(x, weight, cos, sin, scale, 1e-5, False, block=2, pairs=shuffle)
        assert differing(plain, found) > 0
    assert differing(attention.hadamard_definition(x), cuda_order.hadamard(x)) == 0
    assert differing(rope.hadamard(x, block=2), cuda_order.hadamard(x)) == 0


def test_rope_rotates_h3_heads():
    x = values((1, 2, 7, 128), torch.bfloat16, 0)
    weight = values((128,), torch.bfloat16, 1)
    cos, sin = values((2, 2, 96), torch.float32, 2)
    expected = cuda_order.head_norm_rope(x, weight, cos, sin, 1e-5)
    for shuffle in (False, True):
        assert differing(rope.head_norm_rope(x, weight, cos, sin, 1e-5, shuffle=shuffle), expected) == 0


@settings(max_examples=20)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 90)),
    width=st.sampled_from((16, 64)),
    seed=drawn["seed"],
    magnitude=drawn["magnitude"],
    special=drawn["special"],
    strided=drawn["strided"],
)
def test_resample(shape, width, seed, **kind):
    x = values(shape, torch.float32, seed, **kind)
    frequency, magnitude = values((2, shape[1]), torch.float32, seed + 1).exp()
    up, down = values((2, 12), torch.float32, seed + 2)
    phases = cuda_order.upsample_snake(x, up, frequency, magnitude)
    assert differing(resample.upsample_snake(x, up, frequency, magnitude, width), phases) == 0
    assert differing(resample.downsample(phases, down, width), cuda_order.downsample(phases, down)) == 0


def test_resample_mutant_that_zeros_the_ends_is_seen():
    x = values((1, 2, 40), torch.float32, 0)
    taps, ones = values((12,), torch.float32, 1), torch.ones(2)
    zeroed = torch.cat([torch.zeros(1, 2, 3), x, torch.zeros(1, 2, 3)], dim=-1)
    wrong = resample.upsample_snake(zeroed, taps, ones, ones)[..., 3:-3]
    assert differing(wrong, cuda_order.upsample_snake(x, taps, ones, ones)) > 0


@pytest.mark.parametrize("tokens", (1, 63, 64, 65, 127, 129, 300))
@pytest.mark.parametrize("heads", (1, 3, 4))
def test_attention_tiles(tokens, heads):
    random = torch.Generator().manual_seed(tokens)
    codes = torch.randint(0, 256, (2, tokens, heads, 128), dtype=torch.uint8, generator=random)
    codes = codes.view(torch.float8_e4m3fn)
    assert torch.equal(attention_tiles.value_tiles(codes), hopper_attention.value_tiles_definition(codes))


# --- planted mutants: a comparison that cannot fail proves nothing ------------------------------------------------


def mutant_norm_args():
    return norm_inputs((2, 3, 512), torch.float32, 5, 1.0, "none", False)


def test_norm_mutant_with_another_order_of_summation_is_seen(monkeypatch):
    @triton.jit
    def in_sequence(tiles, D: tl.constexpr):
        total = tl.zeros((128,), tl.float32)
        for k in tl.static_range((D + 511) // 512):
            total = total + tl.sum(tiles[k] * tiles[k], 1)
        return tl.sum(total, 0)

    monkeypatch.setattr(norm, "row_sum_of_squares", in_sequence)
    x, _, _, *rest = mutant_norm_args()
    assert differing(norm.norm_modulate(x, *rest, 1e-5), cuda_order.norm_modulate(x, *rest, 1e-5)) > 0


@pytest.mark.parametrize("shape", [(1, 40, 128), (2, 8, 1028)])
def test_norm_with_the_order_planted_on_the_gpu_is_seen_and_hardly_off(shape, tmp_path, monkeypatch):
    x, _, _, *rest = norm_inputs(shape, torch.float32, 5, 1.0, "none", False)
    planted = reordered_norm(tmp_path, monkeypatch).norm_modulate(x, *rest, 1e-5)
    expected = norm.norm_modulate(x, *rest, 1e-5)
    assert differing(planted, expected) > 0 and relative_error(expected, planted) < 1e-6


def test_norm_mutant_that_keeps_float32_between_operations_is_seen(monkeypatch):
    @triton.jit
    def unrounded(x, y):
        return device.widen(x) * device.widen(y)

    monkeypatch.setattr(norm, "multiply_rounded", unrounded)
    args = norm_inputs((2, 3, 512), torch.bfloat16, 5, 1.0, "none", False)
    assert differing(norm.residual_norm_modulate(*args, 1e-5), cuda_order.residual_norm_modulate(*args, 1e-5)) > 0


def test_quantize_mutant_that_multiplies_by_the_reciprocal_of_448_is_seen(monkeypatch):
    @triton.jit
    def multiplied(amax_bits):
        return tl.maximum(amax_bits, device.SCALE_AMAX_MIN_BITS).to(tl.float32, bitcast=True) * (1.0 / 448.0)

    monkeypatch.setattr(device, "e4m3_scale", multiplied)
    codes = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rows = []
    for amax in torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist():
        ties = (codes[1:] + codes[:-1]) / 2 * torch.tensor(amax / 448.0)
        rows.append(torch.cat([ties, ties.nextafter(torch.tensor(1.0)), torch.tensor([amax])]))
    x = torch.stack(rows)
    assert differing(quantize.quantize_rows(x), cuda_order.quantize_rows(x)) > 0


def test_swiglu_mutant_without_the_rounding_of_silu_is_seen(monkeypatch):
    @triton.jit
    def unrounded(x, dtype: tl.constexpr):
        return x

    monkeypatch.setattr(swiglu, "narrow", unrounded)
    x = values((3, 400), torch.bfloat16, 1)
    assert differing(swiglu.swiglu(x), cuda_order.swiglu(x)) > 0


def test_rope_without_weight_rotates_decoder_heads_and_its_mutant_is_seen(monkeypatch):
    x = values((2, 2, 5, 64), torch.bfloat16, 0)
    cos, sin = values((2, 1, 2, 48), torch.float32, 2)
    ones = torch.ones(64, dtype=torch.bfloat16)
    expected = cuda_order.head_norm_rope(x, ones, cos[0], sin[0], 1e-5)
    for shuffle in (False, True):
        assert differing(rope.unweighted_norm_rope(x, cos, sin, 1e-5, shuffle=shuffle), expected) == 0
    monkeypatch.setattr(rope, "negate", triton.jit(_same))
    assert differing(rope.unweighted_norm_rope(x, cos, sin, 1e-5), expected) > 0


def test_rope_mutant_that_forgets_the_minus_is_seen(monkeypatch):
    monkeypatch.setattr(rope, "negate", triton.jit(_same))
    x, weight = values((1, 2, 3, 32), torch.bfloat16, 0), values((32,), torch.bfloat16, 1)
    cos, sin = values((2, 2, 24), torch.float32, 2)
    expected = cuda_order.head_norm_rope(x, weight, cos, sin, 1e-5)
    assert differing(rope.head_norm_rope(x, weight, cos, sin, 1e-5), expected) > 0


def _same(x):
    return x


@pytest.mark.parametrize("tokens", (1, 255, 256, 257, 600))
def test_attention_tiles_sum_the_codes_of_each_channel(tokens):
    codes = values((2, tokens, 3, 128), torch.float32, 5, 30.0).to(torch.float8_e4m3fn)
    expected = codes.double().sum(1)
    summed = attention_tiles.code_sums(codes)
    assert summed.shape == (2, 3, 128)
    torch.testing.assert_close(summed.double(), expected, rtol=1e-5, atol=1e-2)
