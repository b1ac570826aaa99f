"""Trace a Dynamo graph or a function to a semantic graph.

A semantic graph holds ATen operators before decomposition and dispatch, so that a node is what the model wrote: an
``rms_norm`` is one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3opt import _torch_private as private
from h3opt.errors import PipelineError
from h3opt.graph.nodes import note_attention_backends


def retrace(graph: GraphModule) -> GraphModule:
    """Trace a Dynamo graph to the semantic graph with the same placeholders.

    Attention that the model calls under ``sdpa_kernel`` has the backends in
    :func:`h3opt.graph.nodes.attention_backends`: the context itself is no operator, so that it leaves no node.

    Raises:
        PipelineError: the graph has no tensor input, so there is nothing to rewrite.
    """
    examples: list[Any] = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    fake_mode = next((value.fake_mode for value in examples if isinstance(value, private.FakeTensor)), None)
    if fake_mode is None:
        raise PipelineError("The captured graph has no tensor input. Compile a module that takes tensors.")
    # Node by node, so that each new node records the module of the model that it came from.
    with fake_mode, torch.fx.traceback.preserve_node_meta():
        return private.make_fx(
            _DynamoInterpreter(graph).run, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True
        )(*examples)


def trace(function: Callable[..., Any], args: Sequence[Any]) -> GraphModule:
    """Trace a function of tensors to a semantic graph, with the sizes of ``args``."""
    with torch.no_grad():
        return private.make_fx(function, pre_dispatch=True, tracing_mode="fake")(*args)


class _DynamoInterpreter(Interpreter):
    """Runs a Dynamo graph, and notes on the nodes inside ``sdpa_kernel`` which backends are allowed there.

    Dynamo writes entering and leaving the context as two calls of the same function, which sets the backends.
    """

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self._outside: list[set[SDPBackend]] = []  # the backends outside each context that has been entered
        self._inside: list[tuple[list[SDPBackend], bool]] = []  # the backends of these contexts, and whether in order

    def run_node(self, n: Node) -> Any:
        if n.target is private.set_sdpa_backends:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self._switch(*args, **kwargs)
            return None
        if not self._inside:
            return super().run_node(n)
        backends, in_order = self._inside[-1]
        note_attention_backends(n, [backend.name for backend in backends], in_order)
        with sdpa_kernel(backends, set_priority=in_order):
            return super().run_node(n)

    def _switch(self, backends: Sequence[SDPBackend], set_priority: bool = False) -> None:
        if self._outside and set(backends) == self._outside[-1]:
            self._outside.pop()
            self._inside.pop()
            return
        current = self._inside[-1][0] if self._inside else private.sdpa_backends()
        self._outside.append(set(current))
        self._inside.append((list(backends), set_priority))
