"""A captured graph on its way through the passes: counted, proven again on this machine, and never short in silence."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch

from h3opt.compiler import lowering as lowering_module
from h3opt.compiler.lowering import Lowering
from h3opt.compiler.probe import probe, signature
from h3opt.errors import PassFailedError, ShortfallError, ShortfallWarning
from h3opt.graph.matcher import Match, Rule
from h3opt.graph.nodes import copy_graph
from h3opt.graph.rewriter import apply_rules
from h3opt.graph.tracing import trace
from h3opt.kernels import DEFINITIONS, ops
from h3opt.metrics.bits import bits_equal
from h3opt.pass_api.base import GraphFacts, GraphPass
from h3opt.pass_api.examples import Draw
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.promises import Exact, Perceptual, Rounding
from h3opt.pass_api.registry import list_passes, make_pass
from h3opt.pass_api.testing import with_replacement

aten = torch.ops.aten
BLOCK = GraphFacts("transformer.block", {"transformer.block": 1})


def norm_graph(sites: int, factor: float = 1.0) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A graph with ``sites`` modulated norms one after the other, each with tables of its own, and its arguments."""

    def model(x, index, *tables):
        for site in range(sites):
            weight, scale, shift = tables[3 * site : 3 * site + 3]
            normed = torch.rms_norm(x, (16,), weight, 1e-5)
            x = normed * (factor + scale.index_select(0, index)) + shift.index_select(0, index)
        return x

    draw = Draw(tokens=5)
    x, *_, index = draw.modulation()
    arguments = (x, index, *(table for _ in range(sites) for table in draw.modulation()[1:4]))
    return trace(model, arguments), arguments


def operators(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def wrong_order() -> GraphPass:
    """norm_modulate as it would be with a kernel that sums another way: right to a human eye, not to the bit."""

    def replacement(x, shape, weight, eps, scale, shift, index):
        doubled = aten.mul.Tensor(x, 3.0)
        out = ops.norm_modulate(doubled, weight, scale, shift, index, eps)
        return out

    return with_replacement(make_pass("norm_modulate"), replacement)  # type: ignore[arg-type]


# --- passes added one by one -----------------------------------------------------------------------------------


def as_found(found: tuple[Any, Any]) -> Any:
    """What one run gave, to compare: the code and where it came from, and every count and text."""
    module, outcomes = found
    return module.code, [node.meta.get("nn_module_stack") for node in module.graph.nodes], list(outcomes.items())


def every_pass() -> list[GraphPass]:
    return [one for one in in_order(make_pass(kind.name) for kind in list_passes()) if isinstance(one, GraphPass)]


def block_graph() -> Any:
    """One graph that holds the example of every graph pass, so that each has a site."""
    examples = [one.example(Draw(tokens=5)) for one in every_pass()]

    def model(*args):
        left, made = list(args), []
        for example in examples:
            made.append(example.function(*left[: len(example.args)]))
            del left[: len(example.args)]
        return made

    return trace(model, [argument for example in examples for argument in example.args])


def orders() -> list[tuple[list[GraphPass], ...]]:
    """Sets of passes as they follow one another: added last, in the middle and first, taken out, and none."""
    every = every_pass()
    growing = tuple(every[:count] for count in range(len(every) + 1))
    return [growing, growing[::-1], tuple(every[start:] for start in range(len(every), -1, -1)), (every, [], every)]


@pytest.mark.parametrize("sets", orders(), ids=["added last", "taken off last", "added first", "all, none, all"])
@pytest.mark.parametrize("probe", [True, False], ids=["probed", "not probed"])
def test_what_an_earlier_run_left_changes_nothing(sets, probe):
    graph = block_graph()
    one_by_one = Lowering(on_shortfall="warn", probe=probe)
    matched = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShortfallWarning)
        for chosen in sets:
            facts = GraphFacts("transformer.block", {"transformer.block": 1}, passes=tuple(chosen))
            found = one_by_one.run(graph, chosen, facts)
            alone = Lowering(on_shortfall="warn", probe=probe).run(graph, chosen, facts)
            assert as_found(found) == as_found(alone)
            matched |= {name for name, outcome in found[1].items() if outcome.matched}
    assert matched == {one.name for one in every_pass()}, "where a pass does not fire, nothing is proven of it"


def test_a_pass_added_last_does_not_run_the_others_again():
    asked: list[str] = []

    class Counting(type(make_pass("norm_modulate"))):  # type: ignore[misc]
        def rules(self):
            asked.append("rules")
            return super().rules()

    graph, lowering = block_graph(), Lowering(probe=False)
    lowering.run(graph, [Counting()], GraphFacts())
    lowering.run(graph, [Counting(), make_pass("fused_swiglu")], GraphFacts())
    assert asked == ["rules"]


