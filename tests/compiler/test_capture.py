"""Captured and run again, a model gives the bits it gave; it is captured once per kind of block, and stays itself."""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import assert_same_media, build, installed
from torch.nn.functional import rms_norm

import h3opt
from h3opt.errors import H3OptError, PassOptionError, PipelineError, UnknownPassError
from h3opt.graph.tracing import retrace, trace
from h3opt.metrics.bits import bits_equal
from h3opt.pipeline.generation import GenerationSettings, generate

aten = torch.ops.aten
EXACT_GRAPH = ["norm_modulate", "fused_swiglu", "residual_fold"]


def block_arguments(
    transformer: Any, tokens: int, timesteps: int, batch: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """What the transformer hands to one of its blocks, for ``timesteps`` distinct timesteps (K)."""
    generator = torch.Generator().manual_seed(tokens + 100 * timesteps)
    hidden = transformer.config.hidden_size
    return {
        "hidden_states": torch.randn(batch, tokens, hidden, generator=generator).to(dtype),
        "temb": torch.randn(timesteps, transformer.config.time_embed_dim, generator=generator),
        "adaln_indices": torch.randint(0, 3 * timesteps, (tokens,), generator=generator),
        "rotary_emb": transformer.rope(torch.rand(tokens, 3, generator=generator) * 9),
    }


@contextmanager
def optimized(target: Any, passes: Any = (), **options: Any) -> Any:
    with torch.no_grad(), h3opt.optimize(target, list(passes), "cpu", **options) as opt:
        yield opt


# --- whole pipeline --------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("float32 pipeline")
def test_without_passes_every_bit_is_eager_diffusers_in_float32(pipe, unmodified):
    with optimized(pipe) as opt:
        assert_same_media(unmodified("float32"), generate(pipe, GenerationSettings()))
        captured = opt.report.captured
    assert set(captured) == {"transformer.block", "transformer.refiner", "vae.block"}
    assert all(1 <= count <= 2 for count in captured.values()), captured


@pytest.mark.xdist_group("bfloat16 pipeline")
def test_without_passes_every_bit_is_eager_diffusers_in_bfloat16(bf16_pipe, unmodified):
    with optimized(bf16_pipe) as opt:
        assert_same_media(unmodified("bfloat16"), generate(bf16_pipe, GenerationSettings()))
        captured = opt.report.captured
    assert all(1 <= count <= 2 for count in captured.values()), captured


@pytest.mark.xdist_group("bfloat16 pipeline")
def test_with_every_exact_pass_every_bit_is_eager_diffusers(bf16_pipe, unmodified):
    exact = [cls.name for cls in h3opt.list_passes() if str(cls.promise) == "exact"]
    with optimized(bf16_pipe, exact) as opt:
        assert_same_media(unmodified("bfloat16"), generate(bf16_pipe, GenerationSettings()))
        assert sum(entry.matched or 0 for entry in opt.report if entry.kind == "graph") > 0


OTHER_CLIPS = {
    "prompt of another length": GenerationSettings(prompt="A fox.", num_inference_steps=3),
    "more frames": GenerationSettings(num_frames=141, num_inference_steps=3),
    "another canvas": GenerationSettings(height=96, width=128, num_inference_steps=3),
}


@pytest.mark.xdist_group("float32 pipeline")
@pytest.mark.parametrize("passes", [[], None], ids=["no pass", "the profile's passes"])
def test_another_prompt_length_or_clip_or_canvas_captures_nothing_new(silent, passes):
    with h3opt.optimize(silent, passes, "cpu") as opt:
        generate(silent, GenerationSettings(num_inference_steps=3))
        first = opt.report.captured
        for what, clip in OTHER_CLIPS.items():
            generate(silent, clip)
            assert opt.report.captured == first, what
    assert all(1 <= count <= 2 for count in first.values()), first


@pytest.mark.xdist_group("float32 pipeline")
def test_a_clip_of_another_shape_has_the_unmodified_bits_from_the_same_graphs(silent):
    clip = GenerationSettings(prompt="A fox.", num_frames=141, height=96, width=128, num_inference_steps=3)
    reference = generate(silent, clip)
    with optimized(silent, EXACT_GRAPH):
        generate(silent, GenerationSettings(num_inference_steps=3))
        assert_same_media(reference, generate(silent, clip))


@pytest.mark.xdist_group("float32 pipeline")
def test_one_generation_has_steps_with_one_and_with_two_timesteps(silent):
    seen: list[int] = []
    handle = silent.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["timestep"])), with_kwargs=True
    )
    generate(silent, GenerationSettings())
    handle.remove()
    assert {1, 2} <= set(seen), "the tests of a whole pipeline cover both"


