"""RMSNorm with AdaLN modulation, gated residuals, and both as one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from h3opt.kernels.ops.quantize import quantize_rows_definition
from h3opt.kernels.ops.registry import DTYPES, NORM_MAX_COLUMNS, empty_quantized, launch, promoted_dtype, register_op


def norm_modulate_definition(
    x: Tensor, weight: Tensor, scale_table: Tensor, shift_table: Tensor, index: Tensor, eps: float
) -> Tensor:
    """RMSNorm and AdaLN modulation: rms_norm(x) * (1 + scale[index]) + shift[index].

    x [..., tokens, D], weight [D], tables [rows, D], index int64 [tokens] shared by all batch items -> x's shape.
    Source: diffusers' MiniMaxH3TransformerBlock.forward.
    """
    normed = torch.rms_norm(x, (x.shape[-1],), weight, eps)
    return (normed * (1.0 + scale_table.index_select(0, index)) + shift_table.index_select(0, index)).contiguous()


def norm_modulate_quantize_definition(
    x: Tensor, weight: Tensor, scale_table: Tensor, shift_table: Tensor, index: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `norm_modulate`: (q e4m3 [..., tokens, D], scale float32 [..., tokens, 1])."""
    return quantize_rows_definition(norm_modulate_definition(x, weight, scale_table, shift_table, index, eps))


def gated_residual_definition(residual: Tensor, y: Tensor, gate_table: Tensor, index: Tensor) -> Tensor:
    """residual + gate[index] * y: residual, y [..., tokens, D], gate_table [rows, D], index int64 [tokens].

    Source: diffusers' MiniMaxH3TransformerBlock.
    """
    return (residual + gate_table.index_select(0, index) * y).contiguous()


