"""Cases in which an earlier version gave another result than the unmodified code, or raised where it should decline."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from h3opt import optimize
from h3opt.errors import PipelineError
from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.tracing import trace
from h3opt.pass_api.examples import Draw
from h3opt.pass_api.registry import make_pass
from h3opt.pass_api.testing import Example, rewrite, semantic
from h3opt.pipeline.adaln_tables import Tables
from h3opt.reference import full_inputs, tiny_pipeline


@pytest.fixture(scope="module")
def transformer():
    return tiny_pipeline(dtype=torch.float32).transformer


@pytest.fixture
def inputs(transformer):
    return full_inputs("64x96x124", text_tokens=5, device="cpu", dtype=torch.float32, config=transformer.config)


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "module"), [("hoist_step_invariants", "context_embedder"), ("modulation_table", "time_embedder")]
)
def test_changed_weights_are_noticed_by_everything_computed_from_them(transformer, inputs, name, module):
    weight = next(getattr(transformer, module).parameters())
    with optimize(transformer, [name]):
        transformer(**inputs)
        weight.mul_(2)
        actual = transformer(**inputs)
    expected = transformer(**inputs)
    weight.mul_(0.5)
    assert same(expected, actual)


@torch.no_grad()
@pytest.mark.parametrize("name", ["hoist_step_invariants", "modulation_table"])
def test_nothing_computed_without_autocast_is_used_under_it(transformer, inputs, name):
    with torch.autocast("cpu", torch.bfloat16):
        expected = transformer(**inputs)
    with optimize(transformer, [name]):
        transformer(**inputs)
        with torch.autocast("cpu", torch.bfloat16):
            assert same(expected, transformer(**inputs))


def test_two_backward_passes_with_hoisting_on(transformer, inputs):
    with optimize(transformer, ["hoist_step_invariants"]):
        for _ in range(2):
            transformer(**inputs)[0].sum().backward()
    transformer.zero_grad()


@torch.no_grad()
def test_tables_are_made_once_for_each_timestep_value_and_again_when_a_value_changes(transformer, inputs, monkeypatch):
    made, compute = [], Tables.compute
    monkeypatch.setattr(Tables, "compute", lambda self, new: made.extend(new) or compute(self, new))
    timesteps = [inputs["timestep"], inputs["timestep"] * 0.5]
    expected = [transformer(**inputs | {"timestep": timestep}) for timestep in timesteps]
    with optimize(transformer, ["modulation_table"]):
        for _ in range(2):  # compared by value: a later loop passes new tensors
            for timestep, outputs in zip(timesteps, expected, strict=True):
                assert same(outputs, transformer(**inputs | {"timestep": timestep.clone()}))
        assert len(made) == 2
        written = timesteps[0].clone()
        transformer(**inputs | {"timestep": written})
        written.mul_(0.5)
        assert same(expected[1], transformer(**inputs | {"timestep": written})) and len(made) == 2


@torch.no_grad()
def test_tables_follow_an_adapter_in_the_embedder_and_take_timesteps_of_any_layout(transformer, inputs):
    strength, linear = {"adapter": 1.0}, transformer.time_embedder.linear_2
    hook = linear.register_forward_hook(lambda module, args, result: result * strength["adapter"])
    timesteps = [inputs["timestep"].repeat_interleave(2)[::2], inputs["timestep"].flatten()[:1].expand(4)]
    expected = {}
    for strength["adapter"] in (1.0, 0.5):
        expected[strength["adapter"]] = [transformer(**inputs | {"timestep": timestep}) for timestep in timesteps]
    with optimize(transformer, ["modulation_table"]):
        for strength["adapter"], outputs in expected.items():
            for timestep, output in zip(timesteps, outputs, strict=True):
                assert same(output, transformer(**inputs | {"timestep": timestep.view_as(timestep)}))
    hook.remove()


@torch.no_grad()
def test_a_copy_that_would_keep_one_steps_tables_is_refused(transformer):
    with optimize(transformer, ["modulation_table"]), pytest.raises(PipelineError, match="restore"):
        copy.deepcopy(transformer)


def from_the_end(x):
    return x.narrow(1, -2, 2) + 1


def under_autocast(x, w):
    plain = F.linear(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        return plain, F.linear(x, w)


def twice(x):
    return x + 1, x + 1


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(from_the_end, [(2, 5, 4)]), (under_autocast, [(3, 4), (5, 4)])],
    ids=["narrow", "autocast"],
)
def test_canonical_graphs_give_what_the_function_gives(function, shapes):
    args = [torch.randn(shape) for shape in shapes]
    module = canonicalize(trace(function, args))
    pairs = zip(tree_leaves(function(*args)), tree_leaves(module(*args)), strict=True)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_two_outputs_stay_two_tensors():
    first, second = canonicalize(trace(twice, [torch.randn(3)]))(torch.randn(3))
    assert first.data_ptr() != second.data_ptr()


def test_random_operators_keep_their_order_around_a_rewrite():
    draw = Draw(dtype=torch.float32)
    norm = make_pass("norm_modulate")
    example = norm.example(draw)

    def model(x, *rest):
        normed = example.function(x, *rest)
        return F.dropout(normed, 0.5, True), torch.rand_like(x)

    graph = semantic(Example(model, example.args))
    rewritten, outcome = rewrite(norm, graph)
    assert outcome.matched == 1
    torch.manual_seed(0)
    expected = graph(*example.args)
    torch.manual_seed(0)
    assert same(expected, rewritten(*example.args))


@pytest.mark.parametrize("shape", [(1, 7, 16), (7, 16), (16,)], ids=str)
def test_a_broadcast_addend_is_not_folded(shape):
    fold = make_pass("residual_fold")
    example = fold.example(Draw(batch=2))
    residual, _, *rest = example.args
    outcome = rewrite(fold, semantic(Example(example.function, (residual, torch.randn(shape), *rest))))[1]
    assert outcome.matched == 0


def test_an_expanded_input_is_probed_and_fused():
    norm = make_pass("norm_modulate")
    example = norm.example(Draw())
    x, *rest = example.args
    compiled = torch.compile(example.function, backend="h3opt", options={"passes": ["norm_modulate"]})
    with torch.no_grad():
        expanded = x.expand(3, *x.shape[1:])
        assert torch.equal(compiled(expanded, *rest), example.function(expanded, *rest))
