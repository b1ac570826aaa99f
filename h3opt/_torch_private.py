"""Every private or semi-private torch name h3opt relies on, in one place.

| name | used for | tried on |
|---|---|---|
| ``torch._dynamo.maybe_mark_dynamic`` | token dimensions are symbolic from the first capture | 2.11.0, 2.14.1 |
| ``torch._dynamo.exc.BackendCompilerFailed`` | a backend's own error is raised as itself | 2.11.0, 2.14.1 |
| ``torch._dynamo.exc.Unsupported`` | a graph break is said in h3opt's words | 2.14.1 |
| ``torch._dynamo.exc.TorchDynamoException`` | whatever stops a compilation | 2.14.1 |
| ``torch._dynamo.utils.counters`` | graphs compiled, and served by Inductor's cache | 2.14.1 |
| ``torch._inductor.utils.clear_caches`` | what was compiled is read from its folder again | 2.14.1 |
| ``torch._inductor.compile_fx.compile_fx`` | the ``inductor`` executor | 2.11.0, 2.14.1 |
| ``torch._subclasses.FakeTensor`` | shapes of traced and rewritten nodes | 2.11.0, 2.14.1 |
| ``nn.Module._compiled_call_impl`` | the slot ``module.compile()`` sets; calls go there | 2.11.0, 2.14.1 |
| ``nn.Module._call_impl`` | the call with its hooks, as ``module.compile()`` captures it | 2.11.0, 2.14.1 |
| ``SymInt.node.hint`` | real sizes for the probe | 2.11.0, 2.14.1 |
| ``torch.fx.experimental.proxy_tensor.make_fx`` | tracing to the semantic graph | 2.11.0, 2.14.1 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.exc import TorchDynamoException as CompileFailed
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = [
    "BackendCompilerFailed",
    "CompileFailed",
    "FakeTensor",
    "Unsupported",
    "compile_counts",
    "compile_with_inductor",
    "forget_compiled",
    "make_fx",
    "mark_dynamic",
    "module_call",
    "set_compiled_call",
    "size_hint",
]


def mark_dynamic(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Ask Dynamo to treat ``dims`` as symbolic; sizes 0 and 1 are specialised all the same."""
    for dim in dims:
        maybe_mark_dynamic(tensor, dim)


def compile_with_inductor(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile ``graph`` as Inductor would; call it inside a Dynamo backend, where symbolic sizes are known."""
    from torch._inductor.compile_fx import compile_fx

    return cast(Callable[..., Any], compile_fx(graph, example_inputs))


def compile_counts() -> dict[str, int]:
    """How many graphs Dynamo captured so far (``graphs``), and how many Inductor took from its cache (``hits``)."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "hits": counters["inductor"]["fxgraph_cache_hit"]}


def forget_compiled() -> None:
    """Drop what Inductor holds in memory of its cache folder; functions already compiled keep running."""
    from torch._inductor.utils import clear_caches

    clear_caches()


def module_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's call with its hooks, below any compiled entry."""
    return module._call_impl(*args, **kwargs)


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Send calls of ``module`` to ``call`` (``None``: back to the module itself) and return what was there.

    This is the slot ``module.compile()`` uses: the module keeps its type, its ``forward`` signature and its state
    dict, and copies and pickles leave the slot behind.
    """
    previous = module._compiled_call_impl
    module._compiled_call_impl = call  # type: ignore[assignment]
    return previous


def size_hint(size: int | torch.SymInt) -> int:
    """The size a symbolic dimension had when it was captured."""
    return size if isinstance(size, int) else int(cast(int, size.node.hint))
