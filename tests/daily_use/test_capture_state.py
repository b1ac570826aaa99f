"""What a script adds to a pipeline between calls (hooks, adapters, attention backends) is honoured or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import attention_backend
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as AttentionBackends
from torch.nn.attention import SDPBackend, sdpa_kernel

import h3opt
from h3opt.compiler import capture
from h3opt.compiler.structure import structure_of
from h3opt.errors import PipelineError
from h3opt.metrics.bits import bits_equal
from h3opt.pipeline.generation import GenerationSettings
from h3opt.pipeline.view import PipelineView
from h3opt.reference import trained_pipeline

pytestmark = pytest.mark.xdist_group("daily use, capture")


@pytest.fixture(autouse=True)
def _same_attention_backend_afterwards():
    """``set_attention_backend`` of a model also sets diffusers' backend of the whole process, and keeps it set."""
    before = AttentionBackends._active_backend
    yield
    AttentionBackends._active_backend = before


@pytest.fixture(scope="module")
def trained() -> Any:
    """A trained pipeline for all tests of this file, which leave it as it was."""
    pipe = trained_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_blocks(transformer: Any, count: int | None = None) -> torch.Tensor:
    """Run the blocks of a transformer one after another, on random data."""
    generator = torch.Generator().manual_seed(0)
    tokens, config = 9, transformer.config
    hidden = torch.randn(1, tokens, config.hidden_size, generator=generator)
    temb = torch.randn(2, config.time_embed_dim, generator=generator)
    indices = torch.randint(0, 6, (tokens,), generator=generator)
    rotary = transformer.rope(torch.rand(tokens, 3, generator=generator) * 9)
    with torch.no_grad():
        for block in transformer.transformer_blocks[:count]:
            hidden = block(hidden_states=hidden, temb=temb, adaln_indices=indices, rotary_emb=rotary)
    return hidden


@contextmanager
def uncaptured(transformer: Any) -> Iterator[None]:
    """Run the blocks of an optimized transformer as diffusers does."""
    calls = [block._compiled_call_impl for block in transformer.transformer_blocks]
    for block in transformer.transformer_blocks:
        block._compiled_call_impl = None
    yield
    for block, call in zip(transformer.transformer_blocks, calls, strict=True):
        block._compiled_call_impl = call


def assert_as_unmodified(transformer: Any, message: str = "") -> None:
    with uncaptured(transformer):
        expected = run_blocks(transformer)
    assert bits_equal(expected, run_blocks(transformer)), message


# --- hooks -----------------------------------------------------------------------------------------------------


def test_a_hook_inside_a_block_runs_in_this_block_alone_and_can_be_taken_off(trained):
    transformer = trained.transformer
    without = run_blocks(transformer)
    with h3opt.optimize(trained, passes=[]) as opt:
        assert bits_equal(without, run_blocks(transformer))
        handle = transformer.transformer_blocks[3].attn.register_forward_hook(lambda module, args, out: out * 1.25)
        assert_as_unmodified(transformer)
        assert not bits_equal(without, run_blocks(transformer))
        assert opt.report.captured["transformer.block"] == 2
        handle.remove()
        assert bits_equal(without, run_blocks(transformer))
        assert opt.report.captured["transformer.block"] == 2, "the graph without the hook was captured before"


def test_a_patched_forward_and_a_hook_before_a_layer_are_seen(trained):
    transformer = trained.transformer
    first, second = transformer.transformer_blocks[:2]
    handle = first.ff.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    layer = second.attn.to_v
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 1
    try:
        with h3opt.optimize(trained, passes=[]):
            assert_as_unmodified(transformer)
    finally:
        handle.remove()
        del layer.forward


