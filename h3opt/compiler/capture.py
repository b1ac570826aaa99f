"""Capture the *semantic graph* of a module while it runs, and run the rewritten graph in its place.

Dynamo gives a backend a graph of Python calls. Retracing it with ``make_fx(pre_dispatch=True)`` under the fake mode of
the placeholders gives a graph of the operators that the model was written in (``aten.linear``, ``aten.rms_norm``,
``aten.scaled_dot_product_attention``), functional and with symbolic sizes. Executed node by node it computes the same
bits as the eager module; therefore passes rewrite this graph, and not the graph after decomposition.
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
from h3opt.compiler.structure import adapter_strengths, hook_functions, structure_of
from h3opt.errors import H3OptError, PipelineError
from h3opt.graph.tracing import retrace
from h3opt.pipeline.graph_calls import note_graph_call
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.region import Region

MAX_STRUCTURES = 64
"""Structures of a region that are kept, besides one for each module; see :mod:`h3opt.compiler.structure`."""


class Planner(Protocol):
    """Decides how captured graphs are rewritten and run; see :class:`h3opt.compiler.session.Session`."""

    @property
    def plan_key(self) -> Any:
        """A key for the current plan; another key means that graphs must be rewritten again."""

    def build(self, captured: CapturedGraph) -> LoweredGraph:
        """Rewrite ``captured`` under the current plan."""

    def failed(self, error: H3OptError) -> None:
        """Called when a capture or a rewrite raised ``error``, before the user sees it."""


@dataclass(eq=False)
class CapturedRegion:
    """The captured graphs of a region, and the state of the running call.

    Modules share graphs only as long as they have the same structure, see :mod:`h3opt.compiler.structure`.

    Attributes:
        region: the modules that are captured.
        captured: the graphs captured so far.
        running: ``id`` of the module that was called last.
        listener: called as ``listener(captured, args)`` before a graph runs; bisection keeps arguments with it.
    """

    region: Region
    captured: list[CapturedGraph] = field(default_factory=list)
    running: int = 0
    listener: Callable[[CapturedGraph, tuple[Any, ...]], None] | None = None
    _structures: dict[tuple[Any, ...], _Structure] = field(default_factory=dict)
    _calls: int = 0

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
        undo = ExitStack()
        for module in self.modules:
            wrap_calls(module, _Entry(self, module, planner), undo, innermost=True)
        return undo.close

    def compiled_for(self, module: torch.nn.Module, planner: Planner) -> Callable[..., Any]:
        """The compiled function for the present structure of ``module``; graphs of earlier structures are kept.

        Raises:
            PipelineError: the structure is another with every call, so capturing would never end.
        """
        key = structure_of(module)
        structure = self._structures.get(key)
        if structure is None:
            if len(self._structures) >= MAX_STRUCTURES + len(self.modules):
                self._drop_least_recent()
            structure = self._structures[key] = _Structure(hook_functions(module))
            structure.compiled = _own_code_object(self, structure, planner, adapter_strengths(module))
        self._calls += 1
        structure.calls, structure.last_call = structure.calls + 1, self._calls
        return structure.compiled

    def _drop_least_recent(self) -> None:
        dropped = self._structures.pop(min(self._structures, key=lambda key: self._structures[key].last_call))
        self.captured = [graph for graph in self.captured if all(graph is not other for other in dropped.captured)]
        if dropped.calls == 1:
            raise PipelineError(
                f"{self.name} gets new hooks or adapters for every call, and each call needs a new capture. Add them "
                "once, or run it without h3opt."
            )


@dataclass(eq=False)
class _Structure:
    """What is captured for one structure of the modules of a region.

    Attributes:
        hooks: hooks that the key of the structure has by ``id``: they must live as long as the key.
        compiled: called as ``compiled(module, args, kwargs)``.
        captured: the graphs.
        calls: how often a module of this structure was called.
        last_call: number of the last such call, among all calls of the region.
    """

    hooks: list[Any]
    compiled: Callable[..., Any] = field(init=False)
    captured: list[CapturedGraph] = field(default_factory=list)
    calls: int = 0
    last_call: int = 0


class CapturedGraph:
    """A semantic graph of a region, and the rewritten graph for each plan.

    Attributes:
        owner: the region that it was captured in.
        graph: the semantic graph, which is never changed; ``node.meta["val"]`` has fake values.
        example_inputs: the inputs that Dynamo captured with, for executors that compile; empty after the first rewrite.
        calls: how often the graph ran.
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
        self._lower()  # inside Dynamo's backend, where compilers know the symbolic sizes
        self.example_inputs = []

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        note_graph_call(self)
        self.modules.add(self.owner.running)
        if self.owner.listener is not None:
            self.owner.listener(self, args)
        return self._lower().run(*args)

    def lowered(self, plan_key: Any) -> LoweredGraph | None:
        """The rewritten graph under ``plan_key``; ``None`` if it did not run under that plan yet."""
        return self._lowered.get(plan_key)

    def _lower(self) -> LoweredGraph:
        key = self._planner.plan_key
        if key not in self._lowered:
            self._lowered[key] = self._planner.build(self)
        return self._lowered[key]


