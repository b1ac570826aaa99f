"""What every registered pass has to show, whichever it is: a new pass is under all of this without a line of test."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from conftest import build, differing, fingerprint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from h3opt.compiler.optimize import prepare
from h3opt.compiler.session import Session
from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.matcher import parameters, traced
from h3opt.graph.nodes import value
from h3opt.graph.tracing import trace
from h3opt.kernels.data_kinds import KINDS
from h3opt.metrics.bits import bits_equal
from h3opt.pass_api.base import GraphFacts, GraphPass, Pass
from h3opt.pass_api.examples import Draw
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.promises import Exact, Perceptual, Rounding
from h3opt.pass_api.registry import list_passes, make_pass
from h3opt.pass_api.testing import (
    broken_promise,
    check_pass,
    fires_again,
    mutant_survives,
    rewrite,
    rewrites_decline,
    semantic,
)
from h3opt.pipeline.generation import GenerationSettings, Media, generate
from h3opt.pipeline.hooks import wrap_calls
from h3opt.verification.difference import Difference
from h3opt.verification.noise_floors import UlpPerturbation
from h3opt.verification.verify import holds

aten = torch.ops.aten

EVERY = [cls.name for cls in list_passes()]
GRAPH = [cls.name for cls in list_passes() if issubclass(cls, GraphPass)]
MODULE = [cls.name for cls in list_passes() if not issubclass(cls, GraphPass)]


def mutants_of(names: list[str]) -> list[Any]:
    return [
        pytest.param(name, number, id=f"{name}-{mutant.why}".replace(" ", "_"))
        for name in names
        for number, mutant in enumerate(make_pass(name).mutants())
    ]


def declines_of(names: list[str]) -> list[Any]:
    return [
        pytest.param(name, number, id=f"{name}-{decline.why}".replace(" ", "_"))
        for name in names
        for number, decline in enumerate(make_pass(name).declines())  # type: ignore[attr-defined]
    ]


# --- what is declared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_it_is_made_without_options_and_says_what_it_is(name: str) -> None:
    one = make_pass(name)
    assert isinstance(one, Pass) and one.name == name
    assert type(one).summary()
    json.dumps(one.options(), default=list)
    assert make_pass(name, one.options()) == one


@pytest.mark.parametrize("name", EVERY)
def test_it_names_only_passes_that_exist(name: str) -> None:
    cls = type(make_pass(name))
    assert set(cls.after) | set(cls.conflicts) <= set(EVERY)
    assert name not in cls.after
    assert set(cls.builds_on) <= set(cls.after)


@pytest.mark.parametrize("name", EVERY)
def test_it_has_a_mutant_with_its_own_name_and_promise(name: str) -> None:
    one = make_pass(name)
    mutants = one.mutants()
    assert mutants, "nothing shows that the tests of this pass can fail"
    for mutant in mutants:
        assert mutant.why
        assert (mutant.instance.name, mutant.instance.promise) == (one.name, one.promise)
        assert mutant.instance != one


def test_all_passes_together_can_be_put_in_order() -> None:
    assert {one.name for one in in_order(make_pass(name) for name in EVERY)} == set(EVERY)


# --- graph passes ----------------------------------------------------------------------------------------------

draws = st.builds(
    Draw,
    batch=st.sampled_from([1, 2]),
    tokens=st.sampled_from([1, 2, 3, 7, 16]),
    rows=st.sampled_from([1, 3, 6]),
    channels=st.sampled_from([2, 6, 16, 20, 130]),
    heads=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 16, 24]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(KINDS),
    magnitude=st.sampled_from([1e-4, 1.0, 30.0, 1e4]),
    special=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 1000),
)
FIXED = [
    Draw(),
    Draw(dtype=torch.bfloat16, tokens=5, channels=20, magnitude=100.0),
    Draw(dtype=torch.float16, batch=2, strided=True, seed=1),
    Draw(special=True, seed=2),
    Draw(tokens=1, seed=3),
    Draw(kind="offset_2", seed=4),
    Draw(kind="outlier_channels", dtype=torch.bfloat16, seed=5),
    Draw(kind="nan_row", seed=6),
]


@pytest.mark.parametrize("name", GRAPH)
def test_it_passes_the_checks_third_parties_run(name: str) -> None:
    check_pass(make_pass(name))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRAPH)
@settings(max_examples=40)
@given(draw=draws)
def test_it_fires_once_and_keeps_its_promise_on_whatever_is_drawn(name: str, draw: Draw) -> None:
    assert broken_promise(make_pass(name), draw) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRAPH)
@settings(max_examples=10)
@given(draw=draws)
def test_it_finds_nothing_in_what_it_made(name: str, draw: Draw) -> None:
    assert not fires_again(make_pass(name), draw)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRAPH)
def test_it_has_something_it_leaves_alone(name: str) -> None:
    assert make_pass(name).declines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "number"), declines_of(GRAPH))
@settings(max_examples=10)
@given(draw=draws)
def test_it_leaves_alone_what_differs_in_one_condition(name: str, number: int, draw: Draw) -> None:
    one = make_pass(name)
    assert isinstance(one, GraphPass)
    assert rewrite(one, semantic(one.example(draw)))[1].matched == 1, "the supported case fires with the same draw"
    assert not rewrites_decline(one, one.declines()[number], draw)


@pytest.mark.parametrize(("name", "number"), declines_of(GRAPH))
def test_it_says_why_it_left_something_alone(name: str, number: int) -> None:
    one = make_pass(name)
    assert isinstance(one, GraphPass)
    _, outcome = rewrite(one, semantic(one.declines()[number].build(Draw())))
    assert outcome.near_misses and outcome.near_misses[0].why


@pytest.mark.parametrize(("name", "number"), mutants_of(GRAPH))
def test_a_mutant_does_not_survive(name: str, number: int) -> None:
    mutant = make_pass(name).mutants()[number]
    assert not mutant_survives(mutant.instance, FIXED), f"the mutant lives: {mutant.why}"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRAPH)
def test_it_expects_nothing_of_a_graph_it_knows_nothing_about(name: str) -> None:
    assert make_pass(name).expect(GraphFacts()) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", GRAPH)
def test_its_patterns_and_replacements_take_the_same_parameters(name: str) -> None:
    for rule in make_pass(name).rules():  # type: ignore[attr-defined]
        names = parameters(rule)
        assert [str(node.target) for node in traced(rule.pattern).placeholders] == names
        assert {str(node.target) for node in traced(rule.replacement).placeholders} <= set(names)
        assert set(rule.index_into) | set(rule.index_into.values()) <= set(names)


# --- other spellings of the same example -----------------------------------------------------------------------


def operands_exchanged(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.target in (aten.add.Tensor, aten.mul.Tensor) and all(value(one) is not None for one in node.args):
            node.args = node.args[::-1]


def arguments_by_name(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            names = [argument.name for argument in schema.arguments]
            node.kwargs = {**dict(zip(names[1:], node.args[1:], strict=False)), **node.kwargs}
            node.args = node.args[:1]


def after_every_float(insert: Callable[[GraphModule, Node], Node]) -> Callable[[GraphModule], None]:
    def transform(graph: GraphModule) -> None:
        for node in list(graph.graph.nodes):
            tensor = value(node)
            if tensor is None or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                continue
            with graph.graph.inserting_after(node):
                made = insert(graph, node)
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)

    return transform


@after_every_float
def dropout_in_the_way(graph: GraphModule, node: Node) -> Node:
    return graph.graph.call_function(aten.dropout.default, (node, 0.0, False))


@after_every_float
def cast_to_the_same_dtype(graph: GraphModule, node: Node) -> Node:
    return graph.graph.call_function(aten.to.dtype, (node, node.meta["val"].dtype))


@after_every_float
def type_as_itself(graph: GraphModule, node: Node) -> Node:
    return graph.graph.call_function(aten.type_as.default, (node, node))


@after_every_float
def viewed_as_it_is(graph: GraphModule, node: Node) -> Node:
    return graph.graph.call_function(aten.view.default, (node, list(node.meta["val"].shape)))


def parts_as(spelling: str) -> Callable[[GraphModule], None]:
    """``chunk``'s parts, taken another way."""

    def transform(graph: GraphModule) -> None:
        for node in list(graph.graph.nodes):
            if node.target is not aten.chunk.default:
                continue
            source, dim = node.args[0], node.args[2] if len(node.args) > 2 else 0
            size = node.meta["val"][0].shape[dim]
            if spelling == "split":
                node.target, node.args = aten.split.Tensor, (source, size, dim)
            elif spelling == "split_with_sizes":
                sizes = [part.shape[dim] for part in node.meta["val"]]
                node.target, node.args = aten.split_with_sizes.default, (source, sizes, dim)
            else:
                for user in list(node.users):
                    start = user.args[1] * size
                    if spelling == "narrow":
                        user.target, user.args = aten.narrow.default, (source, dim, start, size)
                    else:
                        last = user.args[1] == node.args[1] - 1
                        end = torch.iinfo(torch.int64).max if last else start + size
                        user.target, user.args = aten.slice.Tensor, (source, dim, start, end)
                graph.graph.erase_node(node)

    return transform


