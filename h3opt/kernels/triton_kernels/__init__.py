"""Triton kernels of the operators in :mod:`h3opt.kernels.ops`."""
