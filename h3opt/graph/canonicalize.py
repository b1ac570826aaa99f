"""Bring a semantic graph into canonical form, so that one pattern per rewrite is enough.

Every step preserves the bits of the outputs. The steps remove operators without effect (``dropout`` in inference, a
cast to the dtype that a tensor already has), replace equivalent operators by one of them, write arguments in one form,
and merge nodes that compute the same value.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from h3opt.graph.nodes import attention_backends, mutating_node, value

aten = torch.ops.aten

_PYTHON_OPERATORS: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.neg: aten.neg.default,
}
_EQUIVALENT_OVERLOADS: dict[Any, Any] = {aten.add.Scalar: aten.add.Tensor, aten.mul.Scalar: aten.mul.Tensor}
_TO_END = 2**63 - 1  # the end of a slice that has none


def canonicalize(module: GraphModule) -> GraphModule:
    """Bring the graph of ``module`` into canonical form, in place, and return the module.

    A graph that writes to tensors stays as it is: merging or removing nodes around a write could change results.
    """
    if mutating_node(module) is None:
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                normalize(node)
                _remove_if_without_effect(node)
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                _convert_to_slices(node)
        _merge_equal_nodes(module)
        module.graph.eliminate_dead_code()
        module.recompile()
    return module


def normalize(node: Node) -> None:
    """Write an operator and the arguments of a node in canonical form."""
    if "val" not in node.meta or value(node) is not None:  # a pattern, or tensors: sizes keep the operators of Python
        node.target = _PYTHON_OPERATORS.get(node.target, node.target)  # type: ignore[arg-type]
    node.target = _EQUIVALENT_OVERLOADS.get(node.target, node.target)  # type: ignore[arg-type]
    _normalize_arguments(node)
    source = value(node.args[0]) if node.args else None
    if node.target is aten.transpose.int and source is not None:
        order = list(range(source.ndim))
        first, second = (int(dim) % source.ndim for dim in node.args[1:3])  # type: ignore[arg-type, call-overload]
        order[first], order[second] = order[second], order[first]
        node.target, node.args = aten.permute.default, (node.args[0], order)
    concatenated = value(node)
    if node.target is aten.cat.default and concatenated is not None:
        node.args = (node.args[0], int(node.args[1] if len(node.args) > 1 else 0) % concatenated.ndim)  # type: ignore[arg-type]


def _normalize_arguments(node: Node) -> None:
    """Move keyword arguments to their positions and remove trailing arguments that equal the defaults of the schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    args = list(node.args)
    kwargs = dict(node.kwargs)
    for argument in positional[len(args) :]:
        if argument.name in kwargs:
            args.append(kwargs.pop(argument.name))
        elif kwargs and argument.has_default_value():
            args.append(argument.default_value)
        else:
            break
    while len(args) > 0 and positional[len(args) - 1].has_default_value():
        default, last = positional[len(args) - 1].default_value, args[-1]
        if isinstance(last, Node) or type(last) is not type(default) or last != default:
            break
        args.pop()
    keyword_only = {argument.name: argument for argument in schema.arguments if argument.kwarg_only}
    for name in list(kwargs):
        argument = keyword_only.get(name)
        if argument is not None and argument.has_default_value() and _equal(kwargs[name], argument.default_value):
            del kwargs[name]
    node.args, node.kwargs = tuple(args), kwargs