@pytest.mark.xdist_group("float32 pipeline")
def test_scope_model_captures_the_transformer_whole_and_folds_across_block_borders(pipe, unmodified):
    layers = len(pipe.transformer.transformer_blocks)
    with optimized(pipe, ["norm_modulate", "residual_fold"], scope="model") as opt:
        assert_same_media(unmodified("float32"), generate(pipe, GenerationSettings()))
        report = opt.report
    assert set(report.captured) == {"transformer", "vae.block"}
    assert report.captured["transformer"] <= 2
    assert (report["residual_fold"].matched, report["residual_fold"].expected) == (2 * layers - 1,) * 2
    assert (report["norm_modulate"].matched, report["norm_modulate"].expected) == (2 * layers + 1,) * 2


# --- single blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [[], EXACT_GRAPH], ids=["no pass", "exact passes"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_keeps_its_bits_for_any_number_of_timesteps_tokens_and_batch_items(shared, dtype, passes):
    transformer = shared.pipe(dtype).transformer
    block = transformer.transformer_blocks[0]
    calls = [
        block_arguments(transformer, tokens, timesteps, batch, getattr(torch, dtype))
        for tokens, timesteps, batch in [(9, 1, 1), (9, 2, 1), (23, 3, 1), (64, 4, 1), (23, 2, 2), (1, 1, 1)]
    ]
    with torch.no_grad():
        expected = [block(**call) for call in calls]
    with optimized(transformer, passes):
        found = [block(**call) for call in calls]
    for number, (reference, candidate) in enumerate(zip(expected, found, strict=True)):
        assert bits_equal(reference, candidate), f"call {number}"


def test_blocks_of_a_kind_share_their_graphs(pipe):
    transformer = pipe.transformer
    call = block_arguments(transformer, 9, 2)
    with optimized(transformer) as opt:
        for block in transformer.transformer_blocks:
            block(**call)
        assert opt.report.captured["transformer.block"] == 1


def test_positional_arguments_are_captured_as_named_ones_are(pipe):
    transformer = pipe.transformer
    block = transformer.transformer_blocks[1]
    calls = [block_arguments(transformer, tokens, 2) for tokens in (9, 31, 77)]
    with torch.no_grad():
        expected = [block(**call) for call in calls]
    with optimized(transformer) as opt:
        for call, reference in zip(calls, expected, strict=True):
            assert bits_equal(reference, block(*call.values()))
        assert opt.report.captured["transformer.block"] == 1


def test_an_optimized_module_keeps_type_signature_and_state(pipe):
    transformer = pipe.transformer
    block = transformer.transformer_blocks[0]
    before = (type(block), inspect.signature(block.forward), list(transformer.state_dict()), repr(block))
    with optimized(transformer):
        block(**block_arguments(transformer, 9, 1))
        after = (type(block), inspect.signature(block.forward), list(transformer.state_dict()), repr(block))
    assert before == after


def test_a_copy_of_an_optimized_module_is_not_optimized(pipe):
    transformer = pipe.transformer
    call = block_arguments(transformer, 9, 1)
    with optimized(transformer, EXACT_GRAPH) as opt:
        expected = transformer.transformer_blocks[0](**call)
        twin = copy.deepcopy(transformer)
        assert all(module._compiled_call_impl is None for module in twin.modules())
        runs = [one.calls for region in opt._session._regions for one in region.captured]
        assert bits_equal(expected, twin.transformer_blocks[0](**call))
        assert [one.calls for region in opt._session._regions for one in region.captured] == runs


def test_hooks_of_a_captured_block_still_run(pipe):
    transformer = pipe.transformer
    block = transformer.transformer_blocks[0]
    call = block_arguments(transformer, 9, 1)
    handle = block.register_forward_hook(lambda module, args, output: output * 2)
    try:
        with torch.no_grad():
            expected = block(**call)
        with optimized(transformer):
            assert bits_equal(expected, block(**call))
    finally:
        handle.remove()


def test_a_graph_break_is_an_error(pipe):
    transformer = build().transformer
    block = transformer.transformer_blocks[0]
    forward = type(block).forward

    def breaks(*args: Any, **kwargs: Any) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(block, *args, **kwargs)

    block.forward = breaks
    call = block_arguments(transformer, 9, 1)
    said = "transformer.block cannot be captured as one graph: .*graph_break"
    with optimized(transformer) as opt:
        with pytest.raises(PipelineError, match=said) as error:
            block(**call)
        assert any("has been restored" in note for note in error.value.__notes__) and not installed(opt)


def test_the_callers_own_compiled_module_is_found_again_afterwards(pipe):
    block = pipe.transformer.transformer_blocks[0]
    mine = lambda *args, **kwargs: "mine"  # noqa: E731
    block._compiled_call_impl = mine
    try:
        with optimized(pipe.transformer):
            assert block._compiled_call_impl is not mine
        assert block._compiled_call_impl is mine
    finally:
        block._compiled_call_impl = None


# --- the semantic graph ----------------------------------------------------------------------------------------


