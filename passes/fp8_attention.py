"""Attention on FP8 operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from h3opt.kernels.ops import attention
from h3opt.kernels.ops.hopper_attention import HEAD_DIM
from h3opt.pass_api import (
    Decline,
    Device,
    Draw,
    Example,
    GraphFacts,
    GraphPass,
    Match,
    Mutant,
    Perceptual,
    PipelineView,
    Rule,
    norm_and_rotate,
    register,
)
from h3opt.pass_api.guards import check_attention, check_head_norm_rope
from h3opt.pass_api.patterns import norm_rope, unmasked_attention

aten = torch.ops.aten


def attend(
    x: Any, k: Any, v: Any, shape: Any, weight: Any, k_weight: Any, eps: Any,
    cos: Any, sin: Any, dim: Any, half: Any, rotary: Any, end: Any, swap: Any,
) -> Any:  # fmt: skip
    query = norm_rope(x, shape, weight, eps, cos, sin, dim, half, rotary, end)
    key = norm_rope(k, shape, k_weight, eps, cos, sin, dim, half, rotary, end)
    return unmasked_attention(query, key, v, swap)


@register
@dataclass(frozen=True)
class FP8Attention(GraphPass):
    """Q, K and V enter attention as e4m3 with a scale per head: twice the tensor core rate of bf16.

    Q and K are RMS-normed, so their range is known from the norm's weight: their scales need no data, no calibration
    and no second pass over memory. V enters as what differs from its mean over a chunk of keys; chunks are summed
    apart and merged in float32, since FP8 tensor cores lose long sums (docs/fp8_attention.md).

    Options:
        backend: hopper (h3opt's own kernel for SM90, heads of 128 channels), fa3 (needs the package fa3-fwd) or triton;
            cudnn, which is not accurate on CUDA and declines there.
        scales: of Q and K, "bound" by the norm or "dynamic" from their largest value.
        smooth_k: subtract K's mean over tokens first, which softmax does not see; K's scale is then dynamic.
        rotate: transform Q and K by a Hadamard matrix, which leaves their products as they are and spreads channels
            that are larger than the rest; heads need a power of two of channels.
        chunk: keys that the tensor cores sum before float32 takes over; by default what suits the backend. hopper takes
            all keys as one chunk, as it adds up in float32 itself.
    """

    backend: str = "triton"
    scales: str = "bound"
    smooth_k: bool = False
    rotate: bool = False
    chunk: int | None = None

    name = "fp8_attention"
    promise = Perceptual(
        lpips=0.03, audio_snr_db=30.0, site_error=0.1, on_reference=Perceptual(lpips=0.00088, audio_snr_db=42.0)
    )

    def __post_init__(self) -> None:
        choices = {
            "backend": attention.FP8_BACKENDS,
            "scales": ("bound", "dynamic"),
            "smooth_k": (True, False),
            "rotate": (True, False),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed or type(getattr(self, name)) is not type(allowed[0]):
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.chunk is not None and (type(self.chunk) is not int or self.chunk < 1):
            raise ValueError(f"chunk must be a positive number of keys, got {self.chunk!r}")
        if self.chunk is not None and self.backend == "hopper":
            raise ValueError("chunk must be left out with the backend hopper, which takes all keys as one chunk")

    @property
    def keys_per_chunk(self) -> int:
        """The option ``chunk``, or what suits the backend."""
        return attention.default_chunk(self.backend) if self.chunk is None else self.chunk

    def applies(self, device: Device, view: PipelineView) -> str | None:
        return attention.missing(self.backend, device, fp8=True)

    def rules(self) -> Sequence[Rule]:
        def in_fp8(x, k, v, shape, weight, k_weight, eps, cos, sin, dim, half, rotary, end, swap):
            query = norm_rope(x, shape, weight, eps, cos, sin, dim, half, rotary, end)
            key = norm_rope(k, shape, k_weight, eps, cos, sin, dim, half, rotary, end)
            if self.smooth_k:
                key = key - aten.mean.dim(key, [1], True)
            if self.rotate:
                query, key = attention.hadamard(query), attention.hadamard(key)
            q_scale, k_scale = attention.norm_head_scale(x, weight), attention.norm_head_scale(k, k_weight)
            if self.scales == "dynamic":
                q_scale = attention.dynamic_head_scale(query, True)
            if self.scales == "dynamic" or self.smooth_k:
                k_scale = attention.dynamic_head_scale(key, True)
            return self.attention(query, key, v, q_scale, k_scale)

        return (Rule(attend, in_fp8, self.all_line_up),)

    def all_line_up(self, match: Match) -> str | None:
        """Why a site is not self-attention over normed and rotated heads of one shape."""
        x = match.tensor("x")
        if self.rotate and x is not None and x.shape[-1].bit_count() != 1:
            return f"heads of {x.shape[-1]} channels, not a power of two, have no Hadamard transform"
        if self.backend == "hopper" and x is not None and x.is_cuda and x.shape[-1] != HEAD_DIM:
            return f"hopper attention is for heads of {HEAD_DIM} channels, not {x.shape[-1]}"
        return check_attention(match, "x", "k", "v") or check_head_norm_rope(match)

    def attention(self, query: Any, key: Any, v: Any, q_scale: Any, k_scale: Any) -> Any:
        q8, k8 = attention.quantize_heads(query, q_scale), attention.quantize_heads(key, k_scale)
        values = attention.quantize_values(v, self.keys_per_chunk)
        v8, v_scale, v_mean = values[0], values[1], values[2]
        scales = (q_scale, k_scale, v_scale, v_mean, self.keys_per_chunk)
        return attention.fp8_attention(q8, k8, v8, *scales, v.dtype, self.backend)

    def expect(self, facts: GraphFacts) -> int | None:
        return facts.per(transformer_block=1)

    def example(self, draw: Draw) -> Example:
        return Example(_model(), _arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def causal(draw: Draw) -> Example:
            return Example(_model(is_causal=True), _arguments(draw))

        def masked(draw: Draw) -> Example:
            mask = draw.tensor(draw.tokens, draw.tokens)
            return Example(_masked, (*_arguments(draw), mask))

        def shared(draw: Draw) -> Example:
            _, *others = _arguments(draw)
            query = draw.tensor(draw.batch, draw.tokens, 2 * draw.heads, draw.head_dim)
            return Example(_model(enable_gqa=True), (query, *others))

        return (
            Decline("attention is causal", causal),
            Decline("attention has a mask", masked),
            Decline("heads share K and V", shared),
        )

    def mutants(self) -> Sequence[Mutant]:
        return (
            Mutant("V's scale is not taken back", _VStaysScaled()),
            Mutant("one head of K has twice the scale it was cast with", _OneHeadOff()),
            Mutant("V's mean is not added back", _MeanIsLost()),
            Mutant("chunks of keys count alike, whatever the softmax gives them", _ChunksCountAlike(chunk=4)),
        )


def _model(**how: Any) -> Callable[..., torch.Tensor]:
    def model(x, k, v, weight, k_weight, cos, sin):
        q, k, v = (
            one.transpose(1, 2)
            for one in (norm_and_rotate(x, weight, cos, sin), norm_and_rotate(k, k_weight, cos, sin), v)
        )
        return scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

    return model


def _masked(x, k, v, weight, k_weight, cos, sin, mask):
    return _model(attn_mask=mask)(x, k, v, weight, k_weight, cos, sin)


def _arguments(draw: Draw) -> tuple[torch.Tensor, ...]:
    x, weight, angle, _ = draw.rotary()
    k, v = (draw.tensor(*x.shape) for _ in range(2))
    weight, k_weight = (1 + one / 8 for one in (weight, draw.tensor(*weight.shape)))  # as norms have them
    return x, k, v, weight, k_weight, angle.cos(), angle.sin()  # what turns, does not stretch: the scales rest on it


@dataclass(frozen=True)
class _VStaysScaled(FP8Attention):
    def attention(self, query: Any, key: Any, v: Any, q_scale: Any, k_scale: Any) -> Any:
        q8, k8 = attention.quantize_heads(query, q_scale), attention.quantize_heads(key, k_scale)
        values = attention.quantize_values(v, self.keys_per_chunk)
        scales = (q_scale, k_scale, aten.ones_like(values[1]), values[2], self.keys_per_chunk)
        return attention.fp8_attention(q8, k8, values[0], *scales, v.dtype, self.backend)


@dataclass(frozen=True)
class _OneHeadOff(FP8Attention):
    def attention(self, query: Any, key: Any, v: Any, q_scale: Any, k_scale: Any) -> Any:
        q8, k8 = attention.quantize_heads(query, q_scale), attention.quantize_heads(key, k_scale)
        values = attention.quantize_values(v, self.keys_per_chunk)
        first, others = aten.slice.Tensor(k_scale, 0, 0, 1), aten.slice.Tensor(k_scale, 0, 1, 2**31)
        scales = (q_scale, aten.cat([first * 2.0, others]), values[1], values[2], self.keys_per_chunk)
        return attention.fp8_attention(q8, k8, values[0], *scales, v.dtype, self.backend)


@dataclass(frozen=True)
class _MeanIsLost(FP8Attention):
    def attention(self, query: Any, key: Any, v: Any, q_scale: Any, k_scale: Any) -> Any:
        q8, k8 = attention.quantize_heads(query, q_scale), attention.quantize_heads(key, k_scale)
        values = attention.quantize_values(v, self.keys_per_chunk)
        scales = (q_scale, k_scale, values[1], aten.zeros_like(values[2]), self.keys_per_chunk)
        return attention.fp8_attention(q8, k8, values[0], *scales, v.dtype, self.backend)


@dataclass(frozen=True)
class _ChunksCountAlike(FP8Attention):
    """Of two chunks, half of each; where there is but one chunk, the second is empty and the result half of it."""

    def attention(self, query: Any, key: Any, v: Any, q_scale: Any, k_scale: Any) -> Any:
        q8, k8 = attention.quantize_heads(query, q_scale), attention.quantize_heads(key, k_scale)
        halves = []
        for start in (0, self.keys_per_chunk):
            values = attention.quantize_values(
                aten.slice.Tensor(v, 1, start, start + self.keys_per_chunk), self.keys_per_chunk
            )
            keys = aten.slice.Tensor(k8, 1, start, start + self.keys_per_chunk)
            scales = (q_scale, k_scale, values[1], values[2], self.keys_per_chunk)
            halves.append(attention.fp8_attention(q8, keys, values[0], *scales, v.dtype, self.backend))
        return (halves[0] + halves[1]) * 0.5
