"""Triton kernels and the operators that run them."""
