"""On a CUDA device: the Exact passes give the unmodified bits, and the kernels they promise are the ones that ran."""

import pytest
import torch

import h3opt
from h3opt.kernels import kernel_names
from h3opt.metrics.bits import bits_equal
from h3opt.reference import full_inputs, full_transformer, tiny_call, tiny_pipeline

EXACT = ["norm_modulate", "fused_swiglu", "residual_fold", "modulation_table", "hoist_step_invariants"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_pipeline(dtype=torch.bfloat16, device="cuda")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def unmodified(pipe):
    return tiny_call(pipe)


@pytest.mark.parametrize(
    "passes", [[], *([name] for name in EXACT), EXACT], ids=lambda passes: "+".join(passes) or "none"
)
def test_exact_passes_give_the_unmodified_bits(pipe, unmodified, passes):
    with h3opt.optimize(pipe, passes=passes) as opt:
        out = tiny_call(pipe)
        report = opt.report
    for name in passes:
        assert report[name].declined is None, report[name].declined
        assert report[name].matched == report[name].expected
    for key in ("videos", "audio"):
        comparison = bits_equal(unmodified[key], out[key])
        assert comparison, f"{key}: {comparison}"


def test_restore_gives_back_the_unmodified_bits(pipe, unmodified):
    with h3opt.optimize(pipe):
        tiny_call(pipe)
    assert bits_equal(unmodified["videos"], tiny_call(pipe)["videos"])


def test_quantize_fusion_keeps_the_bits_of_the_unfused_fp8_chain(pipe):
    with h3opt.optimize(pipe, passes=["fp8_linear"]):
        unfused = tiny_call(pipe)
    with h3opt.optimize(pipe, passes=["fp8_linear", "quant_producer_fusion", "residual_fold"]) as opt:
        fused = tiny_call(pipe)
        assert opt.report["quant_producer_fusion"].matched == 12
    for key in ("videos", "audio"):
        comparison = bits_equal(unfused[key], fused[key])
        assert comparison, f"{key}: {comparison}"


@pytest.fixture(scope="module")
def two_blocks():
    return full_transformer(layers=2), full_inputs("544x960x124")


@torch.no_grad()
def test_two_blocks_of_real_geometry_give_the_unmodified_bits(two_blocks):
    transformer, inputs = two_blocks
    expected = transformer(**inputs)
    with h3opt.optimize(transformer, passes=EXACT) as opt:
        found = transformer(**inputs)
        assert opt.report["residual_fold"].matched == 2
    for reference, candidate in zip(expected, found, strict=True):
        comparison = bits_equal(reference, candidate)
        assert comparison, str(comparison)


@torch.no_grad()
def test_the_profiler_sees_each_kernel_as_often_as_the_report_says(two_blocks):
    transformer, inputs = two_blocks
    with h3opt.optimize(transformer, passes=["norm_modulate", "fused_swiglu", "residual_fold"]) as opt:
        transformer(**inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            transformer(**inputs)
            torch.cuda.synchronize()
        folded = opt.report["residual_fold"].matched
        ran = {event.key: event.count for event in profile.key_averages()}
        assert ran.get(kernel_names["residual_norm_modulate"]) == folded, ran
        assert ran.get(kernel_names["norm_modulate"]) == opt.report["norm_modulate"].matched - folded, ran
        assert ran.get(kernel_names["swiglu"]) == opt.report["fused_swiglu"].matched, ran
