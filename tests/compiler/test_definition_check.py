"""The operators of libraries are held to their definitions where a rewrite uses them, and a wrong sum is noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from h3opt.bench.kernel_inputs import op_inputs
from h3opt.compiler import definition_check
from h3opt.compiler.definition_check import Measurement, check_graph, measure
from h3opt.compiler.lowering import GraphOutcome, Lowering
from h3opt.device import Device
from h3opt.graph.matcher import Rule
from h3opt.graph.tracing import trace
from h3opt.kernels import CHECKS, DEFINITIONS, OPERATORS
from h3opt.kernels.data_kinds import ATTENTION_KINDS, draw_attention
from h3opt.kernels.ops import attention
from h3opt.kernels.ops.definition_trials import FP8_ATTENTION_CHECK, attention_exact, quantized_operands
from h3opt.kernels.ops.registry import E4M3, register_op
from h3opt.metrics.bits import relative_error
from h3opt.pass_api.base import GraphFacts
from h3opt.pass_api.examples import Draw
from h3opt.pass_api.promises import Perceptual
from h3opt.pass_api.registry import make_pass

TOKENS = 2048
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, ScalarType out_dtype, str backend)"
    " -> Tensor"
)


def unchunked_attention(q, k, v, q_scale, k_scale, v_scale, out_dtype, backend, accumulate=None):
    """FP8 attention over all keys in one sum, as libraries have it; ``accumulate`` replaces the product with V."""
    query, key = ((one.float() / scale[:, None]).transpose(1, 2) for one, scale in ((q, q_scale), (k, k_scale)))
    logits = query @ key.transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    codes, value = (weights * 256).to(E4M3).float(), v.float().transpose(1, 2)
    total = codes @ value if accumulate is None else accumulate(codes, value)
    out = total / (weights.sum(-1, keepdim=True) * 256) / v_scale[:, None, None]
    return out.transpose(1, 2).to(out_dtype).contiguous()


def sums_of_14_bits(codes: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A product whose running sum keeps 14 bits, as Hopper's FP8 tensor cores do: 8 keys are added at a time."""
    total = codes.new_zeros((*codes.shape[:-1], value.shape[-1]))
    for left, right in zip(codes.split(8, -1), value.split(8, -2), strict=True):
        total = total + left @ right
        total = (total.view(torch.int32) & ~0x3FF).view(torch.float32)
    return total


def with_14_bits(*arguments: Any) -> torch.Tensor:
    return unchunked_attention(*arguments, accumulate=sums_of_14_bits)


