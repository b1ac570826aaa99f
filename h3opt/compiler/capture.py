"""From a running module to its *semantic graph*, and back to something that runs.

Dynamo hands a backend its own graph; retracing that with ``make_fx(pre_dispatch=True)`` under the fake mode of the
placeholders gives a graph of the operators the model was written in (``aten.linear``, ``aten.rms_norm``,
``aten.scaled_dot_product_attention``), functional and with symbolic sizes. Executed node by node it computes the very
bits of the eager module, which is why passes rewrite here and not after decomposition.
"""

from __future__ import annotations

import gc
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from h3opt import _torch_private as private
from h3opt.compiler.lowering import LoweredGraph
from h3opt.errors import H3OptError, PipelineError
from h3opt.graph.tracing import retrace
from h3opt.pipeline.graph_calls import note_graph_call
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.region import Region


class Planner(Protocol):
    """Whoever decides how a captured graph is rewritten and run; see :class:`h3opt.compiler.session.Session`."""

    @property
    def plan_key(self) -> Any:
        """Changes whenever graphs must be rewritten anew."""

    def build(self, captured: CapturedGraph) -> LoweredGraph:
        """Rewrite ``captured`` under the current plan."""

    def failed(self, error: H3OptError) -> None:
        """A capture or a rewrite raised ``error``, which is about to reach the user."""


@dataclass(eq=False)
class CapturedRegion:
    """The captured graphs of one region, and what is known about the call that is running.

    Attributes:
        region: the modules that share the graphs.
        captured: the graphs so far.
        running: ``id`` of the module that was called last.
        listener: called with ``(captured, args)`` before a graph runs; bisection records arguments with it.
    """

    region: Region
    captured: list[CapturedGraph] = field(default_factory=list)
    running: int = 0
    listener: Callable[[CapturedGraph, tuple[Any, ...]], None] | None = None
    _compiled: dict[tuple[type, ...], Callable[..., Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the region, e.g. ``"transformer.block"``."""
        return self.region.name

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules that share the graphs; all of one class."""
        return self.region.modules

    def install(self, planner: Planner) -> Callable[[], None]:
        """Send the calls of every module through a captured graph; returns a function that undoes it."""
        # Passes that exchange submodules need graphs of their own; those for the earlier structure are kept.
        structure = tuple(type(submodule) for submodule in self.modules[0].modules())
        if structure not in self._compiled:
            self._compiled[structure] = _own_code_object(self, planner)
        undo = ExitStack()
        for module in self.modules:
            wrap_calls(module, _Entry(self, module, self._compiled[structure], planner), undo, innermost=True)
        return undo.close


class CapturedGraph:
    """One semantic graph of a region, and what it was lowered to under each plan.

    Attributes:
        owner: the region where it was captured.
        graph: the semantic graph, never rewritten itself; ``node.meta["val"]`` has fake values.
        example_inputs: what Dynamo passed along, for executors that compile.
        calls: how often it ran.
        modules: ``id`` of each module that ran it.
    """

    def __init__(self, owner: CapturedRegion, graph: GraphModule, example_inputs: list[Any], planner: Planner) -> None:
        self.owner = owner
        self.graph = graph
        self.example_inputs = example_inputs
        self.calls = 0
        self.modules: set[int] = set()
        self._planner = planner
        self._lowered: dict[Any, LoweredGraph] = {}
        self._lower()  # built here, inside Dynamo's backend, where compilers know the symbolic sizes
        self.example_inputs = []

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        note_graph_call(self)
        self.modules.add(self.owner.running)
        if self.owner.listener is not None:
            self.owner.listener(self, args)
        return self._lower().run(*args)

    def lowered(self, plan_key: Any) -> LoweredGraph | None:
        """The graph as it was rewritten under ``plan_key``; ``None`` if it did not run under that plan yet."""
        return self._lowered.get(plan_key)

    def _lower(self) -> LoweredGraph:
        key = self._planner.plan_key
        if key not in self._lowered:
            self._lowered[key] = self._planner.build(self)
        return self._lowered[key]


class _Entry:
    """What a captured module's calls go to."""

    def __init__(self, owner: CapturedRegion, module: torch.nn.Module, compiled: Callable[..., Any], planner: Planner):
        self._owner, self._module, self._compiled, self._planner = owner, module, compiled, planner
        self._names = list(inspect.signature(module.forward).parameters)

    def __call__(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        dims = self._owner.region.dynamic_dims
        for name, value in (*zip(self._names, args, strict=False), *kwargs.items()):
            if name in dims:
                for tensor in value if isinstance(value, tuple) else (value,):
                    private.mark_dynamic(tensor, dims[name])
        self._owner.running = id(self._module)
        try:
            if not self._owner.captured:
                with _collector_paused():
                    return self._compiled(self._module, args, kwargs)
            return self._compiled(self._module, args, kwargs)
        except H3OptError as error:
            self._planner.failed(error)
            raise
        except private.BackendCompilerFailed as failure:
            ours = failure.inner_exception
            if not isinstance(ours, H3OptError):
                raise
            self._planner.failed(ours)
            raise ours from None
        except private.Unsupported as failure:
            reason = str(failure).strip().partition("\n")[0].rstrip(".")
            refusal = PipelineError(
                f"{self._owner.name} cannot be captured as one graph: {reason}. Take off what was added to "
                f"{type(self._module).__name__} (hooks, adapters, a patched forward), or run it without h3opt."
            )
            self._planner.failed(refusal)
            raise refusal from failure


@contextmanager
def _collector_paused() -> Iterator[None]:
    """For a region's first call: tracing makes objects by the million, and collections would find none to free."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class _Held:
    """Calls a captured graph that its region holds."""

    def __init__(self, captured: CapturedGraph) -> None:
        self._captured = weakref.ref(captured)

    def __call__(self, *args: Any) -> Any:
        captured = self._captured()
        assert captured is not None
        return captured(*args)


def _own_code_object(captured_region: CapturedRegion, planner: Planner) -> Callable[..., Any]:
    """A compiled caller whose code object belongs to this region alone.

    Dynamo keeps its graphs, and its limit on recompilations, per code object. ``module.compile()`` shares one between
    all modules of a process; a copy per region keeps two pipelines, or two plans, out of each other's way.
    """

    def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return private.module_call(module, args, kwargs)

    # Dynamo keeps backends, and what they return, in places that outlive a pipeline: they must not keep it alive.
    region_ref, planner_ref = weakref.ref(captured_region), weakref.ref(planner)

    def backend(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        region, planner = region_ref(), planner_ref()
        assert region is not None and planner is not None  # both are held by whoever is calling
        captured = CapturedGraph(region, retrace(graph), example_inputs, planner)
        region.captured.append(captured)
        return _Held(captured)

    name = f"h3opt_{captured_region.name.replace('.', '_')}"
    own = types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name)
    return torch.compile(own, backend=backend, fullgraph=True)
