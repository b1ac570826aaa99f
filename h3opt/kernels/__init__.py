"""Triton kernels and the operators that run them.

Importing this package registers `torch.ops.h3opt.*` once; it does not import triton. `ops` says what each computes,
`OPERATORS` has them by name, `DEFINITIONS` the plain-torch definition of each, `kernel_names` the Triton kernel that a
profiler must show when an operator ran on CUDA (none for `scaled_linear`, which is a library GEMM).
"""

from __future__ import annotations

from h3opt.kernels import attention, ops
from h3opt.kernels.ops import DEFINITIONS, OPERATORS, kernel_names

__all__ = ["DEFINITIONS", "OPERATORS", "attention", "kernel_names", "ops"]
