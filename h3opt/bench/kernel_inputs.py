"""Random arguments for every operator, and the bit comparison: for tests, benchmarks and the probe of a machine."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from h3opt.kernels import data_kinds
from h3opt.kernels.ops import attention
from h3opt.kernels.ops.registry import OPERATORS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


SPECIALS = ("none", "nan", "inf")


def values(shape, dtype, device, seed, special="none", magnitude=1.0, kind="zero_mean"):
    """Random values of a kind of data; `special` plants NaN or both infinities in every third row."""
    generator = torch.Generator(device).manual_seed(seed)
    x = (data_kinds.draw(kind, shape, generator) * magnitude).to(dtype)
    if special != "none" and x.numel():
        rows = x.view(-1, x.shape[-1])
        rows[::3, 0] = float(special)
        rows[::3, -1] = -float(special)
    return x


def op_inputs(
    name,
    tokens,
    columns,
    rows=3,
    batch=1,
    dtype=torch.bfloat16,
    device="cpu",
    special="none",
    heads=3,
    kind="zero_mean",
):
    """Positional arguments of `h3opt.kernels.ops.<name>`; in the resampling ops tokens are samples and rows channels.

    `columns` is D, or F for SwiGLU (input 2F wide), or head_dim for the head ops (three quarters of it rotary), or the
    inputs of a linear layer with `rows * 16` outputs. `kind` is that of all tensors but angles and scales of heads.
    """

    def make(shape, seed, special="none", dtype=dtype, magnitude=1.0, kind=kind):
        return values(shape, dtype, device, seed, special, magnitude, kind)

    x = make((batch, tokens, columns), 0, special, magnitude=2.0)
    index = torch.randint(0, rows, (tokens,), device=device, generator=torch.Generator(device).manual_seed(1))
    gate, scale, shift = make((rows, 3 * columns), 2).chunk(3, dim=-1)
    weight = make((columns,), 3)
    if name == "quantize_rows":
        return (x,)
    if name in ("norm_modulate", "norm_modulate_quantize"):
        return x, weight, scale, shift, index, 1e-5
    if name == "gated_residual":
        return x, make((batch, tokens, columns), 4, special), gate, index
    if name in ("residual_norm_modulate", "residual_norm_modulate_quantize"):
        return x, make((batch, tokens, columns), 4, special), gate, weight, scale, shift, index, 1e-5
    if name.startswith(("scaled_residual", "wide_norm")):
        # the stream in float32, as after the decoder's first block; what is added, and its norm, in `dtype`
        wide = partial(make, dtype=torch.float32)
        norm = () if name == "scaled_residual" else (wide((columns,), 3), 1e-5, dtype)
        added = (x, wide((columns,), 2)) if name.startswith("scaled_residual") else ()
        return wide((batch, tokens, columns), 4, special), *added, *norm
    if name in ("swiglu", "swiglu_quantize"):
        return (make((batch, tokens, 2 * columns), 0, special, magnitude=2.0),)
    if name in ("head_norm_rope", "head_norm_rope_quantize", "unweighted_norm_rope"):
        # q out of a fused q, k, v projection: strided.
        fused = make((batch, tokens, 3 * heads * columns), 0, special, magnitude=2.0)
        q = fused.chunk(3, dim=-1)[0].unflatten(-1, (heads, columns))
        rotary = columns * 3 // 4 // 2 * 2
        angle = make((tokens, rotary // 2), 5, dtype=torch.float32, magnitude=3.0, kind="zero_mean")
        angle = torch.cat([angle, angle], dim=-1)
        head_scale = make((heads,), 6, dtype=torch.float32, magnitude=30.0, kind="zero_mean").abs()
        if name == "unweighted_norm_rope":
            return q, angle.cos()[None], angle.sin()[None], 1e-5
        table = (q, weight, angle.cos(), angle.sin())
        return (*table, 1e-5) if name == "head_norm_rope" else (*table, head_scale, 1e-5, False)
    if name == "scaled_linear":
        q, q_scale = OPERATORS["quantize_rows"](x)
        weight_q, weight_scale = OPERATORS["quantize_rows"](make((rows * 16, columns), 7))
        return (
            q,
            q_scale,
            weight_q,
            weight_scale,
            make((rows * 16,), 8, dtype=torch.bfloat16),
            torch.bfloat16,
            "precise",
        )
    if name in ("upsample_snake", "downsample"):
        phases = () if name == "upsample_snake" else (2,)
        signal = make((batch, rows, *phases, tokens), 0, special, magnitude=2.0)
        per_channel = (make((rows,), 8).exp(), make((rows,), 9).exp()) if name == "upsample_snake" else ()
        return signal, make((12,), 7), *per_channel
    heads_of = [make((batch, tokens, heads, columns), seed, special) for seed in (9, 10, 11)]
    if name == "norm_head_scale":
        return heads_of[0], weight
    if name == "dynamic_head_scale":
        return heads_of[0], True
    if name == "attention":
        return *heads_of, "flash"
    if name == "hadamard":
        return (make((batch, tokens, heads, 1 << (max(columns, 1).bit_length() - 1)), 9, special),)
    if name == "quantize_values":
        return heads_of[2], 7 if tokens < 1024 else attention.CHUNK
    of_heads = partial(make, (heads,), dtype=torch.float32, magnitude=30.0, kind="zero_mean")
    scales = [of_heads(seed).abs() + 1 for seed in (12, 13)]
    if name == "quantize_heads":
        return heads_of[0], scales[0]
    q, k = (OPERATORS["quantize_heads"](one, scale) for one, scale in zip(heads_of, scales, strict=False))
    chunk = 3 if tokens < 1024 else attention.CHUNK
    values_of = OPERATORS["quantize_values"](heads_of[2], chunk)
    operands = (q, k, values_of[0], *scales, *values_of[1:], chunk)
    if name == "fp8_attention":
        return *operands, torch.bfloat16, "triton"
    if name == "fp8_attention_quantized":
        return *operands, "triton"
    raise KeyError(name)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def differing(actual, expected) -> int:
    """How many elements differ in their bits (so -0 differs from 0; every NaN is one). Shapes and dtypes must agree."""
    if isinstance(expected, tuple):
        assert len(actual) == len(expected)
        return sum(differing(a, e) for a, e in zip(actual, expected, strict=True))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    return int((_bits(actual) != _bits(expected)).sum())


def _bits(x: Tensor) -> Tensor:
    bits = x.contiguous().view(_INTEGERS[x.element_size()])
    nan = (bits & 0x7F) == 0x7F if x.dtype == torch.float8_e4m3fn else x.isnan()
    return bits.masked_fill(nan, torch.iinfo(bits.dtype).max)