def _remove_if_without_effect(node: Node) -> None:
    source = node.args[0] if node.args else None
    before, after = value(source), value(node)
    if before is None or after is None or not isinstance(source, Node):
        return
    without_effect = False
    if node.target is aten.dropout.default:
        without_effect = bool(node.args[1] == 0.0 or node.args[2] is False)
    elif node.target in (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.type_as.default):
        # Other arguments ask for a copy or another memory format.
        copies = any(
            argument not in (None, False) and not isinstance(argument, torch.dtype) for argument in node.args[2:]
        )
        same_type = before.dtype == after.dtype and before.device == after.device
        without_effect = same_type and not copies and not node.kwargs
    elif node.target is aten.slice.Tensor:
        _, dim, start, end, step = _slice_arguments(node)
        without_effect = start in (0, None) and step == 1 and (end in (None, _TO_END) or end == before.shape[dim])
    elif node.target in (aten.alias.default, aten.lift_fresh.default):
        without_effect = True
    elif node.target in (aten.view.default, aten.reshape.default, aten.expand.default):
        without_effect = before.shape == after.shape
    if without_effect:
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _convert_to_slices(node: Node) -> None:
    """Replace ``chunk``, ``split`` and ``narrow`` along a dimension of known size by ``slice``.

    Dimensions and bounds of all slices are counted from the front.
    """
    source = value(node.args[0]) if node.args else None
    if source is None:
        return
    if node.target is aten.slice.Tensor:
        _, dim, start, end, step = _slice_arguments(node)
        dim = int(dim) % source.ndim  # type: ignore[arg-type, call-overload]
        size = source.shape[dim]
        if isinstance(size, int) and all(bound is None or isinstance(bound, int) for bound in (start, end)):
            first, last, _ = slice(start, None if end == _TO_END else end).indices(size)
            node.args = (node.args[0], dim, first, last, *((step,) if step != 1 else ()))
    elif node.target in (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default):
        parts = list(_parts(node, source))
        dim = int(node.args[2] if len(node.args) > 2 else 0) % source.ndim  # type: ignore[arg-type]
        users = list(node.users)
        if not parts or any(user.target is not operator.getitem for user in users):
            return
        for user in users:
            start, end = parts[user.args[1]]  # type: ignore[index]
            user.target, user.args = aten.slice.Tensor, (node.args[0], dim, start, end)
    elif node.target is aten.narrow.default:
        dim, start, length = cast("tuple[Any, ...]", node.args[1:4])
        if all(isinstance(part, int) for part in (dim, start, length)):
            dim = dim % source.ndim  # type: ignore[operator]
            if start < 0:  # type: ignore[operator]
                if not isinstance(source.shape[dim], int):
                    return
                start += source.shape[dim]  # type: ignore[operator]
            node.target, node.args = aten.slice.Tensor, (node.args[0], dim, start, start + length)  # type: ignore[operator]


def _slice_arguments(node: Node) -> tuple[Any, ...]:
    return (*node.args, *(None, 0, None, None, 1)[len(node.args) :])


def _parts(node: Node, source: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield start and end of each result of a ``chunk`` or ``split``; nothing where sizes are symbolic."""
    dim = int(node.args[2] if len(node.args) > 2 else 0) % source.ndim  # type: ignore[arg-type]
    size = source.shape[dim]
    if not isinstance(size, int):
        return
    if node.target is aten.split_with_sizes.default:
        lengths = list(node.args[1])  # type: ignore[arg-type]
        if not all(isinstance(length, int) for length in lengths):
            return
    else:
        step = node.args[1]
        if not isinstance(step, int):
            return
        step = -(-size // step) if node.target is aten.chunk.default else step
        lengths = [min(step, size - start) for start in range(0, size, step)]
    start = 0
    for length in lengths:
        yield start, start + length
        start += length


def _merge_equal_nodes(module: GraphModule) -> None:
    """Eliminate common subexpressions: else three layers that read one tensor would quantize it three times."""
    seen: dict[Any, Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if _switches_mode(node):  # autocast, grad mode: equal operators before and after compute different values
            seen.clear()
        if not _is_pure(node) or any(user.op == "output" for user in node.users):
            continue  # outputs stay separate tensors: the caller may write to one of them
        key = (node.target, _hashable(node.args), _hashable(node.kwargs), attention_backends(node))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            module.graph.erase_node(node)
        else:
            seen[key] = node


def _switches_mode(node: Node) -> bool:
    return not hasattr(node.target, "_schema") and getattr(node.target, "__module__", "") not in ("_operator", "math")


def _is_pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if node.target is aten.clone.default:
        return False
    tags = getattr(node.target, "tags", None)
    return tags is not None and torch.Tag.nondeterministic_seeded not in tags


def _hashable(argument: Any) -> Any:
    """Return a key that is equal for equal arguments only."""
    if isinstance(argument, (list, tuple)):
        return tuple(_hashable(item) for item in argument)
    if isinstance(argument, dict):
        return tuple(sorted((name, _hashable(item)) for name, item in argument.items()))
    # 1, 1.0 and True are equal in Python but not for an operator, and 0.0 is not -0.0.
    return (type(argument), repr(argument)) if isinstance(argument, (int, float)) else argument


def _equal(left: Any, right: Any) -> bool:
    return not isinstance(left, Node) and type(left) is type(right) and left == right
