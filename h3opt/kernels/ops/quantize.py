"""Quantization of activations to e4m3 with one scale per row."""

from __future__ import annotations

import torch
from torch import Tensor

from h3opt.kernels.ops.registry import DTYPES, E4M3, E4M3_MAX, SCALE_AMAX_MIN, empty_quantized, launch, register_op


def quantize_rows_definition(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic per-row quantize to e4m3. x [..., D] -> (q e4m3 [..., D], scale float32 [..., 1]); x ~ q * scale.

    scale = clamp(amax|x|, min=1e-12) / 448 and q = clamp(x * (1 / scale), -448, 448), in float32: one division per
    row and a product per element, as in PyTorch's row-wise float8. A NaN makes its whole row NaN and an inf makes its
    row 0 with NaN at the inf; other rows do not change. Numbers divide as tensors: ATen on CUDA multiplies by the
    reciprocal of a Python number.
    """
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = amax.clamp(min=SCALE_AMAX_MIN) / torch.full_like(amax, E4M3_MAX)
    q = (wide * (torch.ones_like(scale) / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return q.contiguous(), scale.contiguous()


def _quantize_rows_fake(x):
    return empty_quantized(x, x.shape[-1])


def _quantize_rows_cuda(x):
    if x.dtype not in DTYPES or not 0 < x.shape[-1] <= 32768:
        return quantize_rows_definition(x)
    return launch("quantize", "quantize_rows", x)


quantize_rows = register_op(
    "quantize_rows",
    "(Tensor x) -> (Tensor, Tensor)",
    quantize_rows_definition,
    _quantize_rows_cuda,
    _quantize_rows_fake,
    "quantize_rows_kernel",
    version=2,
)
