"""h3opt's operators. Each file holds the definition, the fake, the CUDA entry and the registration of one family.

A definition is plain torch and says what an operator computes; on the CPU it is also what runs. Importing this package
registers ``torch.ops.h3opt.*`` once; it does not import triton.

The operators of :mod:`h3opt.kernels.ops.attention` are used through that module, as they come with libraries that may
be missing.
"""

from __future__ import annotations

from h3opt.kernels.ops.activation import swiglu, swiglu_quantize
from h3opt.kernels.ops.decoder_norm import (
    scaled_residual,
    scaled_residual_norm,
    scaled_residual_norm_quantize,
    wide_norm,
    wide_norm_quantize,
)
from h3opt.kernels.ops.linear import scaled_linear
from h3opt.kernels.ops.norm import (
    gated_residual,
    norm_modulate,
    norm_modulate_quantize,
    residual_norm_modulate,
    residual_norm_modulate_quantize,
)
from h3opt.kernels.ops.quantize import quantize_rows
from h3opt.kernels.ops.registry import CLOSE, DTYPES, E4M3, E4M3_MAX, SCALE_AMAX_MIN
from h3opt.kernels.ops.resample import downsample, upsample_snake
from h3opt.kernels.ops.rope import head_norm_rope, head_norm_rope_quantize, unweighted_norm_rope

__all__ = [
    "CLOSE",
    "DTYPES",
    "E4M3",
    "E4M3_MAX",
    "SCALE_AMAX_MIN",
    "downsample",
    "gated_residual",
    "head_norm_rope",
    "head_norm_rope_quantize",
    "norm_modulate",
    "norm_modulate_quantize",
    "quantize_rows",
    "residual_norm_modulate",
    "residual_norm_modulate_quantize",
    "scaled_linear",
    "scaled_residual",
    "scaled_residual_norm",
    "scaled_residual_norm_quantize",
    "swiglu",
    "swiglu_quantize",
    "unweighted_norm_rope",
    "upsample_snake",
    "wide_norm",
    "wide_norm_quantize",
]
