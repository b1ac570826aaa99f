"""The private and semi-private names of torch on which h3opt relies, in one place.

| name | purpose | tested with |
|---|---|---|
| ``torch._dynamo.maybe_mark_dynamic`` | make token dimensions symbolic from the first capture | 2.11.0, 2.14.1 |
| ``torch._dynamo.exc.BackendCompilerFailed`` | raise the error of a backend without the wrapper | 2.11.0, 2.14.1 |
| ``torch._dynamo.exc.FailOnRecompileLimitHit`` | report what is captured anew with every call | 2.14.1 |
| ``torch._dynamo.exc.TorchDynamoException`` | base class of errors that stop a compilation | 2.14.1 |
| ``torch._dynamo.pgo`` | make the strengths of adapters inputs of a graph from the first capture | 2.14.1 |
| ``torch._dynamo.utils.counters`` | count graphs that are compiled, and cache hits of Inductor | 2.14.1 |
| ``torch._inductor.utils.clear_caches`` | make Inductor read compiled graphs from its cache folder again | 2.14.1 |
| ``torch._inductor.compile_fx.compile_fx`` | the ``inductor`` executor | 2.11.0, 2.14.1 |
| ``torch._subclasses.FakeTensor`` | shapes of traced and rewritten nodes | 2.11.0, 2.14.1 |
| ``torch.nn.attention._sdpa_kernel``, ``_cur_sdpa_kernel_backends`` | the backends in ``sdpa_kernel`` | 2.14.1 |
| ``nn.Module._compiled_call_impl`` | the attribute that ``module.compile()`` sets and calls go to | 2.11.0, 2.14.1 |
| ``nn.Module._call_impl`` | the call with hooks, as ``module.compile()`` captures it | 2.11.0, 2.14.1 |
| ``SymInt.node.hint`` | real sizes for the probe | 2.11.0, 2.14.1 |
| ``torch.fx.experimental.proxy_tensor.make_fx`` | tracing to the semantic graph | 2.11.0, 2.14.1 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as RecompileLimit
from torch._dynamo.exc import TorchDynamoException as CompileFailed
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import _cur_sdpa_kernel_backends as sdpa_backends
from torch.nn.attention import _sdpa_kernel as set_sdpa_backends

__all__ = [
    "BackendCompilerFailed",
    "CompileFailed",
    "FakeTensor",
    "RecompileLimit",
    "compile_counts",
    "compile_with_inductor",
    "forget_compiled",
    "make_fx",
    "mark_dynamic",
    "mark_floats_dynamic",
    "module_call",
    "sdpa_backends",
    "set_compiled_call",
    "set_sdpa_backends",
    "size_hint",
]


def mark_dynamic(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Ask Dynamo to treat ``dims`` as symbolic; sizes 0 and 1 are specialized in any case."""
    for dim in dims:
        maybe_mark_dynamic(tensor, dim)


def mark_floats_dynamic(function: Callable[..., Any], sources: Iterable[str]) -> None:
    """Ask Dynamo to make floats inputs of the graph of ``function``; without this, the second value captures again.

    Args:
        function: compiled afterwards; it must not have a closure.
        sources: the floats as Dynamo names them, e.g. ``L['module'].scaling['style']``.
    """
    from torch._dynamo.pgo import CodeId, FrameStateSizeEntry, auto_dynamic, get_code_state

    state = get_code_state()[CodeId.make(function.__code__)]
    for source in sources:
        state.automatic_dynamic[source] = FrameStateSizeEntry(auto_dynamic, auto_dynamic, auto_dynamic)


def compile_with_inductor(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile ``graph`` with Inductor. Call this inside a Dynamo backend, where symbolic sizes are known."""
    from torch._inductor.compile_fx import compile_fx

    return cast(Callable[..., Any], compile_fx(graph, example_inputs))


def compile_counts() -> dict[str, int]:
    """Count the graphs that Dynamo has captured (``graphs``) and those that Inductor took from its cache (``hits``)."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "hits": counters["inductor"]["fxgraph_cache_hit"]}


def forget_compiled() -> None:
    """Clear Inductor's in-memory copy of the cache folder; functions that are already compiled keep running."""
    from torch._inductor.utils import clear_caches

    clear_caches()


def module_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with its hooks, but without the compiled call that :func:`set_compiled_call` installs."""
    return module._call_impl(*args, **kwargs)


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Make calls of ``module`` go to ``call``, or to the module itself for ``None``.

    This is the attribute that ``module.compile()`` sets: the module keeps its type, the signature of ``forward`` and
    the state dict, and copies and pickles do not contain it.

    Returns:
        The previous value.
    """
    previous = module._compiled_call_impl
    module._compiled_call_impl = call  # type: ignore[assignment]
    return previous


def size_hint(size: int | torch.SymInt) -> int:
    """Return the size that a symbolic dimension had at capture."""
    return size if isinstance(size, int) else int(cast(int, size.node.hint))
