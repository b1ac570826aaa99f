"""On a GPU: every kernel against the eager ATen chain, bit for bit, and proof that the kernel ran."""

from __future__ import annotations

import itertools

import pytest
import torch

from h3opt.bench.kernel_inputs import DTYPES, SPECIALS, differing, op_inputs, values
from h3opt.device import Device
from h3opt.kernels import DEFINITIONS, OPERATORS, kernel_names, ops
from h3opt.kernels.data_kinds import KINDS
from h3opt.kernels.ops import attention
from h3opt.kernels.ops.linear import ACCUMULATE
from h3opt.metrics.bits import relative_error, row_ulps

from . import cuda_order

pytestmark = pytest.mark.gpu

FUSED = sorted(set(kernel_names) - set(ops.CLOSE))
HEAD_OPS = (
    "head_norm_rope",
    "head_norm_rope_quantize",
    "unweighted_norm_rope",
    "quantize_heads",
    "quantize_values",
    "hadamard",
    "dynamic_head_scale",
)


@pytest.fixture(autouse=True)
def _needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def op(name):
    return OPERATORS[name]


def check(name, args):
    assert differing(op(name)(*args), DEFINITIONS[name](*args)) == 0


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_small_odd_shapes(name, dtype, special):
    widths = (4, 20, 64, 96, 128) if name in HEAD_OPS else (4, 36, 508, 1028, 5376)
    for columns in widths:
        for tokens, rows, batch in ((1, 1, 1), (17, 2, 2), (5, 3, 3)):
            check(name, op_inputs(name, tokens, columns, rows, batch, dtype, "cuda", special, heads=5))


