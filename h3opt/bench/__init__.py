"""Benchmarks: the transformer, decoding and single kernels, against eager and against other tools."""
