"""The canonical form of graphs, and that it preserves bits: listings before and after, side by side."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import X, Y, listing
from torch.utils._pytree import tree_leaves

from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.nodes import mutating_node
from h3opt.graph.tracing import trace
from h3opt.kernels import ops
from h3opt.metrics.bits import bits_equal

aten = torch.ops.aten


def before_and_after(function: Callable[..., Any], *args: torch.Tensor) -> tuple[list[str], list[str]]:
    """Return listings of the graph of a function before and after; check that the bits are the same."""
    graph = trace(function, args)
    before = listing(graph)
    expected = tree_leaves(graph(*args))
    canonicalize(graph)
    graph.graph.lint()
    actual = tree_leaves(graph(*args))
    assert all(bits_equal(left, right) for left, right in zip(expected, actual, strict=True))
    return before, listing(graph)


# --- operators without effect ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idle", "line"),
    [
        (lambda x: aten.dropout(x, 0.0, True), "dropout.default(x_1, 0.0, True)"),
        (lambda x: aten.dropout(x, 0.5, False), "dropout.default(x_1, 0.5, False)"),
        (lambda x: aten.to.dtype(x, torch.float32), "to.dtype(x_1, torch.float32)"),
        (lambda x: aten.type_as(x, x), "type_as.default(x_1, x_1)"),
        (lambda x: aten.view(x, [3, 8]), "view.default(x_1, [3, 8])"),
        (lambda x: aten.reshape(x, [3, 8]), "reshape.default(x_1, [3, 8])"),
        (lambda x: aten.expand(x, [3, 8]), "expand.default(x_1, [3, 8])"),
        (lambda x: aten.alias(x), "alias.default(x_1)"),
        (lambda x: aten.slice.Tensor(x, 1, 0, 8), "slice.Tensor(x_1, 1, 0, 8)"),
    ],
    ids=lambda value: value.split("(")[0] if isinstance(value, str) else "",
)
def test_idle_operators_are_dropped(idle, line):
    before, after = before_and_after(lambda x: idle(x) * 2.0, X)
    assert before[0] == line
    assert after == ["mul.Tensor(x_1, 2.0)"]


@pytest.mark.parametrize(
    "busy",
    [
        lambda x: aten.to.dtype(x, torch.bfloat16),
        lambda x: aten.to.dtype(x, torch.float32, False, True),  # a copy was asked for
        lambda x: aten.type_as(x, x.to(torch.float16)),
        lambda x: aten.detach(x),
        lambda x: aten.view(x, [8, 3]),
        lambda x: aten.expand(aten.slice.Tensor(x, 0, 0, 1), [3, 8]),
        lambda x: aten.slice.Tensor(x, 1, 0, 7),
        lambda x: aten.slice.Tensor(x, 1, 0, 8, 2),
        lambda x: aten.slice.Tensor(x, 1, 1, 8),
    ],
    ids=["cast", "copy", "cast_like_another", "detach", "reshape", "broadcast", "shorter", "every_second", "later"],
)
def test_operators_that_do_something_stay(busy):
    before, after = before_and_after(lambda x: busy(x) * 2.0, X)
    assert len(after) == len(before)


def test_dropout_that_draws_stays():
    graph = canonicalize(trace(lambda x: aten.dropout(x, 0.5, True) * 2.0, (X,)))
    assert listing(graph)[0] == "dropout.default(x_1, 0.5, True)"


def test_dead_code_goes():
    before, after = before_and_after(lambda x, y: (x * y, x + 1.0)[0], X, Y)
    assert before == ["mul.Tensor(x_1, y_1)", "add.Tensor(x_1, 1.0)"]
    assert after == ["mul.Tensor(x_1, y_1)"]


# --- names and arguments ----------------------------------------------------------------------------------------


def test_keyword_arguments_go_to_their_positions():
    before, after = before_and_after(lambda x: aten.rms_norm(x, normalized_shape=[8], weight=None, eps=1e-5), X)
    assert before == ["rms_norm.default(x_1, [8], None, 1e-05)"] or "normalized_shape" in before[0]
    assert after == ["rms_norm.default(x_1, [8], None, 1e-05)"]


def test_trailing_defaults_are_cut():
    graph = trace(lambda x: aten.add.Tensor(x, x), (X,))
    (node,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    node.kwargs = {"alpha": 1}
    assert listing(graph) == ["add.Tensor(x_1, x_1, alpha=1)"]
    assert listing(canonicalize(graph)) == ["add.Tensor(x_1, x_1)"]


def test_keyword_arguments_that_are_not_the_default_stay():
    before, after = before_and_after(lambda x, y: torch.add(x, y, alpha=2), X, Y)
    assert before == after == ["add.Tensor(x_1, y_1, alpha=2)"]


def test_python_operators_and_scalar_overloads_become_the_tensor_overload():
    graph = trace(lambda x, y: (x + y) * 2.0, (X, Y))
    add, mul = [node for node in graph.graph.nodes if node.op == "call_function"]
    add.target, mul.target = operator.add, aten.mul.Scalar
    assert listing(canonicalize(graph)) == ["add.Tensor(x_1, y_1)", "mul.Tensor(add, 2.0)"]


def test_transpose_becomes_permute():
    before, after = before_and_after(lambda x: aten.transpose.int(x, -1, 0) * 2.0, X)
    assert before[0] == "transpose.int(x_1, -1, 0)"
    assert after[0] == "permute.default(x_1, [1, 0])"


HALVES = ["slice.Tensor(x_1, 1, 0, 4)", "slice.Tensor(x_1, 1, 4, 8)", "mul.Tensor({0}, {1})"]


@pytest.mark.parametrize(
    "parts",
    [
        lambda x: x.chunk(2, -1),
        lambda x: x.split(4, 1),
        lambda x: aten.split_with_sizes(x, [4, 4], 1),
        lambda x: (x[:, :4], x[:, 4:]),
        lambda x: (x[..., :-4], x[..., -4:]),
        lambda x: (x.narrow(1, 0, 4), x.narrow(-1, 4, 4)),
    ],
    ids=["chunk", "split", "split_with_sizes", "slices", "slices_from_the_end", "narrow"],
)
def test_every_way_to_take_halves_becomes_two_slices(parts):
    def model(x: torch.Tensor) -> torch.Tensor:
        first, second = parts(x)
        return first * second

    _, after = before_and_after(model, X)
    assert [line.split("(")[0] for line in after] == ["slice.Tensor", "slice.Tensor", "mul.Tensor"]
    assert after[:2] == HALVES[:2]


def test_parts_of_unequal_size_keep_their_bounds():
    _, after = before_and_after(lambda x: x.chunk(3, -1), X)
    assert after == [
        "slice.Tensor(x_1, 1, 0, 3)",
        "slice.Tensor(x_1, 1, 3, 6)",
        "slice.Tensor(x_1, 1, 6, 8)",
    ]


def test_a_slice_past_the_end_is_as_long_as_the_tensor_allows():
    _, after = before_and_after(lambda x: aten.slice.Tensor(x, 1, 4, 100), X)
    assert after == ["slice.Tensor(x_1, 1, 4, 8)"]


def test_a_slice_with_a_step_keeps_it():
    _, after = before_and_after(lambda x: aten.slice.Tensor(x, -1, 1, 7, 2), X)
    assert after == ["slice.Tensor(x_1, 1, 1, 7, 2)"]


def test_cat_counts_its_dimension_from_the_front():
    _, after = before_and_after(lambda x, y: torch.cat((x, y), -1), X, Y)
    assert after == ["cat.default([x_1, y_1], 1)"]


# --- equal nodes -----------------------------------------------------------------------------------------------


def test_equal_quantizes_are_merged():
    def model(x):
        first, second = ops.quantize_rows(x), ops.quantize_rows(x)
        return first[0].float() * first[1] + 1.0, second[0].float() * second[1] + 2.0

    before, after = before_and_after(model, X)
    assert sum(line.startswith("quantize_rows") for line in before) == 2
    assert sum(line.startswith("quantize_rows") for line in after) == 1
    assert len(after) == 7  # the quantize, two results of it, a cast, a product and the two sums


def test_equal_chains_are_merged_from_the_root():
    before, after = before_and_after(lambda x, y: (torch.sin(x * y) + 1.0, torch.sin(x * y) + 2.0), X, Y)
    assert len(before) == 6
    assert after == ["mul.Tensor(x_1, y_1)", "sin.default(mul)", "add.Tensor(sin, 1.0)", "add.Tensor(sin, 2.0)"]


def test_random_operators_are_not_merged():
    models = (
        lambda x: torch.sin(torch.rand_like(x)) - torch.sin(torch.rand_like(x)),
        lambda x: torch.sin(aten.dropout(x, 0.5, True)) - torch.sin(aten.dropout(x, 0.5, True)),
    )
    for model in models:
        graph = canonicalize(trace(model, (X,)))
        assert sum(line.startswith("sin") for line in listing(graph)) == 2


def test_outputs_stay_tensors_of_their_own():
    """A caller may write to an output, and the other must not change."""
    _, after = before_and_after(lambda x, y: (x * y, x * y), X, Y)
    assert after == ["mul.Tensor(x_1, y_1)", "mul.Tensor(x_1, y_1)"]


def test_clones_stay_tensors_of_their_own():
    _, after = before_and_after(lambda x: torch.sin(x.clone()) + torch.cos(x.clone()), X)
    assert sum(line.startswith("clone") for line in after) == 2


def test_nothing_is_merged_across_a_change_of_mode():
    def model(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            low = torch.mm(x, y)
        return low.float() + torch.mm(x, y)

    _, after = before_and_after(model, X, torch.randn(8, 3))
    assert sum(line.startswith("mm") for line in after) == 2


@pytest.mark.parametrize(
    ("left", "right"),
    [(0.0, -0.0), (1, True), (1, 1.0), (0, False), (float("inf"), float("-inf"))],
    ids=str,
)
def test_literals_that_are_equal_to_python_only_are_not_merged(left, right):
    _, after = before_and_after(lambda x: aten.sin(aten.mul.Tensor(x, left)) + aten.mul.Tensor(x, right), X)
    assert sum(line.startswith("mul") for line in after) == 2


def test_equal_literals_are_merged():
    _, after = before_and_after(lambda x: torch.sin(x * -0.0) + x * -0.0 + torch.sin(x * 1) + x * 1, X)
    assert [line for line in after if line.startswith("mul")] == ["mul.Tensor(x_1, -0.0)", "mul.Tensor(x_1, 1)"]


def test_literals_of_other_types_in_lists_are_not_merged():
    def model(x):
        return [aten.sin(full) for full in (aten.full([2], 1), aten.full([2], 1.0), aten.full([2], True))]

    _, after = before_and_after(model, X)
    assert sum(line.startswith("full") for line in after) == 3


# --- writes ----------------------------------------------------------------------------------------------------


def test_a_graph_that_writes_to_a_tensor_is_left_as_it_is():
    def model(x):
        y = x * 2.0
        first = aten.dropout(y, 0.0, False) + 1.0
        y.add_(1.0)
        return first, y + 1.0, x * 2.0

    graph = trace(model, (X,))
    assert mutating_node(graph) is not None
    before = listing(graph)
    expected = tree_leaves(graph(X))
    assert listing(canonicalize(graph)) == before
    assert all(bits_equal(left, right) for left, right in zip(expected, tree_leaves(graph(X)), strict=True))


def test_a_graph_that_writes_nowhere_has_no_mutating_node():
    assert mutating_node(trace(lambda x: x * 2.0, (X,))) is None