def test_a_pass_without_a_site_leaves_the_very_graph_there_was():
    graph, _ = norm_graph(1)
    lowering = Lowering(probe=False)
    before, _ = lowering.run(graph, [make_pass("norm_modulate")], GraphFacts())
    after, outcomes = lowering.run(graph, [make_pass("norm_modulate"), make_pass("fused_swiglu")], GraphFacts())
    assert after is before and not outcomes["fused_swiglu"].matched


def test_an_earlier_result_stays_what_it_was_when_passes_are_added():
    graph, lowering = block_graph(), Lowering(probe=False)
    before, _ = lowering.run(graph, [make_pass("norm_modulate")], GraphFacts())
    code = before.code
    after, _ = lowering.run(graph, [make_pass("norm_modulate"), make_pass("fused_swiglu")], GraphFacts())
    assert before.code == code != after.code


def test_expectations_are_asked_again_for_every_set_of_passes():
    graph, _ = norm_graph(1)
    lowering, norm = Lowering(), make_pass("norm_modulate")
    lowering.run(graph, [norm], GraphFacts())  # nothing is expected of an unknown graph
    for _ in range(2):  # a shortfall is one however often it is met
        with pytest.raises(ShortfallError, match="matched 1 of 2"):
            lowering.run(graph, [norm], BLOCK)


def test_a_pass_that_raised_leaves_no_half_rewritten_graph():
    def third(match):
        calls.append(match)
        if len(calls) == 3:
            raise ZeroDivisionError
        return None

    calls: list[Match] = []
    graph, _ = norm_graph(3)
    norm = make_pass("norm_modulate")
    rule = norm.rules()[0]
    clumsy = with_replacement(norm, rule.replacement)
    object.__setattr__(clumsy, "rules", lambda: [Rule(rule.pattern, rule.replacement, third, rule.index_into)])
    lowering = Lowering(probe=False)
    with pytest.raises(PassFailedError):
        lowering.run(graph, [clumsy], GraphFacts())
    assert as_found(lowering.run(graph, [norm], GraphFacts())) == as_found(
        Lowering(probe=False).run(graph, [norm], GraphFacts())
    )


def test_a_veto_is_asked_in_every_run():
    vetoed = {"norm_modulate"}
    graph, norm = norm_graph(1)[0], make_pass("norm_modulate")
    lowering = Lowering(probe=False, veto=lambda one, match: "no" if one.name in vetoed else None)
    assert not lowering.run(graph, [norm], GraphFacts())[1]["norm_modulate"].matched
    vetoed.clear()
    assert lowering.run(graph, [norm], GraphFacts())[1]["norm_modulate"].matched == 1
    vetoed.add("norm_modulate")
    lowering.veto = None
    assert lowering.run(graph, [norm], GraphFacts())[1]["norm_modulate"].matched == 1


def test_only_the_last_set_of_passes_is_kept_and_only_while_its_graph_lives():
    lowering = Lowering(probe=False)
    graph = block_graph()
    first, _ = lowering.run(graph, [make_pass("norm_modulate")], GraphFacts())
    dropped = weakref.ref(first)
    del first
    lowering.run(graph, [make_pass("fused_swiglu")], GraphFacts())
    gc.collect()
    assert dropped() is None
    last = weakref.ref(lowering.run(graph, [make_pass("fused_swiglu")], GraphFacts())[0])
    del graph
    gc.collect()
    gc.collect()  # what the graph kept is a cycle of its own, let go when the graph has gone
    assert last() is None


# --- counts ----------------------------------------------------------------------------------------------------


def test_a_graph_with_all_expected_sites_is_rewritten_and_keeps_its_bits():
    graph, arguments = norm_graph(2)
    before = operators(graph)
    rewritten, outcomes = Lowering().run(graph, [make_pass("norm_modulate")], BLOCK)
    assert operators(rewritten) == ["h3opt.norm_modulate_v1.default"] * 2
    assert (outcomes["norm_modulate"].matched, outcomes["norm_modulate"].expected) == (2, 2)
    assert outcomes["norm_modulate"].probed == 2
    assert operators(graph) == before, "the captured graph itself is never rewritten"
    assert bits_equal(graph(*arguments), rewritten(*arguments))


def test_a_shortfall_is_an_error_that_shows_the_nearest_site_and_what_to_do():
    graph, _ = norm_graph(2, factor=2.0)
    with pytest.raises(ShortfallError) as error:
        Lowering().run(graph, [make_pass("norm_modulate")], BLOCK)
    text = str(error.value)
    assert "'norm_modulate' matched 0 of 2 sites in transformer.block" in text
    assert "2.0 stands where 1.0 is expected" in text
    assert "on_shortfall: warn" in text