@pytest.mark.sanitize
@pytest.mark.parametrize("name", FUSED)
def test_one_token_and_seventeen_of_an_odd_width(name):
    """For `make sanitize`, since a read past the end need not change a bit: few shapes, each with masked edges."""
    one, odd = (20, 96) if name in HEAD_OPS else (36, 1028)
    check(name, op_inputs(name, 1, one, 1, device="cuda", heads=1))
    check(name, op_inputs(name, 17, odd, 3, 2, device="cuda", heads=5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_magnitudes_and_subnormals(name, dtype):
    columns = 64 if name in HEAD_OPS else 1024
    for magnitude in (1e-40, 1e-30, 1e-6, 1e3, 1e4, 1e30):
        first, *rest = op_inputs(name, 33, columns, dtype=dtype, device="cuda")
        check(name, ((first.double() * magnitude).to(dtype), *rest))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUSED)
def test_kinds_of_data(name, kind):
    check(name, op_inputs(name, 1027, 128 if name in HEAD_OPS else 1028, 3, device="cuda", heads=5, kind=kind))


@pytest.mark.parametrize("name", FUSED)
def test_real_geometry(name):
    columns = {"swiglu": 14336, "swiglu_quantize": 14336, "quantize_rows": 7168}.get(name, 5376)
    columns = 128 if name in HEAD_OPS else columns
    for tokens in (19328, 19327):
        check(name, op_inputs(name, tokens, columns, 9, device="cuda", heads=56))


DECODER_OPS = sorted(name for name in FUSED if name.startswith(("scaled_residual", "wide_norm")))


@pytest.mark.parametrize("first_block", (True, False))
@pytest.mark.parametrize("name", DECODER_OPS)
def test_the_float32_stream_of_the_video_decoder(name, first_block):
    for tokens in (1797, 15 * 1797):
        stream, *rest = op_inputs(name, tokens, 2048, device="cuda")
        assert stream.dtype == torch.float32
        check(name, (stream.bfloat16() if first_block else stream, *rest))
    misaligned = torch.randn(9 * 2048 + 1, device="cuda")[1:].view(1, 9, 2048)
    check(name, (misaligned, *op_inputs(name, 9, 2048, device="cuda")[1:]))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_swiglu_of_every_16_bit_gate(dtype):
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
    for value in (1.0, -3.0, 0.0):
        check("swiglu", (torch.cat([torch.full_like(gate, value), gate])[None],))


def test_offsets_beyond_32_bits():
    # [76000, 28672] is 2.18e9 elements: the last rows lie past 2**31.
    x = torch.zeros(76000, 28672, dtype=torch.bfloat16, device="cuda")
    x[-100:] = values((100, 28672), torch.bfloat16, "cuda", 0)
    assert differing(ops.swiglu(x)[-100:], DEFINITIONS["swiglu"](x[-100:])) == 0
    q, scale = ops.swiglu_quantize(x)
    assert differing((q[-100:], scale[-100:]), DEFINITIONS["swiglu_quantize"](x[-100:])) == 0


@pytest.mark.parametrize("name", FUSED)
def test_inputs_that_no_kernel_serves_take_the_definition(name):
    columns = 6 if name in HEAD_OPS else 1026
    check(name, op_inputs(name, 9, columns, device="cuda"))
    first, *rest = op_inputs(name, 9, 64, device="cuda")
    check(name, (first.float(), *rest))
    flat = torch.empty(first.numel() + 1, dtype=first.dtype, device="cuda")
    misaligned = flat[1:].view(first.shape)
    misaligned.copy_(first)
    check(name, (misaligned, *rest))


@pytest.mark.parametrize("name", FUSED)
def test_strided_inputs(name):
    first, *rest = op_inputs(name, 9, 64, device="cuda")
    wide = torch.cat([first, first], dim=-2)[..., : first.shape[-2], :]
    check(name, (wide, *rest))
    check(name, (first.transpose(0, 1).contiguous().transpose(0, 1), *rest))


@pytest.mark.parametrize("name", FUSED)
def test_no_tokens(name):
    check(name, op_inputs(name, 0, 64, device="cuda"))


@pytest.mark.parametrize("name", FUSED)
def test_the_kernel_ran(name):
    args = op_inputs(name, 17, 64, device="cuda")
    op(name)(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op(name)(*args)
        torch.cuda.synchronize()
    assert [e.key for e in profile.key_averages() if e.key == kernel_names[name]] == [kernel_names[name]]


@pytest.mark.parametrize("name", FUSED)
def test_the_fake_agrees_on_cuda(name):
    args = op_inputs(name, 5, 48, batch=2, device="cuda")
    torch.library.opcheck(op(name), args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("tokens, columns, rows", ((1, 64, 3), (17, 5376, 16), (0, 64, 3), (5, 36, 3)))
def test_scaled_linear_is_close_to_its_definition(tokens, columns, rows):
    for bias, accumulate in itertools.product((True, False), ACCUMULATE):
        args = list(op_inputs("scaled_linear", tokens, columns, rows, batch=2, device="cuda"))
        args[4], args[6] = args[4] if bias else None, accumulate
        actual, expected = ops.scaled_linear(*args), DEFINITIONS["scaled_linear"](*args)
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        # Fast accumulation keeps about 14 bits.
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2 * columns**0.5)


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_turned_and_transformed_in_one_kernel(dtype, special):
    for columns in (8, 16, 32, 64, 128):
        *args, _ = op_inputs("head_norm_rope_quantize", 17, columns, 2, 2, dtype, "cuda", special, heads=5)
        check("head_norm_rope_quantize", (*args, True))


def attention_inputs(batch, tokens, heads, head_dim, chunk=attention.CHUNK, offset=0.0):
    q, k, v = (values((batch, tokens, heads, head_dim), torch.bfloat16, "cuda", seed) for seed in range(3))
    v = v + offset * values((head_dim,), torch.bfloat16, "cuda", 3)
    scales = [attention.dynamic_head_scale(one, True) for one in (q, k)]
    codes, v_scale, v_mean = attention.quantize_values(v, chunk)
    return (q, k, v), (*map(attention.quantize_heads, (q, k), scales), codes, *scales, v_scale, v_mean, chunk)


def needs(backend, fp8):
    reason = attention.missing(backend, Device.of("cuda"), fp8)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(1, 1, 2, 128), (1, 17, 3, 96), (2, 67, 1, 64)])
def test_the_triton_fp8_attention_of_a_few_tokens_is_close_to_its_definition(shape):
    _, args = attention_inputs(*shape, chunk=30)
    expected = attention.fp8_attention_definition(*(_on_cpu(one) for one in args), torch.float32, "triton")
    assert relative_error(expected, attention.fp8_attention(*args, torch.bfloat16, "triton").float()) < 0.05
    codes, scale = attention.fp8_attention_quantized(*args, "triton")
    assert relative_error(expected.flatten(2), codes.float() * scale) < 0.06


def _on_cpu(one):
    return one.cpu() if isinstance(one, torch.Tensor) else one


