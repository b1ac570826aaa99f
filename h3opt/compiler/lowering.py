"""Rewrite a captured graph with the graph passes: canonicalize, match, probe, replace, and count sites."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from h3opt.compiler.definition_check import Measurement, check_site, has_check
from h3opt.compiler.probe import EXACT_KINDS, probe, signature
from h3opt.errors import H3OptError, PassFailedError, ShortfallError, ShortfallWarning
from h3opt.graph.canonicalize import canonicalize
from h3opt.graph.matcher import Match, NearMiss
from h3opt.graph.nodes import copy_graph, value
from h3opt.graph.rewriter import apply_rules
from h3opt.pass_api.base import GraphFacts, GraphPass
from h3opt.pass_api.promises import Exact, Perceptual, Rounding


@dataclass
class GraphOutcome:
    """What a pass did to a graph.

    Attributes:
        matched: number of rewritten sites.
        expected: number of sites that the pass expects; ``None`` if it is unknown.
        probed: number of sites that the probe checked on this machine.
        definition: the largest distance of an operator of a library from its definition on this machine; ``None`` if
            the pass brings no such operator or nothing was measured.
        sites: the rewritten sites, in words.
        refused: sites that the probe or the check against the definition refused, with the reason.
        near_misses: sites that match in part, nearest first.
    """

    matched: int = 0
    expected: int | None = None
    probed: int = 0
    definition: Measurement | None = None
    sites: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)


@dataclass(frozen=True)
class LoweredGraph:
    """A captured graph under one plan: rewritten, counted and ready to run.

    Attributes:
        graph: the rewritten graph. It may be shared with other plans, so it must not be changed.
        outcomes: by pass name, what each pass did.
        run: the executable.
    """

    graph: GraphModule
    outcomes: dict[str, GraphOutcome]
    run: Callable[..., Any]


@dataclass(frozen=True)
class _Stage:
    """A graph after a pass, or the canonical graph before any pass; without a site, the graph of the stage before."""

    by: GraphPass | None
    module: GraphModule
    outcome: GraphOutcome


@dataclass
class Lowering:
    """The settings of :meth:`run`, with the results of probes and the stages of the last run on each graph.

    Passes run in order, and a pass depends only on the graph and on its options. Therefore two lists of passes with a
    common beginning give the same graph after it, and the second run resumes there.

    Attributes:
        on_shortfall: ``"error"`` or ``"warn"``.
        probe: whether Exact and Rounding rewrites are checked on this machine, and the operators of libraries in
            Rounding and Perceptual rewrites are held to their definitions.
        veto: called first for every site; returns a reason to skip it, or ``None``. Bisection chooses sites with it.
    """

    on_shortfall: str = "error"
    probe: bool = True
    veto: Callable[[GraphPass, Match], str | None] | None = None
    _probes: dict[Any, str | None] = field(default_factory=dict)
    # The stages of the last run only; they live as long as the captured graph.
    _stages: weakref.WeakKeyDictionary[GraphModule, list[_Stage]] = field(default_factory=weakref.WeakKeyDictionary)

    def run(
        self, graph: GraphModule, passes: Iterable[GraphPass], facts: GraphFacts
    ) -> tuple[GraphModule, dict[str, GraphOutcome]]:
        """Rewrite a copy of ``graph``; returns it with the outcome of each pass.

        The result may be shared with an earlier call, so it must not be changed: see :func:`copy_graph`.

        Raises:
            ShortfallError: a pass matched fewer sites than it expects, and ``on_shortfall`` is ``"error"``.
            PassFailedError: a pass raised an exception, or made an invalid graph.
        """
        chosen = list(passes)
        stages = self._resume(graph, chosen)
        calls = [node for node in stages[0].module.graph.nodes if node.op == "call_function"]
        results: dict[Any, list[torch.Tensor]] = {}
        for node in calls:
            if (tensor := value(node)) is not None:
                results.setdefault(node.target, []).append(tensor)
        facts = dataclasses.replace(facts, operators=Counter(node.target for node in calls), results=results)
        outcomes: dict[str, GraphOutcome] = {}
        spare: GraphModule | None = None
        for position, graph_pass in enumerate(chosen, 1):
            if position == len(stages):
                latest = stages[-1].module
                spare = spare or copy_graph(latest)
                applied = self._apply(graph_pass, spare, facts)
                if applied.matched:
                    latest, spare = spare, None  # without a site the copy is unchanged and serves the next pass
                stages.append(_Stage(graph_pass, latest, applied))
            outcome = dataclasses.replace(stages[position].outcome, expected=graph_pass.expect(facts))
            outcomes[graph_pass.name] = outcome
            if outcome.expected is not None and outcome.matched + len(outcome.refused) < outcome.expected:
                self.fall_short(graph_pass.name, facts.region or "the graph", outcome)
        return stages[-1].module, outcomes

    def _resume(self, graph: GraphModule, passes: list[GraphPass]) -> list[_Stage]:
        """The stages of the last run on ``graph`` that ran the same passes; the caller appends new stages."""
        stages = self._stages.get(graph)
        if stages is None:
            stages = self._stages[graph] = [_Stage(None, canonicalize(copy_graph(graph)), GraphOutcome())]
        if self.veto is not None:  # a veto may answer otherwise in the next run
            return stages[:1]
        del stages[1 + _common(passes, [stage.by for stage in stages[1:]]) :]
        return stages

    def fall_short(self, name: str, where: str, outcome: GraphOutcome) -> None:
        """Report that pass ``name`` matched too few sites.

        Raises:
            ShortfallError: unless ``on_shortfall`` is ``"warn"``.
        """
        nearest = f"Nearest non-match: {outcome.near_misses[0]}." if outcome.near_misses else "Nothing came near."
        message = (
            f"Pass {name!r} matched {outcome.matched} of {outcome.expected} sites in {where}. {nearest} "
            "Turn the pass off, or set on_shortfall: warn to run without it."
        )
        if self.on_shortfall == "error":
            raise ShortfallError(message)
        warnings.warn(message, ShortfallWarning, stacklevel=2)

    def _apply(self, graph_pass: GraphPass, module: GraphModule, facts: GraphFacts) -> GraphOutcome:
        """Rewrite ``module`` in place, unless the pass finds no site."""
        probed, definition = 0, None
        promise = graph_pass.promise

        def accept(match: Match) -> str | None:
            nonlocal probed, definition
            if self.veto is not None and (reason := self.veto(graph_pass, match)) is not None:
                return reason
            if not self.probe:
                return None
            if not isinstance(promise, Exact) and (measured := check_site(match)) is not None:
                definition = measured if definition is None else max(definition, measured, key=lambda one: one.ratio)
                if not measured.holds:
                    return measured.refusal()
            if isinstance(promise, Perceptual):  # no probe, so none to count
                return None
            key = signature(match)
            if key not in self._probes:
                # kinds are covered by the check, which runs a few heads: the probe runs a site whole
                kinds = ("zero_mean",) if isinstance(promise, Rounding) and has_check(match) else EXACT_KINDS
                self._probes[key] = probe(match, promise, kinds)
            probed += self._probes[key] is None
            return self._probes[key]

        try:
            rewrite = apply_rules(tuple(graph_pass.rules()), module, accept)
        except H3OptError:
            raise
        except Exception as error:  # a guard, a replacement or an operator's fake implementation
            raise PassFailedError(
                f"Pass {graph_pass.name!r} failed on {facts.region or 'the graph'}: {error!r}. Turn it off."
            ) from error
        return GraphOutcome(
            rewrite.matched, None, probed, definition, rewrite.sites, rewrite.refused, rewrite.near_misses
        )


def _common(left: list[GraphPass], right: list[GraphPass | None]) -> int:
    """The length of the common beginning of two lists."""
    different = (number for number, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
    return next(different, min(len(left), len(right)))
