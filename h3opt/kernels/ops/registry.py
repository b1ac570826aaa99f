"""The library of operators: registration, launching of Triton kernels, dtypes and constants that families share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h3opt.errors import MissingDependencyError

E4M3 = torch.float8_e4m3fn


E4M3_MAX = 448.0


SCALE_AMAX_MIN = 1e-12


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


CLOSE = ("scaled_linear", "upsample_snake", "downsample")
"""Operators whose CUDA side is close to the definition, not equal: a library's order of summation is its own."""


NORM_MAX_COLUMNS = 16384


def empty_quantized(x: Tensor, columns: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], columns), dtype=E4M3), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def promoted_dtype(*tensors: Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors))


@functools.cache
def _kernels(family: str) -> Any:
    """The module of a kernel family, imported (and triton with it) on first use."""
    try:
        return importlib.import_module(f"h3opt.kernels.triton_kernels.{family}")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"h3opt's CUDA kernels need the package {error.name!r}, which is not installed. Run `pip install triton`."
        ) from error


def launch(family: str, name: str, x: Tensor, *args: Any) -> Any:
    """Call the launcher `name` of a kernel family with x's device current, which is where triton launches."""
    function = getattr(_kernels(family), name)
    if x.device.index == torch.cuda.current_device():
        return function(x, *args)
    with torch.cuda.device(x.device):
        return function(x, *args)


@dataclass(frozen=True)
class TensorSpec:
    """What a check knows of a site's tensor argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Trial:
    """One draw of data that an operator is held to its definition on.

    Attributes:
        arguments: of the operator, of the site's length.
        sampled: of the definition: the same data, but only the rows and heads that are compared.
        exact: what the operator approximates on the sampled rows, from operands as they were before quantization, in
            float64.
        read: takes what the operator or the definition returned to float64 values like ``exact``; ``whole`` says that
            it comes from the operator, so that the rows have yet to be picked.
    """

    arguments: tuple[Any, ...]
    sampled: tuple[Any, ...]
    exact: Tensor
    read: Callable[[Any, bool], Tensor]


@dataclass(frozen=True)
class DefinitionCheck:
    """How an operator that a library runs is held to its definition on a user's GPU.

    Attributes:
        factor: the largest error allowed, in units of the error of the definition: 1 is what the number format costs.
        kinds: of data, see :mod:`h3opt.kernels.data_kinds`.
        draw: makes a trial from the operator's argument names, the site's arguments (a :class:`TensorSpec` for each
            tensor), a kind and a generator on the device.
    """

    factor: float
    kinds: tuple[str, ...]
    draw: Callable[[Sequence[str], Sequence[Any], str, torch.Generator], Trial]


DEFINITIONS: dict[str, Callable] = {}


CHECKS: dict[str, DefinitionCheck] = {}


OPERATORS: dict[str, Any] = {}


kernel_names: dict[str, str] = {}


_LIBRARY = torch.library.Library("h3opt", "DEF")


def register_op(
    name: str,
    schema: str,
    definition: Callable,
    cuda: Callable,
    fake: Callable,
    kernel: str | None,
    cpu: Callable | None = None,
    version: int = 1,
    check: DefinitionCheck | None = None,
) -> Any:
    """Define `h3opt::{name}_v{version}`: on the CPU its definition, unless `cpu` is given; returns the op.

    An operator that a library runs on CUDA also says by `check` how that library is held to the definition.
    """
    versioned = f"{name}_v{version}"
    _LIBRARY.define(versioned + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(versioned, cpu or definition, "CPU")
    _LIBRARY.impl(versioned, cuda, "CUDA")
    torch.library.register_fake(f"h3opt::{versioned}", fake, lib=_LIBRARY)
    DEFINITIONS[name] = definition
    OPERATORS[name] = getattr(torch.ops.h3opt, versioned).default
    if check is not None:
        CHECKS[name] = check
    if kernel is not None:
        kernel_names[name] = kernel
    return OPERATORS[name]