FP8_ACCURATE = ("fa3", "triton")
LENGTHS = [(1, 1, 2, 128), (1, 17, 3, 128), (2, 200, 2, 128), (1, 1027, 4, 128), (1, 300, 3, 64), (1, 2919, 2, 128)]


@pytest.mark.parametrize("chunk", [100, 128, attention.CHUNK])
@pytest.mark.parametrize("shape", LENGTHS)
@pytest.mark.parametrize("backend", FP8_ACCURATE)
def test_fp8_attention_is_close_to_its_definition(backend, shape, chunk):
    needs(backend, fp8=True)
    _, args = attention_inputs(*shape, chunk=chunk)
    expected = attention.fp8_attention_definition(*args, torch.float32, backend)
    found = attention.fp8_attention(*args, torch.bfloat16, backend)
    assert relative_error(expected, found.float()) < 0.05
    codes, scale = attention.fp8_attention_quantized(*args, backend)
    assert relative_error(expected.flatten(2), codes.float() * scale) < 0.06


@pytest.mark.parametrize("backend", FP8_ACCURATE)
def test_query_rows_in_blocks_have_the_same_result(backend, monkeypatch):
    needs(backend, fp8=True)
    _, args = attention_inputs(2, 1000, 3, 128, chunk=224)
    whole = attention.fp8_attention(*args, torch.bfloat16, backend)
    monkeypatch.setattr(attention, "PARTIAL_BYTES", 1)
    assert differing(attention.fp8_attention(*args, torch.bfloat16, backend), whole) == 0


def error_and_limit(tokens, offset, attend):
    """Relative errors of 128 query rows: of ``attend``, and of exact arithmetic on the same quantized operands."""
    (q, k, v), args = attention_inputs(1, tokens, 2, 128, offset=offset)
    rows = torch.linspace(0, tokens - 1, 128, device="cuda").long()

    def exact(q, k, v):
        logits = torch.einsum("nhd,mhd->hnm", q[0, rows].double(), k[0].double()) * q.shape[-1] ** -0.5
        return torch.einsum("hnm,mhd->nhd", logits.softmax(-1), v[0].double())

    q8, k8, v8, q_scale, k_scale, v_scale, v_mean, chunk = args
    each = torch.arange(tokens, device="cuda") // chunk
    values_of = v8.float() / v_scale[:, each, :, None] + v_mean[:, each]
    operands = (q8.float() / q_scale[:, None], k8.float() / k_scale[:, None], values_of)
    expected = exact(q, k, v)
    found = attend(args, (q, k, v))[0, rows]
    return relative_error(expected, found.double()), relative_error(expected, exact(*operands))


@pytest.mark.parametrize("offset", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("backend", FP8_ACCURATE)
def test_fp8_attention_of_many_keys_is_as_accurate_as_its_operands(backend, offset):
    needs(backend, fp8=True)
    attend = lambda args, _: attention.fp8_attention(*args, torch.bfloat16, backend)  # noqa: E731
    error, limit = error_and_limit(19_457, offset, attend)
    assert error < max(1.15 * limit, limit + 0.002)  # a bf16 result is 0.0017 off


def test_one_pass_over_all_keys_is_seen():
    """What was there before: V with its mean, all keys summed in the tensor cores."""
    needs("fa3", fp8=True)

    def one_pass(args, heads_of):
        scale = attention.dynamic_head_scale(heads_of[2], True)
        descales = [(1.0 / one)[None] for one in (args[3], args[4], scale)]
        codes = attention.quantize_heads(heads_of[2], scale)
        out = attention._fa3()(
            args[0], args[1], codes, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2]
        )
        return out[0] if isinstance(out, tuple) else out

    error, limit = error_and_limit(19_457, 2.0, one_pass)
    assert error > 50 * limit


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", FP8_ACCURATE)
def test_a_bad_token_reaches_what_it_reaches_in_bf16(backend, value):
    needs(backend, fp8=True)
    heads_of, args = attention_inputs(1, 500, 2, 128, chunk=200)
    clean = attention.fp8_attention(*args, torch.bfloat16, backend)

    def with_bad(place):
        q, k, v = (one.clone() for one in heads_of)
        (q, k, v)[place][0, 250, 1, 7] = value if place == 2 else torch.nan  # RMSNorm makes an inf in Q or K NaN
        scales = [attention.dynamic_head_scale(one, True) for one in (q, k)]
        codes, v_scale, v_mean = attention.quantize_values(v, 200)
        operands = (*map(attention.quantize_heads, (q, k), scales), codes, *scales, v_scale, v_mean, 200)
        return attention.fp8_attention(*operands, torch.bfloat16, backend)

    reached = torch.zeros(3, *clean.shape, dtype=torch.bool, device="cuda")
    reached[0, :, 250, 1] = True  # Q: its token
    reached[1, :, :, 1] = True  # K: every query of its head
    reached[2, :, :, 1, 7] = True  # V: its channel of its head
    for place in range(3):
        found = with_bad(place)
        assert not found[reached[place]].isfinite().any()
        assert relative_error(clean[~reached[place]].float(), found[~reached[place]].float()) < 0.01