@pytest.mark.parametrize("kind", ["appends to a list", "cannot be traced"])
def test_a_hook_that_cannot_be_captured_is_refused_and_the_pipeline_restored(trained, kind, caplog):
    transformer = trained.transformer
    shapes: list[Any] = []

    def append(module: Any, args: Any, out: torch.Tensor) -> None:
        shapes.append(out.shape)

    def print_sum(module: Any, args: Any, out: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        shapes.append(float(out.sum()))

    handle = transformer.transformer_blocks[0].register_forward_hook(append if kind.startswith("app") else print_sum)
    try:
        opt = h3opt.optimize(trained, passes=[])
        said = "changes with every call" if kind.startswith("app") else "cannot be captured as one graph"
        with pytest.raises(PipelineError, match=f"transformer.block .*{said}.*Take off .*hooks") as error:
            for _ in range(12):
                run_blocks(transformer, 1)
        assert any("has been restored" in note for note in error.value.__notes__)
        assert not opt._session.installed
        count = len(shapes)
        run_blocks(transformer, 1)
        assert len(shapes) == count + 1, "the pipeline is usable, and the hook runs"
    finally:
        handle.remove()


def test_hooks_that_are_new_in_every_call_are_refused_after_a_while(trained, monkeypatch):
    transformer = trained.transformer
    monkeypatch.setattr(capture, "MAX_STRUCTURES", 2 - len(transformer.transformer_blocks))
    h3opt.optimize(trained, passes=[])
    with pytest.raises(PipelineError, match="new hooks or adapters for every call"):
        for number in range(4):
            handle = transformer.transformer_blocks[0].register_forward_hook(
                lambda module, args, out, n=number: out * n
            )
            try:
                run_blocks(transformer, 1)
            finally:
                handle.remove()
    run_blocks(transformer, 1)


def test_a_structure_is_that_of_equal_modules_and_of_no_other(trained):
    blocks = trained.transformer.transformer_blocks
    assert structure_of(blocks[0]) == structure_of(blocks[1])
    assert structure_of(blocks[0]) != structure_of(trained.transformer.token_refiner.refiner_blocks[0])
    handle = blocks[1].attn.to_out[0].register_forward_hook(print)
    try:
        assert structure_of(blocks[0]) != structure_of(blocks[1])
    finally:
        handle.remove()
    assert structure_of(blocks[0]) == structure_of(blocks[1])


# --- attention backends ----------------------------------------------------------------------------------------


def test_a_chosen_attention_backend_is_kept_and_passes_leave_it_alone(trained):
    transformer = trained.transformer
    default = run_blocks(transformer)
    transformer.set_attention_backend("_native_math")
    try:
        chosen = run_blocks(transformer)
        assert not bits_equal(default, chosen), "else the test shows nothing"
        with h3opt.optimize(trained, passes=["fp8_attention", "norm_modulate"]) as opt:
            assert bits_equal(chosen, run_blocks(transformer))
            report = opt.report
            transformer.reset_attention_backend()
            assert not bits_equal(default, run_blocks(transformer)), "the pass is on where nothing is chosen"
        assert "restricted to MATH" in report["fp8_attention"].declined
        assert "set_attention_backend()" in report["fp8_attention"].declined
        assert report["norm_modulate"].matched == report["norm_modulate"].expected > 0
    finally:
        transformer.reset_attention_backend()


def test_a_backend_chosen_around_the_call_is_kept(trained):
    transformer = trained.transformer
    default = run_blocks(transformer)
    with attention_backend("_native_math"):
        chosen = run_blocks(transformer)
    with h3opt.optimize(trained, passes=[]):
        assert bits_equal(default, run_blocks(transformer))
        with attention_backend("_native_math"):
            assert bits_equal(chosen, run_blocks(transformer))
        with sdpa_kernel(SDPBackend.MATH):  # not in the graph: attention asks for the backend when it runs
            assert bits_equal(chosen, run_blocks(transformer))
        assert bits_equal(default, run_blocks(transformer))


# --- adapters --------------------------------------------------------------------------------------------------


def lora(transformer: Any, part: str, rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA with random weights for all linear layers with ``part`` in their path."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and part in name:
            weights[f"transformer.{name}.lora_A.weight"] = (
                torch.randn(rank, module.in_features, generator=generator) / 8
            )
            weights[f"transformer.{name}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator)
    return weights


@pytest.fixture
def with_adapters(trained) -> Iterator[Any]:
    """The trained pipeline with adapters ``a`` (on) and ``b`` (off) on attention."""
    pytest.importorskip("peft")
    weights = lora(trained.transformer, "transformer_blocks.0.attn.to_") | lora(trained.transformer, "s.1.attn.to_")
    trained.load_lora_weights(weights, adapter_name="a")
    trained.load_lora_weights({key: 2 * value for key, value in weights.items()}, adapter_name="b")
    trained.set_adapters("a")
    yield trained
    trained.unload_lora_weights()


def test_adapters_are_switched_and_a_change_of_strength_captures_nothing(with_adapters):
    pipe = with_adapters
    transformer = pipe.transformer
    base = 1  # the blocks without an adapter have a graph too
    changes: list[tuple[str, Callable[[], Any], int]] = [
        ("one adapter", lambda: None, 1),
        ("another strength", lambda: pipe.set_adapters("a", 0.25), 1),
        ("off by strength", lambda: pipe.set_adapters("a", 0.0), 1),
        ("negative", lambda: pipe.set_adapters("a", -1.0), 1),
        ("another adapter", lambda: pipe.set_adapters("b"), 2),
        ("both", lambda: pipe.set_adapters(["a", "b"], [0.7, 0.3]), 3),
        ("both, other strengths", lambda: pipe.set_adapters(["a", "b"], [0.2, 0.9]), 3),
        ("disabled", pipe.disable_lora, 4),
        ("enabled", pipe.enable_lora, 4),
        ("fused", pipe.fuse_lora, 5),
        ("not fused", pipe.unfuse_lora, 5),
        ("unloaded", pipe.unload_lora_weights, 5),
    ]
    outputs = {}
    with h3opt.optimize(pipe, passes=["fused_swiglu"]) as opt:
        for what, change, graphs in changes:
            change()
            assert_as_unmodified(transformer, what)
            outputs[what] = run_blocks(transformer)
            assert opt.report.captured["transformer.block"] == base + graphs, what
        assert opt.report["fused_swiglu"].matched == opt.report["fused_swiglu"].expected
    assert not bits_equal(outputs["one adapter"], outputs["another strength"])
    assert not bits_equal(outputs["one adapter"], outputs["disabled"])


def test_layers_may_have_strengths_of_their_own(with_adapters):
    transformer = with_adapters.transformer
    with h3opt.optimize(with_adapters, passes=[]) as opt:
        run_blocks(transformer)
        attention = transformer.transformer_blocks[0].attn
        for layer, strength in zip((attention.to_q, attention.to_k, attention.to_v), (0.1, 0.5, 2.0), strict=True):
            layer.scaling["a"] = strength
        assert_as_unmodified(transformer)
        assert opt.report.captured["transformer.block"] == 2


# --- components ------------------------------------------------------------------------------------------------


@pytest.fixture
def with_two(trained) -> Iterator[Any]:
    """The trained pipeline with the denoiser for references, which has other weights."""
    other = trained_pipeline().transformer
    with torch.no_grad():
        other.transformer_blocks[0].attn.to_v.weight.mul_(1.25)
    trained.update_components(transformer_ref=other)
    yield trained
    trained.update_components(transformer_ref=None)


def test_both_transformers_of_a_pipeline_are_optimized(with_two):
    pipe = with_two
    blocks = len(pipe.transformer.transformer_blocks)
    unmodified = [run_blocks(model) for model in (pipe.transformer, pipe.transformer_ref)]
    view = PipelineView.of(pipe)
    assert view.transformer is pipe.transformer and view.transformer_ref is pipe.transformer_ref
    with h3opt.optimize(pipe, passes=["fp8_linear", "fused_swiglu"]) as opt:
        assert opt.report["fp8_linear"].matched == opt.report["fp8_linear"].expected
        assert opt.report["fused_swiglu"].state == "waiting"
        quantized = [run_blocks(model) for model in (pipe.transformer, pipe.transformer_ref)]
        report = opt.report
    assert report["fused_swiglu"].state == "on"
    assert report["fused_swiglu"].matched == report["fused_swiglu"].expected == 2 * blocks
    assert report.captured["transformer.block"] == report.captured["transformer_ref.block"] == 1
    for before, after, model in zip(unmodified, quantized, (pipe.transformer, pipe.transformer_ref), strict=True):
        assert not bits_equal(before, after) and bits_equal(before, run_blocks(model))


def test_a_pipeline_that_runs_with_references_alone_has_one_transformer(trained):
    transformer = trained.transformer
    trained.update_components(transformer=None, transformer_ref=transformer)
    try:
        view = PipelineView.of(trained)
        assert view.transformer is transformer and view.transformer_ref is None
    finally:
        trained.update_components(transformer_ref=None, transformer=transformer)


def test_components_that_cannot_be_told_apart_are_named(trained):
    class Pipe:
        components = {"vae": trained.vae, "other_vae": trained_pipeline().vae}  # noqa: RUF012

    with pytest.raises(PipelineError, match="several components that can be the vae: vae, other_vae"):
        h3opt.optimize(Pipe(), passes=[])


def test_weights_that_are_offloaded_are_said_to_stand_in_the_way():
    accelerate = pytest.importorskip("accelerate")
    pipe = trained_pipeline()
    accelerate.cpu_offload(pipe.transformer)
    with pytest.raises(PipelineError, match=r"meta device.*cpu_offload.*remove_hook_from_module"):
        h3opt.optimize(pipe, passes=[])
    accelerate.hooks.remove_hook_from_module(pipe.transformer, recurse=True)
    with h3opt.optimize(pipe, passes=[]):
        run_blocks(pipe.transformer, 1)


# --- passes that did nothing -----------------------------------------------------------------------------------


def test_a_pass_without_a_site_is_idle_and_not_on(trained):
    with h3opt.optimize(trained.transformer, passes=["vae_fused_qkv", "fused_swiglu"]) as opt:
        assert opt.report["vae_fused_qkv"].state == "waiting"
        run_blocks(trained.transformer)
        report = opt.report
    assert report["vae_fused_qkv"].state == "idle" and "transformer.block" in report["vae_fused_qkv"].idle
    assert report["fused_swiglu"].state == "on" and report["fused_swiglu"].idle is None
    assert "idle" in str(report)


def test_a_verdict_over_a_pass_that_changed_nothing_does_not_hold(silent):
    clip = GenerationSettings(num_inference_steps=2)
    verdict = h3opt.verify(silent, passes=["output_quantize"], profile="cpu", settings=clip)  # there is no FP8 to write
    (entry,) = verdict.passes
    assert entry.held is False and not verdict.held and verdict.broken == ["output_quantize"]
    assert entry.counts == "0/0" and entry.measured.startswith("idle: no site in ")
    assert verdict.to_dict()["passes"][0]["idle"] == entry.idle
