"""Benchmarks on a CUDA device."""
