"""The operators on the CPU: their definitions are the model's ATen chain, their fakes agree, importing is cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from h3opt.bench.kernel_inputs import DTYPES, SPECIALS, differing, op_inputs, values
from h3opt.kernels import DEFINITIONS, OPERATORS, kernel_names, ops
from h3opt.kernels.data_kinds import KINDS

from . import cuda_order

OPS = sorted(DEFINITIONS)
FAMILIES = ("norm", "wide_norm", "quantize", "swiglu", "rope", "resample")


def op(name):
    return OPERATORS[name]


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_the_op_on_the_cpu_is_its_definition(name, dtype, special):
    args = op_inputs(name, tokens=5, columns=48, batch=2, dtype=dtype, special=special)
    assert differing(op(name)(*args), DEFINITIONS[name](*args)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPS)
def test_the_op_on_the_cpu_is_its_definition_on_every_kind_of_data(name, kind):
    args = op_inputs(name, tokens=7, columns=48, batch=2, kind=kind)
    assert differing(op(name)(*args), DEFINITIONS[name](*args)) == 0


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("tokens", (0, 1, 5))
def test_the_fake_agrees_with_the_op(name, tokens):
    args = op_inputs(name, tokens=tokens, columns=48, batch=2)
    e4m3 = any(isinstance(one, torch.Tensor) and one.dtype == ops.E4M3 for one in args)  # which opcheck cannot copy
    checks = ("test_faketensor",) if e4m3 else ("test_schema", "test_faketensor")
    torch.library.opcheck(op(name), args, test_utils=checks)


@pytest.mark.parametrize("name", OPS)
def test_the_fake_takes_symbolic_shapes(name):
    args = op_inputs(name, tokens=5, columns=48, batch=2)
    torch.library.opcheck(op(name), args, test_utils=("test_aot_dispatch_dynamic",))
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def call(*tensors):
        left = iter(tensors)
        return op(name)(*(next(left) if isinstance(a, torch.Tensor) else a for a in args))

    graph = make_fx(call, tracing_mode="symbolic")(*tensors)
    assert [n.target for n in graph.graph.nodes].count(op(name)) == 1
    other = [a for a in op_inputs(name, tokens=7, columns=48, batch=2) if isinstance(a, torch.Tensor)]
    assert differing(graph(*other), call(*other)) == 0


def test_norm_modulate_is_the_block_of_diffusers():
    residual, y, gate, weight, scale, shift, index, eps = op_inputs("residual_norm_modulate", 6, 64, batch=2)
    norm = nn.RMSNorm(64, eps=eps, dtype=torch.bfloat16)
    norm.weight.data = weight
    with torch.no_grad():
        hidden = residual + gate.index_select(0, index) * y
        normed = norm(hidden)
        normed = normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)
    args = residual, y, gate, weight, scale, shift, index, eps
    assert differing(ops.residual_norm_modulate(*args), (hidden, normed)) == 0
    assert differing(ops.norm_modulate(hidden, *args[3:]), normed) == 0
    assert differing(ops.norm_modulate_quantize(hidden, *args[3:]), ops.quantize_rows(normed)) == 0
    assert differing(ops.residual_norm_modulate_quantize(*args), (hidden, *ops.quantize_rows(normed))) == 0


def test_swiglu_is_that_of_diffusers():
    from diffusers.models.activations import SwiGLU

    (x,) = op_inputs("swiglu", 6, 32, batch=2)
    module = SwiGLU(8, 32, bias=False)
    module.proj = nn.Identity()
    assert differing(ops.swiglu(x), module(x)) == 0
    assert differing(ops.swiglu_quantize(x), ops.quantize_rows(module(x))) == 0


def test_head_norm_rope_is_that_of_diffusers():
    from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb

    x, weight, cos, sin, eps = op_inputs("head_norm_rope", 6, 32, batch=2)
    expected = _apply_rotary_emb(torch.rms_norm(x, (32,), weight, eps), cos, sin)
    assert differing(ops.head_norm_rope(x, weight, cos, sin, eps), expected) == 0
    scale = torch.tensor([1.0, 900.0, 0.25])
    cast = (expected.float() * scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert differing(ops.head_norm_rope_quantize(x, weight, cos, sin, scale, eps, False), cast) == 0


def test_unweighted_norm_rope_is_that_of_diffusers_video_decoder(monkeypatch):
    from diffusers.models.autoencoders import autoencoder_kl_minimax_h3 as decoder

    seen = []
    monkeypatch.setattr(decoder, "dispatch_attention_fn", lambda q, k, v, **_: seen.extend((q, k)) or v)
    attention = decoder.MiniMaxH3VideoAttention(dim=64, heads=2, dim_head=32, bias=True).bfloat16()
    x = values((2, 6, 64), torch.bfloat16, "cpu", 0)
    cos, sin = values((2, 2, 6, 1, 24), torch.float32, "cpu", 1)
    with torch.no_grad():
        attention(x, (cos, sin))
        for found, projection in zip(seen, (attention.to_q, attention.to_k), strict=True):
            heads = projection(x).unflatten(2, (2, 32))
            assert differing(ops.unweighted_norm_rope(heads, cos[:, :, 0], sin[:, :, 0], 1e-5), found) == 0


def test_resampling_is_the_activation_of_diffusers():
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
        MiniMaxH3AudioActivation1d,
        MiniMaxH3AudioSnakeBeta,
    )

    module = MiniMaxH3AudioActivation1d(MiniMaxH3AudioSnakeBeta(3))
    x, _, *log = op_inputs("upsample_snake", tokens=40, columns=0, batch=2, dtype=torch.float32)
    module.act.alpha.data, module.act.beta.data = (one.log() for one in log)
    module.double()
    alpha, beta = module.act.alpha.exp(), module.act.beta.exp()
    up, down = 2 * module.upsample.filter.view(-1), module.downsample.lowpass.filter.view(-1)
    for length in (1, 2, 3, 7, 40):  # shorter than the filter too: the ends reach over each other
        part = x[..., :length].double()
        with torch.no_grad():
            phases = ops.upsample_snake(part, up, alpha, 1 / (beta + 1e-9))
            torch.testing.assert_close(phases.mT.flatten(2), module.act(module.upsample(part)), rtol=0, atol=1e-13)
            torch.testing.assert_close(ops.downsample(phases, down), module(part), rtol=0, atol=1e-13)


def test_an_inf_reaches_only_the_samples_whose_taps_it_meets():
    x = torch.zeros(1, 1, 20)
    x[..., 10] = torch.inf
    phases = ops.upsample_snake(x, torch.ones(12), torch.zeros(1), torch.zeros(1))
    assert (~phases[0, 0, 0].isfinite()).nonzero().flatten().tolist() == [8, 9, 10, 11, 12, 13]
    assert (~phases[0, 0, 1].isfinite()).nonzero().flatten().tolist() == [7, 8, 9, 10, 11, 12]


def test_quantize_rows_restores_values_within_half_a_step():
    (x,) = op_inputs("quantize_rows", 40, 96, dtype=torch.float32)
    q, scale = ops.quantize_rows(x)
    assert q.float().abs().amax(-1).eq(448).all()
    error = (q.float() * scale - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, scale * 2.0**-10) * 1.0001).all()


@pytest.mark.parametrize("special", ("nan", "inf"))
def test_a_nan_or_an_inf_stays_in_its_row(special):
    clean, dirty = (op_inputs("quantize_rows", 6, 48, dtype=torch.float32, special=s)[0] for s in ("none", special))
    (q, scale), (q_dirty, scale_dirty) = ops.quantize_rows(clean), ops.quantize_rows(dirty)
    touched = dirty.isnan().any(-1) | dirty.isinf().any(-1)
    assert touched.any() and not touched.all()
    assert differing(q_dirty[~touched], q[~touched]) == 0
    assert differing(scale_dirty[~touched], scale[~touched]) == 0
    rows = q_dirty[touched].float()
    assert rows.isnan().all() if special == "nan" else (rows[:, 0].isnan() & rows[:, 1].eq(0)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_quantize_as_the_order_of_cuda_spells_it_out(dtype):
    for magnitude in (1e-3, 1.0, 1e4):
        x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(3)).mul(magnitude).to(dtype)
        assert differing(ops.quantize_rows(x), cuda_order.quantize_rows(x)) == 0


def test_a_row_of_zeros_quantizes_to_zeros():
    q, scale = ops.quantize_rows(torch.zeros(2, 8, dtype=torch.bfloat16))
    assert q.float().eq(0).all() and (scale == torch.tensor(1e-12) / torch.tensor(448.0)).all()


def test_scaled_linear_is_the_linear_layer_of_the_dequantized_operands():
    q, q_scale, weight_q, weight_scale, bias, dtype, accumulate = op_inputs("scaled_linear", 7, 48, batch=2)
    x, weight = q.double() * q_scale.double(), weight_q.double() * weight_scale.double()
    expected = torch.nn.functional.linear(x, weight, bias.double())
    actual = ops.scaled_linear(q, q_scale, weight_q, weight_scale, bias, dtype, accumulate)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-5)
    mutant = torch.nn.functional.linear(x, weight_q.double(), bias.double())
    with pytest.raises(AssertionError):
        torch.testing.assert_close(actual.double(), mutant, rtol=2**-8, atol=1e-5)


def test_shapes_that_do_not_fit_raise():
    x, weight, scale, shift, index, eps = op_inputs("norm_modulate", 6, 64)
    with pytest.raises(RuntimeError):
        ops.norm_modulate(x, weight, scale, shift, index[:-1], eps)
    with pytest.raises(IndexError):
        ops.norm_modulate(x, weight, scale, shift, index + 99, eps)


def test_every_op_but_those_of_libraries_names_its_kernel():
    of_libraries = {"scaled_linear", "norm_head_scale", "attention"}
    assert set(kernel_names) == set(DEFINITIONS) - of_libraries - {"fp8_attention", "fp8_attention_quantized"}
    folder = Path(ops.__file__).parents[1] / "triton_kernels"
    source = "".join((folder / f"{family}.py").read_text() for family in FAMILIES)
    for kernel in kernel_names.values():
        assert source.count(f"@triton.jit\ndef {kernel}(") == 1


def test_importing_the_ops_registers_them_once_and_leaves_triton_alone():
    code = (
        "import sys, h3opt.kernels, h3opt.kernels.ops, torch\n"
        "assert 'triton' not in sys.modules, 'triton'\n"
        "print(len([o for o in dir(torch.ops.h3opt) if o.endswith(('_v1', '_v2'))]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == len(DEFINITIONS)