@pytest.mark.parametrize("backend", FP8_ACCURATE)
def test_values_that_are_constant_or_zero_come_back(backend):
    needs(backend, fp8=True)
    (_, _, v), args = attention_inputs(1, 700, 2, 128, chunk=300)
    for value in (0.0, 3.140625):
        codes, v_scale, v_mean = attention.quantize_values(torch.full_like(v, value), 300)
        found = attention.fp8_attention(*args[:2], codes, *args[3:5], v_scale, v_mean, 300, torch.bfloat16, backend)
        torch.testing.assert_close(found, torch.full_like(found, value), rtol=2**-8, atol=0)


@pytest.mark.parametrize("shape", [(1, 17, 3, 128), (2, 200, 2, 64)])
@pytest.mark.parametrize("backend", attention.BF16_BACKENDS)
def test_attention_differs_from_eager_by_rounding_alone(backend, shape):
    needs(backend, fp8=False)
    heads_of, _ = attention_inputs(*shape)
    eager = attention.attention_definition(*heads_of, backend)
    assert row_ulps(eager, attention.attention(*heads_of, backend)) <= 8


def test_a_mutant_fails_here_too(monkeypatch):
    args = op_inputs("norm_modulate", 64, 5376, device="cuda", dtype=torch.float32)
    definition = torch.rms_norm

    def pairwise(x, shape, weight, eps):
        return definition(x.flip(-1), shape, weight.flip(-1), eps).flip(-1)

    monkeypatch.setattr(torch, "rms_norm", pairwise)
    assert differing(ops.norm_modulate(*args), DEFINITIONS["norm_modulate"](*args)) > 0


RESAMPLING = ("upsample_snake", "downsample")


@pytest.mark.sanitize
@pytest.mark.parametrize("name", RESAMPLING)
def test_resampling_of_few_samples_has_the_bits_of_its_spelled_out_order(name):
    for tokens, rows, batch in ((1, 1, 1), (5, 3, 2), (517, 3, 2)):  # the last is more than one program's 512
        args = op_inputs(name, tokens, 0, rows, batch, torch.float32, "cuda")
        assert differing(getattr(ops, name)(*args), getattr(cuda_order, name)(*args, sine=torch.sin)) == 0


@pytest.mark.parametrize("tokens, rows, batch", ((1, 1, 1), (5, 3, 2), (1035, 512, 2), (165600, 8, 2)))
@pytest.mark.parametrize("name", RESAMPLING)
def test_resampling_has_the_bits_of_its_spelled_out_order_and_is_close_to_the_library(name, tokens, rows, batch):
    args = op_inputs(name, tokens, 0, rows, batch, torch.float32, "cuda")
    actual = getattr(ops, name)(*args)
    assert differing(actual, getattr(cuda_order, name)(*args, sine=torch.sin)) == 0
    exact = DEFINITIONS[name](*(one.double() for one in args))
    assert (actual.double() - exact).norm() < 1e-4 * exact.norm()  # sines of large arguments; a lost tap costs 0.1
    strided = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert differing(getattr(ops, name)(strided, *args[1:]), actual) == 0


@pytest.mark.parametrize("name", RESAMPLING)
def test_resampling_kernels_run(name):
    args = op_inputs(name, 17, 0, dtype=torch.float32, device="cuda")
    getattr(ops, name)(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        getattr(ops, name)(*args)
        torch.cuda.synchronize()
    assert [e.key for e in profile.key_averages() if e.key == kernel_names[name]] == [kernel_names[name]]
    for other in (torch.bfloat16, torch.float16):  # not served: the definition
        half = op_inputs(name, 17, 0, dtype=other, device="cuda")
        assert getattr(ops, name)(*half).dtype == other
