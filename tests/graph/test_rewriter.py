"""Rewriting: which sites are rewritten, the graph afterwards, and the outcome that is reported."""

from __future__ import annotations

import pytest
import torch
from graph_cases import ADDCMUL, X, Y, product_plus, rewritten
from torch.fx import GraphModule

from h3opt.errors import PassDefinitionError, PassFailedError
from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.matcher import Rule
from h3opt.graph.rewriter import apply_rules
from h3opt.graph.tracing import retrace, trace
from h3opt.kernels import ops
from h3opt.metrics.bits import bits_equal

aten = torch.ops.aten


# --- sites ------- ---------------------------------------------------------------------------------------------


def test_every_site_is_rewritten_and_named():
    before, after, outcome = rewritten(ADDCMUL, lambda x, y: (x * y + 1.0 * y) * x + x * x, X, Y)
    assert len(before) == 6
    assert outcome.matched == len(outcome.sites) == sum(line.startswith("addcmul") for line in after)
    assert outcome.matched >= 2


def test_of_two_overlapping_sites_one_is_rewritten():
    def double_sin(x):
        return aten.sin(aten.sin(x))

    def replacement(x):
        return aten.cos(x)

    before, after, outcome = rewritten(Rule(double_sin, replacement), lambda x: torch.sin(torch.sin(torch.sin(x))), X)
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


def test_a_match_is_replaced_and_what_nobody_reads_is_gone():
    before, after, outcome = rewritten(ADDCMUL, lambda x, y: torch.sin(x * y + x), X, Y)
    assert before == ["mul.Tensor(x_1, y_1)", "add.Tensor(mul, x_1)", "sin.default(add)"]
    assert after == ["addcmul.default(x_1, x_1, y_1)", "sin.default(addcmul)"]
    assert (outcome.matched, outcome.sites) == (1, ["add"])


def test_the_first_rule_that_matches_a_site_has_it():
    def fused(x, y, z):
        return aten.addcmul(z, y, x)

    _, after, outcome = rewritten((ADDCMUL, Rule(product_plus, fused)), lambda x, y: x * y + y, X, Y)
    assert (outcome.matched, after) == (1, ["addcmul.default(y_1, x_1, y_1)"])


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

    def replacement(x, y, z):
        product = aten.mul.Tensor(y, x)
        return product, aten.add.Tensor(z, product)

    def model(x, y):
        product = x * y
        early = torch.sin(product)
        late = torch.cos(x)
        return early, product + late

    before, after, outcome = rewritten(Rule(two, replacement), model, X, Y)
    assert [line.split(".")[0] for line in before] == ["mul", "sin", "cos", "add"]
    assert outcome.matched == 1
    assert sorted(line.split(".")[0] for line in after) == ["add", "cos", "mul", "sin"]
    assert after.index("mul.Tensor(y_1, x_1)") < after.index("sin.default(mul_tensor)")


def test_new_nodes_know_their_shapes():
    graph = canonicalize(trace(lambda x, y: x * y + y, (X, Y)))
    apply_rules((ADDCMUL,), graph)
    (node,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert tuple(node.meta["val"].shape) == (3, 8) and node.meta["val"].dtype == torch.float32


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (lambda x, y, z: aten.to.dtype(aten.addcmul(z, x, y), torch.float64), "torch.float64"),
        (lambda x, y, z: aten.sum.dim_IntList(aten.addcmul(z, x, y), [0]), r"\[8\]"),
    ],
    ids=["dtype", "shape"],
)
def test_a_replacement_of_another_shape_or_dtype_is_an_error(replacement, message):
    graph = canonicalize(trace(lambda x, y: x * y + y, (X, Y)))
    with pytest.raises(PassFailedError, match=message):
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


def test_a_replacement_with_a_parameter_of_its_own_is_an_error():
    def replacement(x, y, w):
        return aten.addcmul(w, x, y)

    graph = canonicalize(trace(lambda x, y: x * y + y, (X, Y)))
    with pytest.raises(PassDefinitionError, match="takes 'w', which the pattern does not bind"):
        apply_rules((Rule(product_plus, replacement),), graph)