def fake(q, k, v, q_scale, k_scale, v_scale, out_dtype, backend):
    return q.new_empty(q.shape, dtype=out_dtype)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operators of FP8 attention that a library could run: the first keeps 14 bits of a sum, the other is right."""
    for name, runs in (("planted_14_bits", with_14_bits), ("planted_right", unchunked_attention)):
        if not hasattr(torch.ops.h3opt, f"{name}_v1"):  # an operator cannot be registered twice in a process
            register_op(name, SCHEMA, unchunked_attention, runs, fake, None, cpu=runs, check=FP8_ATTENTION_CHECK)
            for registered in (DEFINITIONS, CHECKS, OPERATORS):
                del registered[name]
        monkeypatch.setitem(DEFINITIONS, name, unchunked_attention)
        monkeypatch.setitem(CHECKS, name, FP8_ATTENTION_CHECK)
        monkeypatch.setitem(OPERATORS, name, getattr(torch.ops.h3opt, f"{name}_v1").default)


@pytest.fixture(autouse=True)
def _nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition_check, "_measured", {})


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition_check, "unchecked", lambda device: None)


@dataclass(frozen=True)
class InFP8(type(make_pass("attention_backend"))):  # type: ignore[misc]
    """Attention in FP8 by a named operator."""

    operator: str = ""

    promise = Perceptual(lpips=0.03, site_error=0.1)

    def rules(self):
        def in_fp8(query, key, value, swap):
            scales = [attention.dynamic_head_scale(one, True) for one in (query, key, value)]
            codes = [
                attention.quantize_heads(one, scale) for one, scale in zip((query, key, value), scales, strict=True)
            ]
            return OPERATORS[self.operator](*codes, *scales, torch.float32, "triton")

        (rule,) = super().rules()
        return (Rule(rule.pattern, in_fp8, rule.guard),)


def lowered(operator: str, **settings: Any) -> GraphOutcome:
    one = InFP8(operator=operator)
    example = one.example(Draw(tokens=TOKENS, head_dim=64))
    graph = trace(example.function, example.args)
    return Lowering(**settings).run(graph, [one], GraphFacts())[1][one.name]


@pytest.mark.usefixtures("planted", "as_on_a_gpu")
def test_a_pass_declines_where_a_library_loses_sums_and_says_by_how_much():
    outcome = lowered("planted_14_bits")
    assert (outcome.matched, len(outcome.refused)) == (0, 1)
    assert "planted_14_bits is off its definition on this device: on data of kind" in outcome.refused[0]
    assert outcome.definition is not None and outcome.definition.ratio > 3
    assert outcome.definition.kind in ATTENTION_KINDS
    assert f"{outcome.definition.error:.4f}" in outcome.refused[0]


@pytest.mark.usefixtures("planted", "as_on_a_gpu")
def test_a_right_library_is_taken_and_the_report_has_the_figure():
    outcome = lowered("planted_right")
    assert (outcome.matched, outcome.refused) == (1, [])
    assert outcome.definition is not None and 0.9 < outcome.definition.ratio < 1.1
    assert str(outcome.definition).startswith("definition: error 1.0")


@pytest.mark.usefixtures("planted", "as_on_a_gpu")
def test_zero_mean_data_alone_would_not_have_shown_it(monkeypatch):
    narrow = type(FP8_ATTENTION_CHECK)(1.15, ("zero_mean",), FP8_ATTENTION_CHECK.draw)
    monkeypatch.setitem(CHECKS, "planted_14_bits", narrow)
    assert lowered("planted_14_bits").matched == 1


@pytest.mark.usefixtures("planted", "as_on_a_gpu")
def test_without_the_probe_nothing_is_checked():
    outcome = lowered("planted_14_bits", probe=False)
    assert (outcome.matched, outcome.definition) == (1, None)


@pytest.mark.usefixtures("planted")
def test_on_a_cpu_the_report_says_why_nothing_was_checked():
    outcome = lowered("planted_14_bits")
    assert outcome.matched == 1
    assert str(outcome.definition) == "definition: not checked, on a CPU the operator is its definition"


@pytest.mark.usefixtures("planted", "as_on_a_gpu")
def test_a_shape_is_measured_once_in_a_process(monkeypatch):
    measured: list[str] = []
    once = definition_check._measure
    monkeypatch.setattr(definition_check, "_measure", lambda name, site: measured.append(name) or once(name, site))
    monkeypatch.setitem(
        CHECKS, "planted_right", type(FP8_ATTENTION_CHECK)(1.15, ("clusters",), FP8_ATTENTION_CHECK.draw)
    )
    for _ in range(2):
        lowered("planted_right")
    assert measured == ["planted_right"]


def site_arguments(name: str) -> list[Any]:
    return list(op_inputs(name, 512, 2048 if name == "scaled_linear" else 64))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_operator_with_a_check_holds_its_own_definition_here(name):
    before = torch.get_rng_state()
    measured = measure(name, site_arguments(name))
    assert measured.holds and 0 < measured.ratio <= 1.01, measured
    assert torch.equal(before, torch.get_rng_state())


def test_every_operator_of_a_library_says_how_it_is_checked():
    assert set(CHECKS) == {"attention", "fp8_attention", "fp8_attention_quantized", "scaled_linear"}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("keeps_14_bits", [False, True])
def test_operators_that_a_format_pass_installed_are_measured_in_the_captured_graph(monkeypatch, keeps_14_bits):
    def cut(q, q_scale, weight_q, weight_scale, *rest):
        codes = sums_of_14_bits(q.float(), weight_q.float().t())
        return codes * q_scale * weight_scale.t()

    if keeps_14_bits:
        monkeypatch.setitem(OPERATORS, "scaled_linear", Replaced(OPERATORS["scaled_linear"], cut))
    arguments = site_arguments("scaled_linear")
    linear = torch.ops.h3opt.scaled_linear_v2.default
    graph = trace(lambda *tensors: linear(*tensors, torch.bfloat16, "precise"), arguments[:5])
    (measured,) = check_graph(graph)
    assert measured.operator == "scaled_linear" and measured.ratio > 0
    assert measured.holds is not keeps_14_bits


class Replaced:
    """An operator whose schema is another's."""

    def __init__(self, operator: Any, runs: Any) -> None:
        self._schema, self._runs = operator._schema, runs

    def __call__(self, *arguments: Any) -> Any:
        return self._runs(*arguments)


def test_an_operator_that_gives_nan_does_not_hold():
    assert not Measurement("attention", "zero_mean", float("nan"), 0.002, 1.5).holds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_flash_attention_3_over_all_keys_at_once_is_refused_at_19k_tokens():
    if (reason := attention.missing("fa3", Device.of("cuda"), fp8=True)) is not None:
        pytest.skip(reason)
    import fa3_fwd_interface

    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (one.bfloat16() for one in draw_attention("offset_2", (1, 19456, 4, 128), generator))
    operands = quantized_operands(q, k, v, True, None)
    descales = {f"{name}_descale": (1 / operands[f"{name}_scale"])[None].contiguous() for name in "qkv"}
    out = fa3_fwd_interface.flash_attn_func(*(operands[name] for name in "qkv"), **descales)
    rows = torch.arange(0, 19456, 152, device="cuda")
    exact = attention_exact(q[:, rows], k, v)
    found = (out[0] if isinstance(out, tuple) else out)[:, rows].double()
    dequantized = [operands[name].float() / operands[f"{name}_scale"][:, None] for name in "qkv"]
    limit = relative_error(exact, attention_exact(dequantized[0][:, rows], *dequantized[1:]).bfloat16().double())
    assert relative_error(exact, found) > 1.15 * limit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("accumulate", "holds"), [("precise", True), ("fast", False)])
def test_precise_matrix_products_of_14336_inputs_hold_and_fast_ones_do_not_on_hopper(accumulate, holds):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other tensor cores keep other sums")
    *arguments, _ = op_inputs("scaled_linear", 2048, 14336, rows=336, device="cuda")
    assert measure("scaled_linear", [*arguments, accumulate]).holds is holds