def as_traced(graph: GraphModule) -> None:
    """The spelling of the example itself."""


SPELLINGS: dict[str, Callable[[GraphModule], None]] = {
    "as_traced": as_traced,
    "operands_exchanged": operands_exchanged,
    "arguments_by_name": arguments_by_name,
    "dropout_in_the_way": dropout_in_the_way,
    "cast_to_the_same_dtype": cast_to_the_same_dtype,
    "type_as_itself": type_as_itself,
    "viewed_as_it_is": viewed_as_it_is,
    "split_for_chunk": parts_as("split"),
    "split_with_sizes_for_chunk": parts_as("split_with_sizes"),
    "narrow_for_chunk": parts_as("narrow"),
    "slices_for_chunk": parts_as("slices"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", GRAPH)
def test_it_fires_on_every_spelling_of_its_example(name: str, spelling: str, dtype: torch.dtype) -> None:
    one = make_pass(name)
    assert isinstance(one, GraphPass)
    example = one.example(Draw(dtype=dtype))
    graph = trace(example.function, example.args)
    SPELLINGS[spelling](graph)
    graph.graph.lint()
    graph.recompile()
    before = tensors(graph(*example.args))
    rewritten, outcome = rewrite(one, canonicalize(graph))
    assert outcome.matched == 1, [str(miss) for miss in outcome.near_misses]
    if isinstance(one.promise, Exact):
        after = tensors(rewritten(*example.args))
        assert all(bits_equal(left, right) for left, right in zip(before, after, strict=True))


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [one for item in result for one in tensors(item)]


def test_the_spellings_do_change_the_graph() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return (first * second) + first

    def spelled(transform: Callable[[GraphModule], None]) -> str:
        graph = trace(model, (torch.ones(3, 4),))
        transform(graph)
        return str([(node.target, node.args, node.kwargs) for node in graph.graph.nodes])

    texts = [spelled(transform) for transform in SPELLINGS.values()]
    assert len(set(texts)) == len(texts)
    assert operator.getitem.__name__ in texts[0]


# --- format and schedule passes on the tiny pipeline -----------------------------------------------------------

# Prompts of one length: a mutant must be told from the pass by what it generates, not by an index error.
CLIPS = (
    GenerationSettings(prompt="A red fox runs through snow.", num_inference_steps=3),
    GenerationSettings(prompt="Rain on a tin roof at night.", num_inference_steps=3, seed=1),
)


class Stage:
    """A pipeline on which passes are exchanged, so that most of them share captured graphs."""

    def __init__(self) -> None:
        self.pipe = build()
        self.before = fingerprint(self.pipe)
        self.unmodified = self.generate()
        self._floor: Difference | None = None
        self.session, _ = prepare(self.pipe, [], "cpu")
        self.session.install([])

    def generate(self) -> list[Media]:
        return [generate(self.pipe, clip) for clip in CLIPS]

    def difference(self, one: Pass) -> Difference:
        self.session.change_passes([one])
        return Difference.worst(map(Difference.between, self.unmodified, self.generate()))

    def held(self, one: Pass, difference: Difference) -> bool:
        return holds(one.promise, difference, self.floor if isinstance(one.promise, Rounding) else None)

    @property
    def floor(self) -> Difference:
        if self._floor is None:
            self._floor = noise_floor(self.unmodified)
        return self._floor


def noise_floor(unmodified: list[Media]) -> Difference:
    pipe = build()
    wrap_calls(pipe.transformer, UlpPerturbation(torch.float32), ExitStack())
    return Difference.worst(map(Difference.between, unmodified, [generate(pipe, clip) for clip in CLIPS]))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.session.uninstall()


def session_report(session: Session, name: str) -> Any:
    return session.report()[name]


@pytest.mark.xdist_group("module passes")
@pytest.mark.parametrize("name", MODULE)
def test_installed_it_counts_what_it_expects_and_keeps_its_promise(stage: Stage, name: str) -> None:
    one = make_pass(name).test_instance()
    difference = stage.difference(one)
    entry = session_report(stage.session, name)
    assert entry.state == "on", entry.reason
    assert entry.matched == entry.expected > 0
    assert stage.held(one, difference), difference
    if isinstance(one.promise, Perceptual):
        assert 2 * difference.lpips <= one.promise.lpips, "the promise holds with room to spare"


@pytest.mark.xdist_group("module passes")
@pytest.mark.parametrize("name", MODULE)
def test_taken_back_the_pipeline_is_what_it_was(stage: Stage, name: str) -> None:
    stage.session.uninstall()
    stage.session.change_passes([make_pass(name).test_instance()])
    assert differing(stage.before, fingerprint(stage.pipe)), "the pass changed something"
    stage.session.uninstall()
    assert differing(stage.before, fingerprint(stage.pipe)) == []
    again = [generate(stage.pipe, CLIPS[0])]
    assert Difference.worst(map(Difference.between, stage.unmodified, again)).equal


@pytest.mark.xdist_group("module passes")
@pytest.mark.parametrize(("name", "number"), mutants_of(MODULE))
def test_the_promise_of_a_mutant_does_not_hold(stage: Stage, name: str, number: int) -> None:
    mutant = make_pass(name).mutants()[number]
    difference = stage.difference(mutant.instance)
    assert not stage.held(mutant.instance, difference), f"the mutant lives: {mutant.why} ({difference})"