def test_a_shortfall_without_anything_near_says_so():
    graph = trace(lambda x: torch.sin(x), (torch.ones(3),))
    with pytest.raises(ShortfallError, match="Nothing came near"):
        Lowering().run(graph, [make_pass("norm_modulate")], BLOCK)


def test_in_warn_mode_a_shortfall_warns_and_the_rest_goes_on():
    graph, arguments = norm_graph(1)
    with pytest.warns(ShortfallWarning, match="matched 1 of 2 sites"):
        rewritten, outcomes = Lowering(on_shortfall="warn").run(graph, [make_pass("norm_modulate")], BLOCK)
    assert outcomes["norm_modulate"].matched == 1
    assert bits_equal(graph(*arguments), rewritten(*arguments))


def test_nothing_is_expected_of_an_unknown_graph():
    graph, _ = norm_graph(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, outcomes = Lowering().run(graph, [make_pass("norm_modulate"), make_pass("fused_swiglu")], GraphFacts())
    assert outcomes["norm_modulate"].expected is None
    assert outcomes["fused_swiglu"].matched == 0


def test_more_sites_than_expected_are_no_error():
    graph, _ = norm_graph(3)
    _, outcomes = Lowering().run(graph, [make_pass("norm_modulate")], BLOCK)
    assert (outcomes["norm_modulate"].matched, outcomes["norm_modulate"].expected) == (3, 2)


def test_all_graph_passes_in_order_leave_a_valid_graph():
    graph, arguments = norm_graph(2)
    chosen = in_order(make_pass(cls.name) for cls in list_passes() if issubclass(cls, GraphPass))
    rewritten, _ = Lowering(on_shortfall="error").run(graph, chosen, GraphFacts())
    rewritten.graph.lint()
    assert bits_equal(graph(*arguments), rewritten(*arguments))


def test_facts_count_operators_before_any_pass_has_run():
    seen: list[Any] = []

    class Asks(type(make_pass("norm_modulate"))):  # type: ignore[misc]
        def expect(self, facts):
            seen.append(dict(facts.operators))

    graph, _ = norm_graph(2)
    Lowering().run(graph, [Asks()], BLOCK)
    assert seen[0][aten.rms_norm.default] == 2 and ops.norm_modulate not in seen[0]


def test_a_pass_whose_replacement_has_another_shape_stops_the_lowering():
    def summed(x, shape, weight, eps, scale, shift, index):
        return aten.sum.dim_IntList(ops.norm_modulate(x, weight, scale, shift, index, eps), [-1])

    broken = with_replacement(make_pass("norm_modulate"), summed)
    graph, _ = norm_graph(2)
    with pytest.raises(PassFailedError, match="Add a guard to the rule, or mend the replacement"):
        Lowering(probe=False).run(graph, [broken], BLOCK)


def test_a_pass_that_raises_is_named():
    def clumsy(match):
        raise AttributeError("'NoneType' object has no attribute 'dtype'")

    (rule,) = make_pass("norm_modulate").rules()  # type: ignore[attr-defined]
    cls = type(make_pass("norm_modulate"))
    guarded = type("Guarded", (cls,), {"rules": lambda self: (Rule(rule.pattern, rule.replacement, clumsy),)})()
    graph, _ = norm_graph(2)
    with pytest.raises(
        PassFailedError, match=r"Pass 'norm_modulate' failed on transformer.block: AttributeError.*Turn"
    ):
        Lowering().run(graph, [guarded], BLOCK)


def test_a_copied_graph_can_be_changed_without_the_original():
    graph, arguments = norm_graph(1)
    copy = copy_graph(graph)
    assert operators(copy) == operators(graph)
    apply_rules(tuple(make_pass("norm_modulate").rules()), copy)
    assert operators(copy) != operators(graph)
    assert bits_equal(copy(*arguments), graph(*arguments))


# --- the probe -------------------------------------------------------------------------------------------------


def test_the_probe_refuses_a_rewrite_whose_bits_differ_here():
    graph, arguments = norm_graph(2)
    before = graph(*arguments)
    rewritten, outcomes = Lowering().run(graph, [wrong_order()], BLOCK)
    outcome = outcomes["norm_modulate"]
    assert (outcome.matched, outcome.probed, len(outcome.refused)) == (0, 0, 2)
    assert all("elements different from the unfused operators on this device" in one for one in outcome.refused)
    assert "h3opt.norm_modulate_v1.default" not in operators(rewritten)
    assert bits_equal(before, rewritten(*arguments))


def test_a_refused_site_is_no_shortfall():
    graph, _ = norm_graph(2)
    Lowering(on_shortfall="error").run(graph, [wrong_order()], BLOCK)


def test_without_the_probe_everything_that_matches_is_rewritten():
    graph, _ = norm_graph(2)
    rewritten, outcomes = Lowering(probe=False).run(graph, [wrong_order()], BLOCK)
    assert (outcomes["norm_modulate"].matched, outcomes["norm_modulate"].probed) == (2, 0)
    assert "h3opt.norm_modulate_v1.default" in operators(rewritten)


def test_a_wrong_kernel_is_noticed_however_it_came_to_be_wrong(monkeypatch):
    """The op itself goes wrong, as on a device whose compiler reorders a sum."""
    definition = DEFINITIONS["norm_modulate"]
    library = torch.library.Library("h3opt", "IMPL")
    wrong = lambda *args: definition(*args) * (1 + 2**-22)  # noqa: E731
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("norm_modulate_v1", wrong, "CPU", allow_override=True)
        graph, arguments = norm_graph(2)
        rewritten, outcomes = Lowering().run(graph, [make_pass("norm_modulate")], BLOCK)
        assert len(outcomes["norm_modulate"].refused) == 2
        assert bits_equal(graph(*arguments), rewritten(*arguments))
    finally:
        library._destroy()
    restored = Draw().modulation()
    x, weight, scale, shift, index = restored
    assert bits_equal(ops.norm_modulate(x, weight, scale, shift, index, 1e-5), definition(*restored, 1e-5))


def test_the_probe_leaves_the_global_generators_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    graph, _ = norm_graph(2)
    _, outcomes = Lowering().run(graph, [make_pass("norm_modulate")], BLOCK)
    assert outcomes["norm_modulate"].probed == 2
    assert torch.equal(before, torch.get_rng_state())


def test_equal_sites_are_probed_once(monkeypatch):
    calls: list[Match] = []
    monkeypatch.setattr(lowering_module, "probe", lambda match, promise, kinds: calls.append(match))
    lowering = Lowering()
    graph, _ = norm_graph(3)
    lowering.run(graph, [make_pass("norm_modulate")], BLOCK)
    assert len(calls) == 1
    lowering.run(norm_graph(2)[0], [make_pass("norm_modulate")], BLOCK)
    assert len(calls) == 1, "a second graph with sites of the same shapes needs none"


def match_of(draw: Draw) -> Match:
    one = make_pass("norm_modulate")
    assert isinstance(one, GraphPass)
    found: list[Match] = []
    example = one.example(draw)
    apply_rules(tuple(one.rules()), trace(example.function, example.args), lambda match: found.append(match) or "seen")
    return found[0]


@pytest.mark.parametrize(
    "other",
    [
        Draw(tokens=8),
        Draw(dtype=torch.bfloat16),
        Draw(channels=20),
        Draw(batch=2),
        Draw(strided=True),
    ],
    ids=["tokens", "dtype", "channels", "batch", "strides"],
)
def test_sites_of_another_shape_dtype_or_stride_are_probed_again(other):
    assert signature(match_of(Draw())) == signature(match_of(Draw(seed=9)))
    assert signature(match_of(Draw())) != signature(match_of(other))


def test_another_replacement_is_probed_again():
    right, wrong = make_pass("norm_modulate"), wrong_order()
    found: list[Any] = []
    for one in (right, wrong):
        graph, _ = norm_graph(1)
        apply_rules(tuple(one.rules()), graph, lambda match: found.append(signature(match)) or "seen")  # type: ignore
    assert found[0] != found[1]


def test_a_probe_draws_the_same_data_every_time_and_rows_that_exist():
    match = match_of(Draw(rows=3, tokens=50))
    assert probe(match, Exact()) is None
    assert probe(match, Exact()) is None


@pytest.mark.parametrize(
    ("promise", "refused"), [(Exact(), True), (Rounding(1), True), (Rounding(2**20), False), (Perceptual(0.1), False)]
)
def test_the_probe_asks_for_what_is_promised(promise, refused):
    def slightly_off(x, shape, weight, eps, scale, shift, index):
        return aten.mul.Tensor(ops.norm_modulate(x, weight, scale, shift, index, eps), 1 + 2**-20)

    found: list[Match] = []
    example = make_pass("norm_modulate").example(Draw())  # type: ignore[attr-defined]
    rules = tuple(with_replacement(make_pass("norm_modulate"), slightly_off).rules())  # type: ignore[arg-type]
    apply_rules(rules, trace(example.function, example.args), lambda match: found.append(match) or "seen")
    assert (probe(found[0], promise) is not None) is refused
