"""The evidence of a broken promise: one call without a pass and with it, saved with its tensors.

A folder of evidence holds ``evidence.json`` and ``tensors.safetensors`` and appears whole or not at all.
:mod:`h3opt.verification.replay` runs the call again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from h3opt.environment import versions
from h3opt.errors import CheckpointError, PipelineError
from h3opt.files import temporary_sibling
from h3opt.metrics.bits import bits_equal

BITS_EQUAL = "bits equal"
"""What :func:`describe_difference` says of equal tensors."""

_INDEX, _TENSORS = "evidence.json", "tensors.safetensors"


@dataclass
class CallEvidence:
    """One call of a module, or one site of a rule, without a pass and with it.

    Attributes:
        name, options: name and options of the pass.
        kind: ``"site"``: pattern and replacement of a rule were called; ``"module"``: the module at ``module`` was.
        module: path of the module in the pipeline.
        call: number of the call of the module, from 0.
        others: (name, options) of the other passes that were on.
        site: the site in words, for people.
        rule: number of the rule of the pass.
        inputs: the tensors that were read, by name.
        arguments: positional and keyword arguments as JSON, with names of tensors in place of tensors.
        expected: the tensors that were returned without the pass.
        actual: the tensors that were returned with the pass.
        dtype: dtype of the model; see :attr:`h3opt.pipeline.view.PipelineView.dtype`.
        device: type of the device that the call ran on.
    """

    name: str
    options: dict[str, Any]
    kind: str
    module: str
    call: int
    others: list[tuple[str, dict[str, Any]]]
    site: str | None = None
    rule: int = 0
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    arguments: Any = None
    expected: list[torch.Tensor] = field(default_factory=list)
    actual: list[torch.Tensor] = field(default_factory=list)
    dtype: torch.dtype = field(kw_only=True)
    device: str = field(kw_only=True)

    @property
    def difference(self) -> str:
        """How ``actual`` differs from ``expected``, in words."""
        return describe_difference(self.expected, self.actual)

    def call_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """``arguments`` with tensors in place of their names."""
        args, kwargs = self.arguments
        return _decode(args, self.inputs), _decode(kwargs, self.inputs)


def write_evidence(folder: Path, evidence: CallEvidence) -> None:
    """Write evidence to a folder, which appears whole or not at all and replaces older evidence.

    Raises:
        PipelineError: the folder cannot be written, or holds something else.
    """
    tensors = {f"input.{name}": tensor for name, tensor in evidence.inputs.items()}
    for prefix, returned in (("expected", evidence.expected), ("found", evidence.actual)):
        tensors |= {f"{prefix}.{number}": tensor for number, tensor in enumerate(returned)}
    index = {
        "pass": evidence.name,
        "options": evidence.options,
        "kind": evidence.kind,
        "module": evidence.module,
        "call": evidence.call,
        "others": evidence.others,
        "dtype": str(evidence.dtype).removeprefix("torch."),
        "device": evidence.device,
        "site": evidence.site,
        "rule": evidence.rule,
        "arguments": evidence.arguments,
        "moved": evidence.difference,
        "versions": versions(),
    }
    try:
        _check_replaceable(folder)
        with temporary_sibling(folder) as partial, temporary_sibling(folder.with_name(f"{folder.name}.old")) as old:
            partial.mkdir(parents=True)
            plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(plain, partial / _TENSORS)
            (partial / _INDEX).write_text(json.dumps(index, indent=2, default=str) + "\n", encoding="utf-8")
            if folder.exists():
                folder.rename(old)  # quick, while removing a folder takes time
            partial.rename(folder)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        why = getattr(error, "strerror", None) or error
        raise PipelineError(f"{folder} cannot be written: {why}. Give another folder.") from error


def check_folder(folder: Path, names: Iterable[str] = ()) -> None:
    """Check before the work that :func:`write_evidence` can write there after it.

    Args:
        folder: the folder for all evidence.
        names: names of the passes; each has a folder in it.

    Raises:
        PipelineError: nothing can be created there, or the folder of a pass holds something other than evidence.
    """
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise PipelineError(
            f"{folder} cannot be written: {existing} is no folder one can write to. Give another folder."
        )
    for name in names:
        _check_replaceable(folder / name)


def read_evidence(folder: Path) -> CallEvidence:
    """Read what :func:`write_evidence` wrote.

    Raises:
        CheckpointError: the evidence is missing, truncated or something else.
    """
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
        inputs = {name.removeprefix("input."): tensor for name, tensor in tensors.items() if name.startswith("input.")}
        evidence = CallEvidence(
            index["pass"],
            dict(index["options"]),
            index["kind"],
            index["module"],
            index["call"],
            [(name, dict(options)) for name, options in index["others"]],
            index["site"],
            index["rule"],
            inputs,
            index["arguments"],
            _numbered(tensors, "expected"),
            _numbered(tensors, "found"),
            dtype=_dtype_of(index["dtype"]),
            device=torch.device(index["device"]).type,
        )
        evidence.call_arguments()
        texts, numbers = (evidence.name, evidence.module), (evidence.call, evidence.rule)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(item, int) for item in numbers):
            raise ValueError("pass, module, call or rule is not what it should be")
        if evidence.rule < 0 or evidence.kind not in ("site", "module"):
            raise ValueError("it is of no site or module, or has no such rule")
        if not evidence.expected or not evidence.actual:
            raise ValueError("what was returned is missing")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no evidence that can be read ({type(error).__name__}: {error}). Give a folder that "
            "`h3opt verify` wrote; what an earlier version wrote may lack something, so verify again."
        ) from error
    return evidence


def describe_difference(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> str:
    """How two lists of tensors differ, in words; the first tensors that differ count."""
    if [(tensor.shape, tensor.dtype) for tensor in expected] != [(tensor.shape, tensor.dtype) for tensor in actual]:
        return "shapes or dtypes differ"
    comparisons = map(bits_equal, expected, actual)
    return next((str(comparison) for comparison in comparisons if not comparison), BITS_EQUAL)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries, e.g. in the output of a module, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def encode_arguments(arguments: tuple[Any, ...]) -> tuple[dict[str, torch.Tensor], Any]:
    """Separate the tensors of a call from the rest.

    Args:
        arguments: (positional arguments, keyword arguments).

    Returns:
        the tensors by name, and the arguments as JSON with these names in place of tensors.
    """
    tensors: dict[str, torch.Tensor] = {}

    def encode(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [encode(item, f"{name}.{number}") for number, item in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": {key: encode(item, f"{name}.{key}") for key, item in value.items()}}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return {"unsaved": repr(value)}

    args, kwargs = arguments
    return tensors, [encode(list(args), "args"), encode(dict(kwargs), "kwargs")]


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of the encoding of :func:`encode_arguments`."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {name: _decode(item, tensors) for name, item in inner.items()}
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors) for item in inner]
        return tuple(items) if kind == "tuple" else items
    if kind == "dtype":
        return _dtype_of(inner)
    if kind == "float":
        return float(inner)
    raise ValueError(f"the argument {inner} could not be saved")


def _check_replaceable(folder: Path) -> None:
    if os.path.lexists(folder) and not (folder / _INDEX).is_file():
        raise PipelineError(f"{folder} holds something other than evidence. Give another folder.")


def _numbered(tensors: dict[str, torch.Tensor], prefix: str) -> list[torch.Tensor]:
    count = sum(name.startswith(f"{prefix}.") for name in tensors)
    return [tensors[f"{prefix}.{number}"] for number in range(count)]


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype
