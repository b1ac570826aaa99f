"""The Dynamo backend for modules outside a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule

from h3opt.compiler.capture import CapturedGraph, CapturedRegion
from h3opt.compiler.executors import EXECUTORS
from h3opt.compiler.lowering import LoweredGraph, Lowering
from h3opt.compiler.optimize import check_choices
from h3opt.errors import H3OptError, PassOptionError
from h3opt.graph.tracing import retrace
from h3opt.pass_api.base import GraphFacts, GraphPass, Pass
from h3opt.pass_api.ordering import in_order
from h3opt.pass_api.registry import make_pass
from h3opt.pipeline.region import Region


def dynamo_backend(graph: GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None) -> Any:
    """``torch.compile(module, backend="h3opt", options={"passes": [...], "executor": "direct"})``.

    For modules h3opt does not know: the named graph passes run on whatever was captured, with no expectation of how
    often they fire. :func:`h3opt.optimize` is the call for pipelines.
    """

    planner = StandalonePlanner(**(options or {}))
    return CapturedGraph(CapturedRegion(Region("", (), {})), retrace(graph), example_inputs, planner)


class StandalonePlanner:
    """Plans for ``torch.compile(backend="h3opt")``: fixed graph passes, no expectations."""

    def __init__(self, passes: Iterable[str | Pass] = (), executor: str = "direct", probe: bool = True) -> None:
        check_choices({"executor": executor})
        chosen = in_order(make_pass(one) if isinstance(one, str) else one for one in passes)
        for one in chosen:
            if not isinstance(one, GraphPass):
                raise PassOptionError(
                    f"Pass {one.name!r} is a {one.kind} pass, and the backend alone runs graph passes. "
                    "Use h3opt.optimize for the others."
                )
        self.plan_key: Any = chosen
        self._executor = executor
        self._lowering = Lowering("warn", probe)

    def build(self, captured: CapturedGraph) -> LoweredGraph:
        """See :class:`h3opt.compiler.capture.Planner`."""
        graph, outcomes = self._lowering.run(captured.graph, self.plan_key, GraphFacts(passes=self.plan_key))
        return LoweredGraph(graph, outcomes, EXECUTORS[self._executor](graph, captured.example_inputs))

    def failed(self, error: H3OptError) -> None:
        """Nothing was installed, so nothing is taken back."""
