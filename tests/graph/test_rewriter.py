"""What a rule matches, what it leaves alone and why, and what the graph looks like afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from h3opt.errors import PassDefinitionError, PassFailedError
from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.matcher import Match, Rule, match_at, traced
from h3opt.graph.rewriter import Outcome, apply_rules
from h3opt.graph.tracing import retrace, trace
from h3opt.kernels import ops
from h3opt.metrics.bits import bits_equal

aten = torch.ops.aten
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def product_plus(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


def addcmul(x: Any, y: Any, z: Any) -> Any:
    return aten.addcmul(z, x, y)


ADDCMUL = Rule(product_plus, addcmul)


def listing(graph: GraphModule) -> list[str]:
    lines = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            words = [str(one) for one in node.args] + [f"{key}={one}" for key, one in node.kwargs.items()]
            lines.append(f"{node.target.__name__}({', '.join(words)})")
    return lines


def rewritten(
    rules: Rule | tuple[Rule, ...],
    function: Callable[..., Any],
    *args: torch.Tensor,
    accept: Callable[[Match], str | None] | None = None,
) -> tuple[list[str], list[str], Outcome]:
    """Listings before and after, and what happened; checks that the graph is valid and runs."""
    graph = canonicalize(trace(function, args))
    before = listing(graph)
    outcome = apply_rules(rules if isinstance(rules, tuple) else (rules,), graph, accept)
    graph.graph.lint()
    if outcome.matched:
        graph(*args)
    return before, listing(graph), outcome


# --- matching --------------------------------------------------------------------------------------------------


def test_a_match_is_replaced_and_what_nobody_reads_is_gone():
    before, after, outcome = rewritten(ADDCMUL, lambda x, y: torch.sin(x * y + x), X, Y)
    assert before == ["mul.Tensor(x_1, y_1)", "add.Tensor(mul, x_1)", "sin.default(add)"]
    assert after == ["addcmul.default(x_1, x_1, y_1)", "sin.default(addcmul)"]
    assert (outcome.matched, outcome.sites) == (1, ["add"])


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
    found, _ = match_at(rule, anchor)
    assert found is not None and found.literal("x") == 2.5


def test_two_operators_of_a_pattern_may_be_one_merged_operator():
    def pattern(x, y):
        return aten.sin(x) * aten.sin(y)

    def other(x, y):
        return aten.cos(x) * aten.cos(y)

    _, after, outcome = rewritten(Rule(pattern, other), lambda x: torch.sin(x) * torch.sin(x), X)
    assert outcome.matched == 1 and not any(line.startswith("sin") for line in after)


def test_minus_does_not_match_in_the_other_order():
    def minus(x, y):
        return aten.sub.Tensor(aten.sin(x), y)

    def other(x, y):
        return aten.sub.Tensor(x, y)

    assert rewritten(Rule(minus, other), lambda x, y: torch.sin(x) - y, X, Y)[2].matched == 1
    assert rewritten(Rule(minus, other), lambda x, y: y - torch.sin(x), X, Y)[2].matched == 0


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

    def other(x, y):
        product = aten.mul.Tensor(y, x)
        return product, aten.sin(product)

    def model(x, y):
        product = x * y
        return torch.sin(product), product + 1.0

    before, after, outcome = rewritten(Rule(two, other), model, X, Y)
    assert before == ["mul.Tensor(x_1, y_1)", "sin.default(mul)", "add.Tensor(mul, 1.0)"]
    assert outcome.matched == 1
    assert after == ["mul.Tensor(y_1, x_1)", "sin.default(mul_tensor)", "add.Tensor(mul_tensor, 1.0)"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_both_results_of_an_operator_are_replaced_in_whatever_order_they_are_read(order):
    def quantized(x):
        out = ops.quantize_rows(aten.sin(x))
        return out[0], out[1]

    def other(x):
        out = ops.quantize_rows(aten.cos(x))
        return out[0], out[1]

    def model(x):
        out = ops.quantize_rows(torch.sin(x))
        return tuple(out[number].float() for number in order)

    _, after, outcome = rewritten(Rule(quantized, other), model, X)
    assert outcome.matched == 1
    assert sum(line.startswith("quantize_rows") for line in after) == 1
    assert not any(line.startswith("sin") for line in after)


def test_a_result_nobody_reads_does_not_stop_a_match():
    def quantized(x):
        out = ops.quantize_rows(aten.sin(x))
        return out[0], out[1]

    def other(x):
        out = ops.quantize_rows(aten.cos(x))
        return out[0], out[1]

    _, after, outcome = rewritten(Rule(quantized, other), lambda x: ops.quantize_rows(torch.sin(x))[1], X)
    assert outcome.matched == 1 and not any(line.startswith("sin") for line in after)


def test_the_first_rule_that_matches_a_site_has_it():
    def fused(x, y, z):
        return aten.addcmul(z, y, x)

    _, after, outcome = rewritten((ADDCMUL, Rule(product_plus, fused)), lambda x, y: x * y + y, X, Y)
    assert (outcome.matched, after) == (1, ["addcmul.default(y_1, x_1, y_1)"])


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

    def other(x, y, z):
        product = aten.mul.Tensor(y, x)
        return product, aten.add.Tensor(z, product)

    def supported(x, y):
        product = x * y
        return product, product + torch.sin(y)

    def circular(x, y):
        product = x * y
        return product, product + torch.sin(product)

    assert rewritten(Rule(two, other), supported, X, Y)[2].matched == 1
    _, _, outcome = rewritten(Rule(two, other), circular, X, Y)
    assert outcome.matched == 0
    assert outcome.near_misses[0].why == (
        "the input aten.sin.default depends on aten.mul.Tensor, which lies inside the pattern"
    )


def test_a_guard_stops_a_match_and_its_reason_is_shown():
    rule = Rule(product_plus, addcmul, guard=lambda match: "it is Tuesday")
    _, _, outcome = rewritten(rule, lambda x, y: x * y + y, X, Y)
    assert outcome.matched == 0
    assert str(outcome.near_misses[0]) == "add: 2 of 2 operators match, but it is Tuesday"


def test_a_refusal_at_the_last_moment_is_counted_apart():
    _, after, outcome = rewritten(ADDCMUL, lambda x, y: x * y + y, X, Y, accept=lambda match: "bits differ")
    assert (outcome.matched, outcome.refused) == (0, ["add: bits differ"])
    assert after == ["mul.Tensor(x_1, y_1)", "add.Tensor(mul, y_1)"]


def test_nothing_is_matched_in_a_graph_that_writes():
    def model(x, y):
        z = x * y + y
        return z.add_(1.0)

    _, _, outcome = rewritten(ADDCMUL, model, X, Y)
    assert outcome.matched == 0
    assert "writes to a tensor" in outcome.near_misses[0].why and "add_" in outcome.near_misses[0].why


def test_other_arguments_stop_a_match():
    _, _, outcome = rewritten(ADDCMUL, lambda x, y: torch.add(x * y, y, alpha=2), X, Y)
    assert outcome.matched == 0


# --- several sites ---------------------------------------------------------------------------------------------


def test_every_site_is_rewritten_and_named():
    before, after, outcome = rewritten(ADDCMUL, lambda x, y: (x * y + 1.0 * y) * x + x * x, X, Y)
    assert len(before) == 6
    assert outcome.matched == len(outcome.sites) == sum(line.startswith("addcmul") for line in after)
    assert outcome.matched >= 2


def test_of_two_overlapping_sites_one_is_rewritten():
    def double_sin(x):
        return aten.sin(aten.sin(x))

    def other(x):
        return aten.cos(x)

    before, after, outcome = rewritten(Rule(double_sin, other), lambda x: torch.sin(torch.sin(torch.sin(x))), X)
    assert len(before) == 3
    assert outcome.matched == 1
    assert after == ["cos.default(x_1)", "sin.default(cos)"]


def test_a_site_made_by_a_rewrite_is_found_by_a_later_rule():
    def sine(x):
        return aten.sin(x)

    def cosine(x):
        return aten.cos(x)

    def tangent(x):
        return aten.tan(x)

    _, after, outcome = rewritten((Rule(sine, cosine), Rule(cosine, tangent)), lambda x: torch.sin(x), X)
    assert (outcome.matched, after) == (2, ["tan.default(x_1)"])


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


def test_a_rewritten_site_is_no_near_miss():
    def fused(x, y, z):
        return aten.addcmul(z, y, x)

    def never(x, y, z):
        return aten.sin(x * y) + z

    _, _, outcome = rewritten((Rule(never, fused), ADDCMUL), lambda x, y: x * y + y, X, Y)
    assert outcome.matched == 1 and outcome.near_misses == []


# --- the graph afterwards --------------------------------------------------------------------------------------


def test_the_order_is_valid_when_an_output_is_read_before_the_last_one():
    """The replacement stands at the last output, but an earlier output may be read before it."""

    def two(x, y, z):
        product = x * y
        return product, product + z

    def other(x, y, z):
        product = aten.mul.Tensor(y, x)
        return product, aten.add.Tensor(z, product)

    def model(x, y):
        product = x * y
        early = torch.sin(product)
        late = torch.cos(x)
        return early, product + late

    before, after, outcome = rewritten(Rule(two, other), model, X, Y)
    assert [line.split(".")[0] for line in before] == ["mul", "sin", "cos", "add"]
    assert outcome.matched == 1
    assert sorted(line.split(".")[0] for line in after) == ["add", "cos", "mul", "sin"]
    assert after.index("mul.Tensor(y_1, x_1)") < after.index("sin.default(mul_tensor)")


def test_new_nodes_know_their_shapes():
    graph = canonicalize(trace(lambda x, y: x * y + y, (X, Y)))
    apply_rules((ADDCMUL,), graph)
    (node,) = [one for one in graph.graph.nodes if one.op == "call_function"]
    assert tuple(node.meta["val"].shape) == (3, 8) and node.meta["val"].dtype == torch.float32


@pytest.mark.parametrize(
    ("replacement", "found"),
    [
        (lambda x, y, z: aten.to.dtype(aten.addcmul(z, x, y), torch.float64), "torch.float64"),
        (lambda x, y, z: aten.sum.dim_IntList(aten.addcmul(z, x, y), [0]), r"\[8\]"),
    ],
    ids=["dtype", "shape"],
)
def test_a_replacement_of_another_shape_or_dtype_is_an_error(replacement, found):
    graph = canonicalize(trace(lambda x, y: x * y + y, (X, Y)))
    with pytest.raises(PassFailedError, match=found):
        apply_rules((Rule(product_plus, replacement),), graph)


def test_sizes_stay_symbolic():
    """A graph captured at one length, rewritten, serves another length with the right bits."""
    from h3opt import _torch_private as private

    graphs: list[GraphModule] = []

    def backend(graph, inputs):
        semantic = canonicalize(retrace(graph))
        outcome = apply_rules((swiglu_rule(),), semantic)
        assert outcome.matched == 1, outcome.near_misses
        graphs.append(semantic)
        return semantic.forward

    def model(x):
        first, second = x.chunk(2, dim=-1)
        return first * torch.nn.functional.silu(second) + x.shape[0]

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for tokens in (5, 9, 31):
            x = torch.randn(tokens, 8)
            private.mark_dynamic(x, (0,))
            assert bits_equal(compiled(x), model(x))
    (graph,) = graphs
    text = str(graph.graph)
    assert "swiglu_v1" in text
    (fused,) = [node for node in graph.graph.nodes if "swiglu" in str(node.target)]
    assert isinstance(fused.meta["val"].shape[0], torch.SymInt)
    torch._dynamo.reset()


def swiglu_rule() -> Rule:
    from h3opt.pass_api.guards import check_swiglu_halves
    from h3opt.pass_api.patterns import swiglu

    def fused(x, dim, middle, end):
        return ops.swiglu(x)

    return Rule(swiglu, fused, check_swiglu_halves)


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


def test_a_replacement_with_a_parameter_of_its_own_is_an_error():
    def replacement(x, y, w):
        return aten.addcmul(w, x, y)

    graph = canonicalize(trace(lambda x, y: x * y + y, (X, Y)))
    with pytest.raises(PassDefinitionError, match="takes 'w', which the pattern does not bind"):
        apply_rules((Rule(product_plus, replacement),), graph)


def test_overloads_are_told_apart_where_only_one_fits():
    def pattern(x, table, index):
        return aten.index_select(table, 0, index) * x

    targets = [node.target for node in traced(pattern).nodes if node.op == "call_function"]
    assert targets == [aten.index_select.default, aten.mul.Tensor]
