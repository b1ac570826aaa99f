"""On a GPU: a kernel whose sum is taken in another order is declined by the probe, and the output keeps its bits."""

from __future__ import annotations

import pytest
import torch

import h3opt
from h3opt.bench.kernel_inputs import differing, op_inputs
from h3opt.kernels import DEFINITIONS, ops
from h3opt.metrics.bits import bits_equal, relative_error
from h3opt.reference import full_inputs, full_transformer, tiny_call, tiny_pipeline

from .planted_order import reordered_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WHY = "elements different from the unfused operators on this device"


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_pipeline(dtype=torch.float32, device="cuda")  # an ulp of a small float32 norm shows; of bf16, rarely
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def planted(tmp_path, monkeypatch):
    from h3opt.kernels.triton_kernels import norm

    monkeypatch.setattr(norm, "norm_modulate", reordered_norm(tmp_path, monkeypatch).norm_modulate)


def test_the_planted_kernel_is_right_to_the_eye_and_wrong_to_the_bit(planted):
    args = op_inputs("norm_modulate", 64, 5376, device="cuda", dtype=torch.float32)
    expected, found = DEFINITIONS["norm_modulate"](*args), ops.norm_modulate(*args)
    assert differing(found, expected) > 0
    assert relative_error(expected, found) < 1e-6


def test_without_the_plant_the_pass_applies(pipe):
    with h3opt.optimize(pipe, passes=["norm_modulate"]) as opt:
        tiny_call(pipe)
        entry = opt.report["norm_modulate"]
    assert entry.declined is None and entry.matched == entry.expected > 0


def test_the_probe_declines_it_and_the_pipeline_gives_the_unmodified_bits(pipe, planted):
    expected = tiny_call(pipe)
    with h3opt.optimize(pipe, passes=["norm_modulate"]) as opt:
        found = tiny_call(pipe)
        entry = opt.report["norm_modulate"]
    assert entry.declined is not None and WHY in entry.declined, str(opt.report)
    assert entry.matched == 0 and entry.refused and entry.expected > 0
    for key in ("videos", "audio"):
        comparison = bits_equal(expected[key], found[key])
        assert comparison, f"{key}: {comparison}"


@torch.no_grad()
def test_at_real_geometry_in_bf16_the_probe_declines_it_too(planted):
    transformer, inputs = full_transformer(layers=2), full_inputs("544x960x124")
    expected = transformer(**inputs)
    with h3opt.optimize(transformer, passes=["norm_modulate"]) as opt:
        found = transformer(**inputs)
        entry = opt.report["norm_modulate"]
    assert entry.declined is not None and WHY in entry.declined, str(opt.report)
    for reference, candidate in zip(expected, found, strict=True):
        comparison = bits_equal(reference, candidate)
        assert comparison, str(comparison)