class _Entry:
    """A call wrapper that sends the calls of a module through a captured graph."""

    def __init__(self, owner: CapturedRegion, module: torch.nn.Module, planner: Planner) -> None:
        self._owner, self._module, self._planner = owner, module, planner
        self._names = list(inspect.signature(module.forward).parameters)

    def __call__(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        dims = self._owner.region.dynamic_dims
        for name, value in (*zip(self._names, args, strict=False), *kwargs.items()):
            if name in dims:
                for tensor in value if isinstance(value, tuple) else (value,):
                    private.mark_dynamic(tensor, dims[name])
        self._owner.running = id(self._module)
        try:
            compiled = self._owner.compiled_for(self._module, self._planner)
            if not self._owner.captured:
                with _collector_paused():
                    return compiled(self._module, args, kwargs)
            return compiled(self._module, args, kwargs)
        except H3OptError as error:
            self._planner.failed(error)
            raise
        except private.BackendCompilerFailed as failure:
            cause = failure.inner_exception
            if isinstance(cause, H3OptError):
                self._planner.failed(cause)
                raise cause from None
            if isinstance(cause, torch.OutOfMemoryError):
                raise
            raise self._refusal(f"cannot be traced: {_first_line(cause)}") from failure
        except private.RecompileLimit as failure:
            reason = "reads something that changes with every call, so that every call would be captured anew"
            raise self._refusal(reason) from failure
        except private.CompileFailed as failure:
            raise self._refusal(f"cannot be captured as one graph: {_first_line(failure)}") from failure

    def _refusal(self, reason: str) -> PipelineError:
        """The error for a module that cannot be captured; the planner is told."""
        refusal = PipelineError(
            f"{self._owner.name} {reason}. Take off what was added to {type(self._module).__name__} (hooks, adapters, "
            "a patched forward), or run it without h3opt."
        )
        self._planner.failed(refusal)
        return refusal


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).partition("\n")[0].rstrip(".")


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector for a first call: tracing makes millions of objects and no garbage."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class _WeakGraph:
    """Calls a captured graph without keeping it alive; the region keeps it."""

    def __init__(self, captured: CapturedGraph) -> None:
        self._captured = weakref.ref(captured)

    def __call__(self, *args: Any) -> Any:
        captured = self._captured()
        assert captured is not None
        return captured(*args)


def _own_code_object(
    captured_region: CapturedRegion, structure: _Structure, planner: Planner, varying: Sequence[str]
) -> Callable[..., Any]:
    """A compiled caller with a code object for one structure of this region alone.

    Dynamo keeps graphs, and the limit on recompilations, per code object. ``module.compile()`` shares one between
    all modules of a process; with a copy per region and structure, neither two pipelines nor two adapters affect each
    other.

    Args:
        varying: floats inside the module that a graph takes as inputs, as paths that start at the module.
    """

    def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return private.module_call(module, args, kwargs)

    # Dynamo keeps backends and their results longer than a pipeline lives; they must not keep the pipeline alive.
    region_ref, planner_ref = weakref.ref(captured_region), weakref.ref(planner)
    structure_ref = weakref.ref(structure)

    def backend(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        region, structure, planner = region_ref(), structure_ref(), planner_ref()
        assert region is not None and structure is not None and planner is not None  # the caller keeps them alive
        captured = CapturedGraph(region, retrace(graph), example_inputs, planner)
        region.captured.append(captured)
        structure.captured.append(captured)
        return _WeakGraph(captured)

    name = f"h3opt_{captured_region.name.replace('.', '_')}"
    own = types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name)
    private.mark_floats_dynamic(own, [f"L['module']{path}" for path in varying])
    return torch.compile(own, backend=backend, fullgraph=True)
