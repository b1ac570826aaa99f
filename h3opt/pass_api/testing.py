"""Generic checks that every pass gets without writing a test, and what its examples draw their data from.

Third-party passes use them the same way::

    from h3opt.pass_api.testing import Draw, check_pass
    def test_my_pass():
        check_pass(MyPass())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from h3opt.errors import PassFailedError
from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.matcher import Rule
from h3opt.graph.nodes import copy_graph
from h3opt.graph.rewriter import Outcome, apply_rules
from h3opt.graph.tracing import trace
from h3opt.metrics.bits import bits_equal, relative_error, row_ulps
from h3opt.pass_api.base import GraphPass
from h3opt.pass_api.examples import Decline, Draw, Example
from h3opt.pass_api.promises import Exact, Perceptual, Rounding
from h3opt.pipeline.tiling.strategies import MergeQueue


def semantic(example: Example) -> GraphModule:
    """The canonical semantic graph of an example."""
    return canonicalize(trace(example.function, example.args))


def rewrite(graph_pass: GraphPass, graph: GraphModule) -> tuple[GraphModule, Outcome]:
    """Apply a pass to a copy of ``graph``, without probe or expectation."""
    module = copy_graph(graph)
    return module, apply_rules(tuple(graph_pass.rules()), module)


def broken_promise(graph_pass: GraphPass, draw: Draw) -> str | None:
    """Run a pass's example with and without the pass; returns how its promise was broken, or ``None``."""
    example = graph_pass.example(draw)
    graph = semantic(example)
    rewritten, outcome = rewrite(graph_pass, graph)
    if outcome.matched != 1:
        near = f" ({outcome.near_misses[0]})" if outcome.near_misses else ""
        return f"fired {outcome.matched} times on its example, not once{near}"
    with torch.no_grad():
        before, after = _tensors(graph(*example.args)), _tensors(rewritten(*example.args))
    for number, (reference, candidate) in enumerate(zip(before, after, strict=True)):
        promise = graph_pass.promise
        if isinstance(promise, Exact) and not (comparison := bits_equal(reference, candidate)):
            return f"output {number}: {comparison}"
        allowed = promise.ulps or 0 if isinstance(promise, Rounding) and draw.unit_scale else math.inf
        if allowed < math.inf and (distance := row_ulps(reference, candidate)) > allowed:
            return f"output {number}: {distance:.1f} ulps of its row, promised are {allowed}"
        if isinstance(promise, Perceptual) and promise.site_error is not None and draw.unit_scale:
            error = relative_error(reference, candidate)
            if not error <= promise.site_error:
                return f"output {number}: relative error {error:.3f}, promised is {promise.site_error:g}"
    return None


def rewrites_decline(graph_pass: GraphPass, decline: Decline, draw: Draw) -> bool:
    """Whether a pass wrongly rewrites an example it must leave alone."""
    return rewrite(graph_pass, semantic(decline.build(draw)))[1].matched > 0


def fires_again(graph_pass: GraphPass, draw: Draw) -> bool:
    """Whether a second run of a pass finds something in what the first one made."""
    once, _ = rewrite(graph_pass, semantic(graph_pass.example(draw)))
    return rewrite(graph_pass, once)[1].matched > 0


def with_replacement(original: GraphPass, replacement: Callable[..., Any], rule: int = 0) -> GraphPass:
    """A mutant of ``original`` whose rule number ``rule`` has another replacement."""
    rules = list(original.rules())
    rules[rule] = Rule(rules[rule].pattern, replacement, rules[rule].guard, rules[rule].index_into)
    return _with_rules(original, rules)


def without_guards(original: GraphPass) -> GraphPass:
    """A mutant of ``original`` that takes every site its patterns find."""
    return _with_rules(original, [Rule(r.pattern, r.replacement, None, r.index_into) for r in original.rules()])


def check_pass(graph_pass: GraphPass, draws: Sequence[Draw] | None = None) -> None:
    """All generic checks of a graph pass on fixed draws: a minute's answer to whether it is right.

    Raises:
        AssertionError: with what is wrong.
    """
    draws = draws or [
        Draw(),
        Draw(dtype=torch.bfloat16, tokens=5, channels=20, magnitude=100.0),
        Draw(dtype=torch.float16, batch=2, strided=True, seed=1),
        Draw(special=True, seed=2),
        *(Draw(kind=kind, seed=3) for kind in ("offset_2", "clusters", "outlier_channels", "nan_row")),
    ]
    for draw in draws:
        problem = broken_promise(graph_pass, draw)
        assert problem is None, f"{graph_pass.name} with {draw}: {problem}"
        assert not fires_again(graph_pass, draw), f"{graph_pass.name} fires on its own result"
    for decline in graph_pass.declines():
        assert not rewrites_decline(graph_pass, decline, draws[0]), f"{graph_pass.name} must leave alone: {decline.why}"
    assert graph_pass.mutants(), f"{graph_pass.name} has no mutant"
    for mutant in graph_pass.mutants():
        assert mutant_survives(mutant.instance, draws) is False, f"the mutant lives: {mutant.why}"  # type: ignore[arg-type]


def mutant_survives(mutant: GraphPass, draws: Sequence[Draw]) -> bool:
    """Whether no check on ``draws`` tells a mutant from a right pass."""
    try:
        wrong = any(broken_promise(mutant, draw) or fires_again(mutant, draw) for draw in draws)
        return not wrong and not any(rewrites_decline(mutant, decline, draws[0]) for decline in mutant.declines())
    except PassFailedError:  # the engine itself turned its graph down
        return False


class ReversedMergeQueue(MergeQueue):
    """For mutants of passes that schedule tiles: merging waits for the end and then goes backwards."""

    def __init__(self) -> None:
        self.merges: list[Callable[[], Sequence[torch.Tensor]]] = []

    def run(self, merge: Callable[[], Sequence[torch.Tensor]], device: torch.device) -> None:
        self.merges.append(merge)

    def finish(self) -> None:
        while self.merges:
            self.merges.pop()()


def _with_rules(original: GraphPass, rules: Sequence[Rule]) -> GraphPass:
    cls = type(original)
    mutant = type(f"{cls.__name__}Mutant", (cls,), {"rules": lambda self: tuple(rules)})
    return mutant(**original.options())


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [one for item in result for one in _tensors(item)]
