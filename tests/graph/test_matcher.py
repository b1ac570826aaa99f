"""Sites that a rule matches, sites that it leaves unchanged, and the reason for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_cases import ADDCMUL, X, Y, addcmul, product_plus, rewritten

from h3opt.errors import PassDefinitionError
from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.matcher import Match, Rule, match_at, traced
from h3opt.graph.tracing import trace
from h3opt.kernels import ops

aten = torch.ops.aten


# --- matching --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x * y + torch.sin(x),
        lambda x, y: torch.sin(x) + x * y,
        lambda x, y: torch.sin(x) + y * x,
        lambda x, y: torch.add(torch.mul(y, x), torch.sin(x)),
    ],
)
def test_plus_and_times_match_in_either_order(function):
    _, after, outcome = rewritten(ADDCMUL, function, X, Y)
    assert outcome.matched == 1
    assert [line.split("(")[0] for line in after] == ["sin.default", "addcmul.default"]


@pytest.mark.parametrize("function", [lambda x: 1.0 + x, lambda x: x + 1.0, lambda x: torch.add(x, other=1.0)])
def test_a_literal_in_the_pattern_matches_however_the_sum_is_written(function):
    def one_plus(x):
        return 1.0 + x

    assert rewritten(Rule(one_plus, aten_log1p_like), lambda x: function(x), X)[2].matched == 1


def aten_log1p_like(x: Any) -> Any:
    return aten.log1p(x)


@pytest.mark.parametrize("function", [lambda x: 2.0 + x, lambda x: x + x, lambda x: x + True, lambda x: x - 1.0])
def test_another_literal_or_a_tensor_in_its_place_does_not_match(function):
    def one_plus(x):
        return 1.0 + x

    assert rewritten(Rule(one_plus, aten_log1p_like), function, X)[2].matched == 0


@pytest.mark.parametrize(("literal", "matches"), [(0.0, 1), (0, 1), (-0.0, 0), (False, 0)], ids=str)
def test_a_literal_zero_has_a_sign_and_is_not_false(literal, matches):
    def plus_zero(x):
        return aten.sin(x) + 0.0

    def sine(x):
        return aten.sin(x)

    assert rewritten(Rule(plus_zero, sine), lambda x: torch.sin(x) + literal, X)[2].matched == matches


def test_a_guard_that_wants_the_other_operand_order_gets_it():
    rule = Rule(product_plus, addcmul, guard=lambda match: None if match.tensor("x") is None else "x is a tensor")
    graph = canonicalize(trace(lambda x, y: x * 2.5 + y, (X, Y)))
    anchor = [node for node in graph.graph.nodes if node.op == "call_function"][-1]
    match, _ = match_at(rule, anchor)
    assert match is not None and match.literal("x") == 2.5


def test_two_operators_of_a_pattern_may_be_one_merged_operator():
    def pattern(x, y):
        return aten.sin(x) * aten.sin(y)

    def replacement(x, y):
        return aten.cos(x) * aten.cos(y)

    _, after, outcome = rewritten(Rule(pattern, replacement), lambda x: torch.sin(x) * torch.sin(x), X)
    assert outcome.matched == 1 and not any(line.startswith("sin") for line in after)


def test_minus_does_not_match_in_the_other_order():
    def minus(x, y):
        return aten.sub.Tensor(aten.sin(x), y)

    def replacement(x, y):
        return aten.sub.Tensor(x, y)

    assert rewritten(Rule(minus, replacement), lambda x, y: torch.sin(x) - y, X, Y)[2].matched == 1
    assert rewritten(Rule(minus, replacement), lambda x, y: y - torch.sin(x), X, Y)[2].matched == 0


def test_a_parameter_binds_a_tensor_or_a_literal_by_its_name():
    seen: list[Match] = []
    rule = Rule(product_plus, addcmul, guard=lambda match: seen.append(match) or "looked at")
    rewritten(rule, lambda x, y: x * 2.5 + y, X, Y)
    (match,) = seen[:1]
    assert match.literal("y") == 2.5 and match.tensor("y") is None
    assert tuple(match.tensor("x").shape) == (3, 8)
    assert match.dtypes("x", "y", "z") == {torch.float32}
    assert match.site == "add"


def test_a_list_of_sizes_binds_whole():
    def norm(x, shape, weight, eps):
        return aten.rms_norm(x, shape, weight, eps)

    seen: list[Any] = []
    rule = Rule(norm, norm, guard=lambda match: seen.append((match.literal("shape"), match.literal("eps"))) or "no")
    rewritten(rule, lambda x, w: torch.rms_norm(x, (8,), w, 1e-6), X, Y[0])
    assert seen == [([8], 1e-6)]


def test_the_same_parameter_twice_must_be_the_same_tensor():
    def square(x):
        return aten.sin(x) * aten.sin(x)

    def power(x):
        return aten.pow.Tensor_Scalar(aten.sin(x), 2)

    assert rewritten(Rule(square, power), lambda x, y: torch.sin(x) * torch.sin(x), X, Y)[2].matched == 1
    _, _, outcome = rewritten(Rule(square, power), lambda x, y: torch.sin(x) * torch.sin(y), X, Y)
    assert outcome.matched == 0


def test_a_rule_may_have_several_outputs():
    def two(x, y):
        product = x * y
        return product, aten.sin(product)

    def replacement(x, y):
        product = aten.mul.Tensor(y, x)
        return product, aten.sin(product)

    def model(x, y):
        product = x * y
        return torch.sin(product), product + 1.0

    before, after, outcome = rewritten(Rule(two, replacement), model, X, Y)
    assert before == ["mul.Tensor(x_1, y_1)", "sin.default(mul)", "add.Tensor(mul, 1.0)"]
    assert outcome.matched == 1
    assert after == ["mul.Tensor(y_1, x_1)", "sin.default(mul_tensor)", "add.Tensor(mul_tensor, 1.0)"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_both_results_of_an_operator_are_replaced_in_whatever_order_they_are_read(order):
    def quantized(x):
        out = ops.quantize_rows(aten.sin(x))
        return out[0], out[1]

    def replacement(x):
        out = ops.quantize_rows(aten.cos(x))
        return out[0], out[1]

    def model(x):
        out = ops.quantize_rows(torch.sin(x))
        return tuple(out[number].float() for number in order)

    _, after, outcome = rewritten(Rule(quantized, replacement), model, X)
    assert outcome.matched == 1
    assert sum(line.startswith("quantize_rows") for line in after) == 1
    assert not any(line.startswith("sin") for line in after)


def test_a_result_nobody_reads_does_not_stop_a_match():
    def quantized(x):
        out = ops.quantize_rows(aten.sin(x))
        return out[0], out[1]

    def replacement(x):
        out = ops.quantize_rows(aten.cos(x))
        return out[0], out[1]

    _, after, outcome = rewritten(Rule(quantized, replacement), lambda x: ops.quantize_rows(torch.sin(x))[1], X)
    assert outcome.matched == 1 and not any(line.startswith("sin") for line in after)


# --- sites that must be left alone -----------------------------------------------------------------------------


def test_an_intermediate_somebody_else_reads_stops_a_match_and_is_named():
    def model(x, y):
        product = x * y
        return product + y, torch.sin(product)

    before, after, outcome = rewritten(ADDCMUL, model, X, Y)
    assert outcome.matched == 0 and after == before
    (miss,) = outcome.near_misses
    assert (miss.matched, miss.of) == (2, 2)
    assert miss.why == "the intermediate aten.mul.Tensor is also read by aten.sin.default"


def test_an_intermediate_that_is_returned_stops_a_match():
    def model(x, y):
        product = x * y
        return product + y, product

    _, _, outcome = rewritten(ADDCMUL, model, X, Y)
    assert outcome.matched == 0 and "also read by output" in outcome.near_misses[0].why


def test_an_input_that_depends_on_an_output_stops_a_match():
    def two(x, y, z):
        product = x * y
        return product, product + z

    def replacement(x, y, z):
        product = aten.mul.Tensor(y, x)
        return product, aten.add.Tensor(z, product)

    def supported(x, y):
        product = x * y
        return product, product + torch.sin(y)

    def circular(x, y):
        product = x * y
        return product, product + torch.sin(product)

    assert rewritten(Rule(two, replacement), supported, X, Y)[2].matched == 1
    _, _, outcome = rewritten(Rule(two, replacement), circular, X, Y)
    assert outcome.matched == 0
    assert outcome.near_misses[0].why == (
        "the input aten.sin.default depends on aten.mul.Tensor, which lies inside the pattern"
    )


def test_a_guard_stops_a_match_and_its_reason_is_shown():
    rule = Rule(product_plus, addcmul, guard=lambda match: "it is Tuesday")
    _, _, outcome = rewritten(rule, lambda x, y: x * y + y, X, Y)
    assert outcome.matched == 0
    assert str(outcome.near_misses[0]) == "add: 2 of 2 operators match, but it is Tuesday"


def test_other_arguments_stop_a_match():
    _, _, outcome = rewritten(ADDCMUL, lambda x, y: torch.add(x * y, y, alpha=2), X, Y)
    assert outcome.matched == 0


# --- near misses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, y: torch.sin(x * y) * 3.0, "3.0 stands where 2.0 is expected"),
        (lambda x, y: torch.cos(x * y) * 2.0, "aten.cos.default stands where aten.sin.default is expected"),
        (lambda x, y: torch.sin(x / y) * 2.0, "aten.div.Tensor stands where aten.mul.Tensor is expected"),
        (lambda x, y: torch.sin(x) * 2.0, "x_1 stands where aten.mul.Tensor is expected"),
    ],
)
def test_a_near_miss_names_the_first_difference(function, why):
    def pattern(x, y):
        return aten.sin(x * y) * 2.0

    graph = canonicalize(trace(function, (X, Y)))
    anchor = [node for node in graph.graph.nodes if node.op == "call_function"][-1]
    match, miss = match_at(Rule(pattern, pattern), anchor)
    assert match is None and miss is not None
    assert miss.why == why


def test_the_nearest_miss_comes_first():
    def pattern(x, y):
        return aten.sin(aten.cos(x * y)) + 1.0

    def model(x, y):
        return torch.sin(x) + 1.0, torch.sin(torch.cos(x / y)) + 1.0

    _, _, outcome = rewritten(Rule(pattern, pattern), model, X, Y)
    assert outcome.near_misses[0].matched == 3
    assert "aten.div.Tensor" in outcome.near_misses[0].why


# --- patterns that cannot be traced ----------------------------------------------------------------------------


def branches(x: Any) -> Any:
    return aten.sin(x) if x > 0 else aten.cos(x)


def calls_a_method(x: Any) -> Any:
    return x.sin()


def ambiguous(x: Any) -> Any:
    return aten.pow(x, 2)


def returns_a_number(x: Any) -> Any:
    return 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branches, "no branch on a value"),
        (calls_a_method, "torch.ops.aten.sin"),
        (ambiguous, "several overloads"),
        (returns_a_number, "not a tensor"),
    ],
)
def test_a_pattern_that_cannot_be_traced_says_what_to_write(function, message):
    with pytest.raises(PassDefinitionError, match=message) as error:
        traced(function)
    assert function.__name__ in str(error.value)


def test_overloads_are_told_apart_where_only_one_fits():
    def pattern(x, table, index):
        return aten.index_select(table, 0, index) * x

    targets = [node.target for node in traced(pattern).nodes if node.op == "call_function"]
    assert targets == [aten.index_select.default, aten.mul.Tensor]
