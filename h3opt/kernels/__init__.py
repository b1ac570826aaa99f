"""Operators with a plain-torch definition, and the Triton kernels and libraries that run them on CUDA.

``OPERATORS`` has the operators by name, ``DEFINITIONS`` the plain-torch definition of each, ``kernel_names`` the Triton
kernel that a profiler must show when an operator ran on CUDA (none for an operator that a library runs), and
``CHECKS`` how an operator that a library runs is held to its definition.
"""

from __future__ import annotations

from h3opt.kernels import ops
from h3opt.kernels.ops import attention
from h3opt.kernels.ops.registry import CHECKS, DEFINITIONS, OPERATORS, kernel_names

__all__ = ["CHECKS", "DEFINITIONS", "OPERATORS", "attention", "kernel_names", "ops"]
