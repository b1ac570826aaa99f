"""CUDA kernels, compiled at run time: what Triton cannot express. Nothing here is imported before it is used."""
