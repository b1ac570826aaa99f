"""The tensors that show a broken promise, on disk: written whole, and replayed with one command."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from h3opt.device import Device
from h3opt.environment import versions
from h3opt.errors import CheckpointError, DeviceError, PipelineError
from h3opt.files import temporary_sibling
from h3opt.metrics.bits import Comparison, bits_equal

_INDEX, _TENSORS = "evidence.json", "tensors.safetensors"


@dataclass
class Evidence:
    """One call, or one site of a rule, without a pass and with it.

    Attributes:
        name, options: of the pass.
        kind: ``"site"``: pattern and replacement of a rule were called; ``"module"``: the module at ``module`` was.
        module, call: where in the pipeline.
        others: (name, options) of the passes that were on besides.
        site: in words.
        rule: which of the pass's rules.
        inputs: the tensors that were read, by name.
        arguments: positional and keyword arguments as JSON, with the names of tensors in their places.
        expected, found: what was returned without the pass, and with it.
        dtype: of the model; see :attr:`h3opt.pipeline.view.PipelineView.dtype`.
        device: type of the device it was on.
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
    found: list[torch.Tensor] = field(default_factory=list)
    dtype: torch.dtype = field(kw_only=True)
    device: str = field(kw_only=True)

    @property
    def moved(self) -> str:
        """How far ``found`` is from ``expected``, in words."""
        return compared(self.expected, self.found)

    def call_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """``arguments`` with the tensors in their places."""
        args, kwargs = _restored(self.arguments, self.inputs)
        return args, kwargs


def write_evidence(folder: Path, evidence: Evidence) -> None:
    """Write ``evidence.json`` and ``tensors.safetensors``; the folder appears whole or not at all.

    Raises:
        PipelineError: it cannot be written, or holds something else.
    """
    tensors = {f"input.{name}": tensor for name, tensor in evidence.inputs.items()}
    for side in ("expected", "found"):
        tensors |= {f"{side}.{number}": tensor for number, tensor in enumerate(getattr(evidence, side))}
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
        "moved": evidence.moved,
        "versions": versions(),
    }
    try:
        _check_replaceable(folder)
        with temporary_sibling(folder) as partial, temporary_sibling(folder.with_name(f"{folder.name}.old")) as old:
            partial.mkdir(parents=True)
            save_file({name: _plain(tensor) for name, tensor in tensors.items()}, partial / _TENSORS)
            (partial / _INDEX).write_text(json.dumps(index, indent=2, default=str) + "\n", encoding="utf-8")
            if folder.exists():
                folder.rename(old)  # in one go: removing takes a while
            partial.rename(folder)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        why = getattr(error, "strerror", None) or error
        raise PipelineError(f"{folder} cannot be written: {why}. Give another folder.") from error


def check_folder(folder: Path, names: Iterable[str] = ()) -> None:
    """Refuse before the work places that :func:`write_evidence` could not write to after it.

    Args:
        folder: that evidence goes into.
        names: of the passes, each of which has a folder there.

    Raises:
        PipelineError: nothing can be made there, or what stands in a pass's place is no evidence.
    """
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise PipelineError(
            f"{folder} cannot be written: {existing} is no folder one can write to. Give another folder."
        )
    for name in names:
        _check_replaceable(folder / name)


def _check_replaceable(folder: Path) -> None:
    if os.path.lexists(folder) and not (folder / _INDEX).is_file():
        raise PipelineError(f"{folder} holds something other than evidence. Give another folder.")


def read_evidence(folder: Path) -> Evidence:
    """What :func:`write_evidence` wrote.

    Raises:
        CheckpointError: it is missing, truncated or something else.
    """
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
        evidence = Evidence(
            index["pass"],
            dict(index["options"]),
            index["kind"],
            index["module"],
            index["call"],
            [(name, dict(options)) for name, options in index["others"]],
            index["site"],
            index["rule"],
            {name.removeprefix("input."): tensor for name, tensor in tensors.items() if name.startswith("input.")},
            index["arguments"],
            dtype=_dtype_named(index["dtype"]),
            device=torch.device(index["device"]).type,
        )
        for side in ("expected", "found"):
            count = sum(name.startswith(f"{side}.") for name in tensors)
            setattr(evidence, side, [tensors[f"{side}.{number}"] for number in range(count)])
        evidence.call_arguments()
        kinds = {str: (evidence.name, evidence.module), int: (evidence.call, evidence.rule)}
        if not all(isinstance(one, kind) for kind, some in kinds.items() for one in some) or evidence.rule < 0:
            raise ValueError("pass, module, call or rule is not what it should be")
        if evidence.kind not in ("site", "module") or not evidence.expected or not evidence.found:
            raise ValueError("it is of no site or module, or what was returned is missing")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no evidence that can be read ({type(error).__name__}: {error}). Give a folder that "
            "`h3opt verify` wrote; what an earlier version wrote may lack something, so verify again."
        ) from error
    return evidence


def compared(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
    """How far two lists of tensors are apart, in words; the first difference counts."""
    if [(one.shape, one.dtype) for one in expected] != [(one.shape, one.dtype) for one in found]:
        return "shapes or dtypes differ"
    results: list[Comparison] = list(map(bits_equal, expected, found))
    return next((str(one) for one in results if not one), _EQUAL)


_EQUAL = "bits equal"


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in what a module returned, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def flatten(arguments: tuple[Any, ...]) -> tuple[dict[str, torch.Tensor], Any]:
    """(args, kwargs) → tensors by name, and the arguments as JSON with those names in their places."""
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


def _restored(encode: Any, tensors: dict[str, torch.Tensor]) -> Any:
    args, kwargs = encode

    def value(found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        ((kind, inner),) = found.items()
        if kind == "tensor":
            return tensors[inner]
        if kind == "dict":
            return {name: value(item) for name, item in inner.items()}
        if kind in ("list", "tuple"):
            items = [value(item) for item in inner]
            return tuple(items) if kind == "tuple" else items
        if kind == "dtype":
            return _dtype_named(inner)
        if kind == "float":
            return float(inner)
        raise ValueError(f"the argument {inner} could not be saved")

    return value(args), value(kwargs)


def _dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _device_of(evidence: Evidence, folder: Path) -> str:
    try:
        Device.of(evidence.device)
    except DeviceError as error:
        raise DeviceError(
            f"{folder} was found on {evidence.device}, which is not available here. Replay it where it is, or give "
            "another --device."
        ) from error
    return evidence.device


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()
