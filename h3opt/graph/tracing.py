"""Trace a Dynamo graph or a function to a semantic graph.

A semantic graph holds ATen operators before decomposition and dispatch, so that a node is what the model wrote: an
``rms_norm`` is one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from h3opt import _torch_private as private
from h3opt.errors import PipelineError


def retrace(graph: GraphModule) -> GraphModule:
    """Trace a Dynamo graph to the semantic graph with the same placeholders.

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
            torch.fx.Interpreter(graph).run, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True
        )(*examples)


def trace(function: Callable[..., Any], args: Sequence[Any]) -> GraphModule:
    """Trace a function of tensors to a semantic graph, with the sizes of ``args``."""
    with torch.no_grad():
        return private.make_fx(function, pre_dispatch=True, tracing_mode="fake")(*args)