def residual_norm_modulate_definition(
    residual: Tensor,
    y: Tensor,
    gate_table: Tensor,
    weight: Tensor,
    scale_table: Tensor,
    shift_table: Tensor,
    index: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """hidden = residual + gate[index] * y, and `norm_modulate` of hidden. Returns (hidden, normed).

    residual, y [..., tokens, D]; the rest as in `norm_modulate`. Source: diffusers' MiniMaxH3TransformerBlock.
    """
    hidden = gated_residual_definition(residual, y, gate_table, index)
    return hidden, norm_modulate_definition(hidden, weight, scale_table, shift_table, index, eps)


def residual_norm_modulate_quantize_definition(
    residual: Tensor,
    y: Tensor,
    gate_table: Tensor,
    weight: Tensor,
    scale_table: Tensor,
    shift_table: Tensor,
    index: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `residual_norm_modulate`, the normed output quantized: (hidden, q e4m3, scale float32 [..., tokens, 1])."""
    hidden, normed = residual_norm_modulate_definition(
        residual, y, gate_table, weight, scale_table, shift_table, index, eps
    )
    return hidden, *quantize_rows_definition(normed)


def _norm_modulate_fake(x, weight, scale_table, shift_table, index, eps):
    return x.new_empty(x.shape, dtype=promoted_dtype(x, weight, scale_table, shift_table))


def _norm_modulate_quantize_fake(x, weight, scale_table, shift_table, index, eps):
    return empty_quantized(x, x.shape[-1])


def _gated_residual_fake(residual, y, gate_table, index):
    return y.new_empty(y.shape, dtype=promoted_dtype(residual, gate_table, y))


def _residual_norm_modulate_fake(residual, y, gate_table, weight, scale_table, shift_table, index, eps):
    hidden = y.new_empty(y.shape, dtype=promoted_dtype(residual, gate_table, y))
    return hidden, y.new_empty(y.shape, dtype=promoted_dtype(hidden, weight, scale_table, shift_table))


def _residual_norm_modulate_quantize_fake(residual, y, gate_table, weight, scale_table, shift_table, index, eps):
    return y.new_empty(y.shape, dtype=promoted_dtype(residual, gate_table, y)), *empty_quantized(y, y.shape[-1])


def norm_is_vectorized(x: Tensor, weight: Tensor) -> bool:
    """Whether ATen's norm reads x and weight as aligned vectors of four: the order of summation the kernels have."""
    aligned = 4 * x.element_size()
    return (
        x.dtype in DTYPES
        and x.shape[-1] % 4 == 0
        and x.shape[-1] > 0
        and weight.shape == x.shape[-1:]
        and weight.dtype == x.dtype
        and not (x.is_contiguous() and x.data_ptr() % aligned)
        and not (weight.is_contiguous() and weight.data_ptr() % aligned)
    )


def _norm_served(x: Tensor, weight: Tensor, index: Tensor, *tables: Tensor) -> bool:
    return (
        x.ndim >= 2
        and x.shape[-1] <= NORM_MAX_COLUMNS
        and norm_is_vectorized(x, weight)
        and index.dtype == torch.int64
        and index.shape == x.shape[-2:-1]
        and all(t.ndim == 2 and t.shape[1] == x.shape[-1] and t.dtype == x.dtype for t in tables)
    )


def _norm_modulate_cuda(x, weight, scale_table, shift_table, index, eps):
    if not _norm_served(x, weight, index, scale_table, shift_table):
        return norm_modulate_definition(x, weight, scale_table, shift_table, index, eps)
    return launch("norm", "norm_modulate", x, weight, scale_table, shift_table, index, eps)


def _norm_modulate_quantize_cuda(x, weight, scale_table, shift_table, index, eps):
    if not _norm_served(x, weight, index, scale_table, shift_table):
        return norm_modulate_quantize_definition(x, weight, scale_table, shift_table, index, eps)
    return launch("norm", "norm_modulate_quantize", x, weight, scale_table, shift_table, index, eps)


def _residual_served(residual, y, gate_table, weight, scale_table, shift_table, index) -> bool:
    # The norm reads hidden, which is fresh and aligned whatever y is: y's alignment costs speed only.
    return (
        residual.shape == y.shape
        and residual.dtype == y.dtype
        and _norm_served(y, weight, index, gate_table, scale_table, shift_table)
    )


def _gated_residual_cuda(residual, y, gate_table, index):
    args = (residual, y, gate_table, index)
    if not (
        residual.shape == y.shape
        and residual.dtype == y.dtype == gate_table.dtype
        and y.dtype in DTYPES
        and y.ndim >= 2
        and y.shape[-1] <= NORM_MAX_COLUMNS
        and index.dtype == torch.int64
        and index.shape == y.shape[-2:-1]
        and gate_table.ndim == 2
        and gate_table.shape[1] == y.shape[-1]
    ):
        return gated_residual_definition(*args)
    return launch("norm", "gated_residual", *args)


def _residual_norm_modulate_cuda(residual, y, gate_table, weight, scale_table, shift_table, index, eps):
    args = (residual, y, gate_table, weight, scale_table, shift_table, index)
    if not _residual_served(*args):
        return residual_norm_modulate_definition(*args, eps)
    return launch("norm", "residual_norm_modulate", *args, eps)


def _residual_norm_modulate_quantize_cuda(residual, y, gate_table, weight, scale_table, shift_table, index, eps):
    args = (residual, y, gate_table, weight, scale_table, shift_table, index)
    if not _residual_served(*args):
        return residual_norm_modulate_quantize_definition(*args, eps)
    return launch("norm", "residual_norm_modulate_quantize", *args, eps)


_NORM = "Tensor weight, Tensor scale_table, Tensor shift_table, Tensor index, float eps)"


_GATED = "(Tensor residual, Tensor y, Tensor gate_table, " + _NORM


norm_modulate = register_op(
    "norm_modulate",
    f"(Tensor x, {_NORM} -> Tensor",
    norm_modulate_definition,
    _norm_modulate_cuda,
    _norm_modulate_fake,
    "norm_modulate_kernel",
)


norm_modulate_quantize = register_op(
    "norm_modulate_quantize",
    f"(Tensor x, {_NORM} -> (Tensor, Tensor)",
    norm_modulate_quantize_definition,
    _norm_modulate_quantize_cuda,
    _norm_modulate_quantize_fake,
    "norm_modulate_quantize_kernel",
    version=2,
)


gated_residual = register_op(
    "gated_residual",
    "(Tensor residual, Tensor y, Tensor gate_table, Tensor index) -> Tensor",
    gated_residual_definition,
    _gated_residual_cuda,
    _gated_residual_fake,
    "gated_residual_kernel",
)


residual_norm_modulate = register_op(
    "residual_norm_modulate",
    f"{_GATED} -> (Tensor, Tensor)",
    residual_norm_modulate_definition,
    _residual_norm_modulate_cuda,
    _residual_norm_modulate_fake,
    "residual_norm_modulate_kernel",
)


residual_norm_modulate_quantize = register_op(
    "residual_norm_modulate_quantize",
    f"{_GATED} -> (Tensor, Tensor, Tensor)",
    residual_norm_modulate_quantize_definition,
    _residual_norm_modulate_quantize_cuda,
    _residual_norm_modulate_quantize_fake,
    "residual_norm_modulate_quantize_kernel",
    version=2,
)
