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
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch.fx import GraphModule

from h3opt import _torch_private as private
from h3opt.errors import H3OptError, PipelineError
from h3opt.graph.tracing import retrace
from h3opt.pipeline.hooks import around


class Planner(Protocol):
    """Whoever decides how a captured graph is rewritten and run; see :class:`h3opt.session.Session`."""

    @property
    def plan_key(self) -> Any:
        """Changes whenever graphs must be rewritten anew."""

    def build(self, captured: CapturedGraph) -> Callable[..., Any]:
        """Rewrite ``captured`` under the current plan and return what runs it."""

    def failed(self, error: H3OptError) -> None:
        """A capture or a rewrite raised ``error``, which is about to reach the user."""


@dataclass(eq=False)
class Region:
    """Modules that share captured graphs: the repeated blocks of one model, or one model as a whole.

    Attributes:
        name: e.g. ``"transformer.block"``.
        modules: the modules; all of one class.
        dynamic_dims: for each positional or keyword argument of ``forward``, the dimensions that vary between calls
            (tokens, rows of a table); tuples of tensors share one entry.
        holds: how many repeated blocks of each kind one graph spans; itself once unless it is a whole model.
        captured: the graphs so far.
        running: ``id`` of the module called last.
        listener: told ``(captured, args)`` before a graph runs; what bisection hears with.
    """

    name: str
    modules: Sequence[torch.nn.Module]
    dynamic_dims: dict[str, tuple[int, ...]]
    holds: dict[str, int] = field(default_factory=dict)
    captured: list[CapturedGraph] = field(default_factory=list)
    running: int = 0
    listener: Callable[[CapturedGraph, tuple[Any, ...]], None] | None = None
    _compiled: dict[tuple[type, ...], Callable[..., Any]] = field(default_factory=dict)

    def install(self, planner: Planner) -> Callable[[], None]:
        """Send every module's calls through a captured graph; returns what undoes it."""
        # Passes that exchange submodules need graphs of their own; those for the earlier structure are kept.
        structure = tuple(type(submodule) for submodule in self.modules[0].modules())
        if structure not in self._compiled:
            self._compiled[structure] = _own_code_object(self, planner)
        undo = ExitStack()
        for module in self.modules:
            around(module, _Entry(self, module, self._compiled[structure], planner), undo, innermost=True)
        return undo.close


class CapturedGraph:
    """One semantic graph of a region, and the executables made from it, one per plan.

    Attributes:
        region: where it was captured.
        graph: the semantic graph, never rewritten itself; ``node.meta["val"]`` has fake values.
        example_inputs: what Dynamo passed along, for executors that compile.
        calls: how often it ran.
        modules: ``id`` of each module that ran it.
    """

    def __init__(self, region: Region, graph: GraphModule, example_inputs: list[Any], planner: Planner) -> None:
        self.region = region
        self.graph = graph
        self.example_inputs = example_inputs
        self.calls = 0
        self.modules: set[int] = set()
        self._planner = planner
        self._executables: dict[Any, Callable[..., Any]] = {}
        self._executable()  # built here, inside Dynamo's backend, where compilers know the symbolic sizes
        self.example_inputs = []

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if (noted := _noted.get()) is not None:
            noted.append(self)
        self.modules.add(self.region.running)
        if self.region.listener is not None:
            self.region.listener(self, args)
        return self._executable()(*args)

    def _executable(self) -> Callable[..., Any]:
        key = self._planner.plan_key
        if key not in self._executables:
            self._executables[key] = self._planner.build(self)
        return self._executables[key]


_noted: ContextVar[list[CapturedGraph] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[CapturedGraph]]:
    """Lists the captured graphs that run in the body, once for each call."""
    token = _noted.set([])
    try:
        yield cast(list[CapturedGraph], _noted.get())
    finally:
        _noted.reset(token)


def dynamo_backend(graph: GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None) -> Any:
    """``torch.compile(module, backend="h3opt", options={"passes": [...], "executor": "direct"})``.

    For modules h3opt does not know: the named graph passes run on whatever was captured, with no expectation of how
    often they fire. :func:`h3opt.optimize` is the call for pipelines.
    """
    from h3opt.session import StandalonePlanner

    planner = StandalonePlanner(**(options or {}))
    return CapturedGraph(Region("", (), {}), retrace(graph), example_inputs, planner)


class _Entry:
    """What a captured module's calls go to."""

    def __init__(self, region: Region, module: torch.nn.Module, compiled: Callable[..., Any], planner: Planner):
        self._region, self._module, self._compiled, self._planner = region, module, compiled, planner
        self._names = list(inspect.signature(module.forward).parameters)

    def __call__(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        dims = self._region.dynamic_dims
        for name, value in (*zip(self._names, args, strict=False), *kwargs.items()):
            if name in dims:
                for tensor in value if isinstance(value, tuple) else (value,):
                    private.mark_dynamic(tensor, dims[name])
        self._region.running = id(self._module)
        try:
            if not self._region.captured:
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
                f"{self._region.name} cannot be captured as one graph: {reason}. Take off what was added to "
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


def _own_code_object(region: Region, planner: Planner) -> Callable[..., Any]:
    """A compiled caller whose code object belongs to this region alone.

    Dynamo keeps its graphs, and its limit on recompilations, per code object. ``module.compile()`` shares one between
    all modules of a process; a copy per region keeps two pipelines, or two plans, out of each other's way.
    """

    def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return private.module_call(module, args, kwargs)

    # Dynamo keeps backends, and what they return, in places that outlive a pipeline: they must not keep it alive.
    owner, decides = weakref.ref(region), weakref.ref(planner)

    def backend(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        region, planner = owner(), decides()
        assert region is not None and planner is not None  # both are held by whoever is calling
        captured = CapturedGraph(region, retrace(graph), example_inputs, planner)
        region.captured.append(captured)
        return _Held(captured)

    name = f"h3opt_{region.name.replace('.', '_')}"
    own = types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name)
    return torch.compile(own, backend=backend, fullgraph=True)
