"""Triton kernels and the operators that run them.

Importing this package registers `torch.ops.h3opt.*` once; it does not import triton. `ops` holds the operators (see
its docstring), `DEFINITIONS` the plain-torch definition of each, `kernel_names` the Triton kernel that a profiler must
show when an operator ran on CUDA (none for `scaled_linear`, which is a library GEMM).
"""

from __future__ import annotations

from h3opt.kernels import attention, ops
from h3opt.kernels.ops import DEFINITIONS, kernel_names

__all__ = ["DEFINITIONS", "attention", "kernel_names", "ops"]
