"""The backend ``"h3opt"`` of ``torch.compile``, for modules outside a MiniMax-H3 pipeline."""

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
    """Compile a graph from Dynamo: ``torch.compile(module, backend="h3opt", options={"passes": ["fused_swiglu"]})``.

    The graph passes run on whatever was captured, with no expected number of sites. For pipelines, use
    :func:`h3opt.optimize`.

    Args:
        graph: the graph that Dynamo captured.
        example_inputs: the inputs that Dynamo captured it with.
        options: ``passes``, ``executor`` and ``probe``, see :class:`StandalonePlanner`.

    Raises:
        PassOptionError: an option is unknown, or a pass is no graph pass.
    """
    planner = StandalonePlanner(**(options or {}))
    return CapturedGraph(CapturedRegion(Region("", (), {})), retrace(graph), example_inputs, planner)


class StandalonePlanner:
    """The :class:`~h3opt.compiler.capture.Planner` of ``torch.compile(backend="h3opt")``.

    Args:
        passes: names or instances of graph passes; they never change.
        executor: ``"direct"`` or ``"inductor"``.
        probe: whether Exact and Rounding rewrites are checked on this machine.
    """

    def __init__(self, passes: Iterable[str | Pass] = (), executor: str = "direct", probe: bool = True) -> None:
        check_choices({"executor": executor})
        chosen = in_order(make_pass(item) if isinstance(item, str) else item for item in passes)
        for item in chosen:
            if not isinstance(item, GraphPass):
                raise PassOptionError(
                    f"Pass {item.name!r} is a {item.kind} pass, and the backend alone runs graph passes. "
                    "Use h3opt.optimize for the others."
                )
        self.plan_key: Any = chosen
        self._executor = executor
        self._lowering = Lowering("warn", probe)

    def build(self, captured: CapturedGraph) -> LoweredGraph:
        """Rewrite ``captured`` with the passes; see :class:`h3opt.compiler.capture.Planner`."""
        graph, outcomes = self._lowering.run(captured.graph, self.plan_key, GraphFacts(passes=self.plan_key))
        return LoweredGraph(graph, outcomes, EXECUTORS[self._executor](graph, captured.example_inputs))

    def failed(self, error: H3OptError) -> None:
        """Do nothing: there is nothing to uninstall."""