def test_the_semantic_graph_has_the_operators_the_model_was_written_in(pipe):
    transformer = pipe.transformer
    with optimized(transformer) as opt:
        transformer.transformer_blocks[0](**block_arguments(transformer, 9, 2))
        (region,) = [one for one in opt._session._regions if one.name == "transformer.block"]
        targets = [node.target for node in region.captured[0].graph.graph.nodes]
    assert targets.count(aten.linear.default) == 7
    assert targets.count(aten.rms_norm.default) == 4
    assert targets.count(aten.scaled_dot_product_attention.default) == 1
    assert targets.count(aten.silu.default) == 2
    assert targets.count(aten.index_select.default) == 6


def test_a_graph_without_a_tensor_input_is_refused():
    graph = torch.fx.symbolic_trace(lambda: torch.ones(2))
    with pytest.raises(PipelineError, match="no tensor input"):
        retrace(graph)


def test_tracing_gives_fake_values_and_no_gradient_nodes():
    graph = trace(lambda x, weight: x * weight, (torch.ones(3, 4), torch.nn.Parameter(torch.ones(4))))
    (product,) = [node for node in graph.graph.nodes if node.target is aten.mul.Tensor]
    assert tuple(product.meta["val"].shape) == (3, 4) and not product.meta["val"].requires_grad


# --- torch.compile(backend="h3opt") ----------------------------------------------------------------------------


class Modulated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(16, generator=generator))
        self.scale = torch.nn.Parameter(torch.randn(3, 16, generator=generator))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(x, (16,), self.weight, 1e-5)
        return normed * (1.0 + self.scale.index_select(0, index)) + self.scale.index_select(0, index)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_backend_is_found_by_name_through_its_entry_point(fresh_dynamo):
    assert "h3opt" in torch._dynamo.list_backends(exclude_tags=())


def test_the_backend_runs_the_named_passes(fresh_dynamo, monkeypatch):
    model, x, index = Modulated(), torch.randn(2, 5, 16), torch.tensor([0, 2, 1, 1, 0])
    seen: list[Any] = []
    from h3opt.compiler import session

    direct = session.EXECUTORS["direct"]
    monkeypatch.setitem(session.EXECUTORS, "direct", lambda graph, inputs: seen.append(graph) or direct(graph, inputs))
    compiled = torch.compile(model, backend="h3opt", options={"passes": ["norm_modulate"]}, fullgraph=True)
    with torch.no_grad():
        assert bits_equal(model(x, index), compiled(x, index))
    (graph,) = seen
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "h3opt.norm_modulate_v1.default" in targets and "aten.rms_norm.default" not in targets


def test_the_backend_without_options_changes_nothing(fresh_dynamo):
    model, x, index = Modulated(), torch.randn(2, 5, 16), torch.tensor([0, 2, 1, 1, 0])
    with torch.no_grad():
        assert bits_equal(model(x, index), torch.compile(model, backend="h3opt")(x, index))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"passes": ["norm_modulat"]}, UnknownPassError, "did you mean 'norm_modulate'"),
        ({"passes": ["fp8_linear"]}, PassOptionError, "h3opt.optimize"),
        ({"executor": "indutcor"}, PassOptionError, "did you mean 'inductor'"),
    ],
)
def test_the_backend_says_what_is_wrong_with_its_options(fresh_dynamo, options, error, message):
    model, x, index = Modulated(), torch.randn(2, 5, 16), torch.tensor([0, 2, 1, 1, 0])
    compiled = torch.compile(model, backend="h3opt", options=options)
    with torch.no_grad(), pytest.raises(Exception, match=message) as caught:
        compiled(x, index)
    raised = caught.value
    assert isinstance(getattr(raised, "inner_exception", raised), error)
    assert issubclass(error, H3OptError)


# --- the other executor ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inductor_runs_the_rewritten_blocks_within_rounding(pipe):
    transformer = pipe.transformer
    call = block_arguments(transformer, 23, 2)

    def stack(hidden: torch.Tensor) -> torch.Tensor:
        for block in transformer.transformer_blocks:
            hidden = block(**{**call, "hidden_states": hidden})
        return hidden

    with torch.no_grad():
        expected = stack(call["hidden_states"])
    with optimized(transformer, EXACT_GRAPH, executor="inductor") as opt:
        found = stack(call["hidden_states"])
        report = opt.report
    assert report.executor == "inductor" and report.captured["transformer.block"] == 1
    assert report["norm_modulate"].matched == report["norm_modulate"].expected == 8
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inductor_compiles_a_small_module(fresh_dynamo):
    model, x, index = Modulated(), torch.randn(2, 5, 16), torch.tensor([0, 2, 1, 1, 0])
    options = {"passes": ["norm_modulate"], "executor": "inductor"}
    with torch.no_grad():
        compiled = torch.compile(model, backend="h3opt", options=options)
        torch.testing.assert_close(compiled(x, index), model(x, index))
