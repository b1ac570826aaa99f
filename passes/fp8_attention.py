"""Attention on FP8 operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from h3opt.kernels.ops import attention
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


def all_line_up(match: Match) -> str | None:
    """Why a site is not self-attention over normed and rotated heads of one shape."""
    return check_attention(match, "x", "k", "v") or check_head_norm_rope(match)


@register
@dataclass(frozen=True)
class FP8Attention(GraphPass):
    """Q, K and V enter attention as e4m3 with a scale per head: twice the tensor core rate of bf16.

    Q and K are RMS-normed, so their range is known from the norm's weight: their scales need no data, no calibration
    and no second pass over memory.

    Options:
        backend: fa3, cudnn (both from a package, see what it says when missing) or triton.
        scales: of Q and K, "bound" by the norm or "dynamic" from their largest value.
        smooth_k: subtract K's mean over tokens first, which softmax does not see; K's scale is then dynamic.
    """

    backend: str = "triton"
    scales: str = "bound"
    smooth_k: bool = False

    name = "fp8_attention"
    promise = Perceptual(
        lpips=0.03, audio_snr_db=30.0, site_error=0.1, on_reference=Perceptual(lpips=0.00088, audio_snr_db=42.0)
    )

    def __post_init__(self) -> None:
        choices = {"backend": attention.FP8_BACKENDS, "scales": ("bound", "dynamic"), "smooth_k": (True, False)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed or type(getattr(self, name)) is not type(allowed[0]):
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    def applies(self, device: Device, view: PipelineView) -> str | None:
        reason = attention.missing(self.backend, device, fp8=True)
        return reason

    def rules(self) -> Sequence[Rule]:
        def in_fp8(x, k, v, shape, weight, k_weight, eps, cos, sin, dim, half, rotary, end, swap):
            query = norm_rope(x, shape, weight, eps, cos, sin, dim, half, rotary, end)
            key = norm_rope(k, shape, k_weight, eps, cos, sin, dim, half, rotary, end)
            if self.smooth_k:
                key = key - aten.mean.dim(key, [1], True)
            per_head = self.backend != "cudnn"  # which takes one scale per tensor
            q_scale, k_scale = attention.norm_head_scale(x, weight), attention.norm_head_scale(k, k_weight)
            if self.scales == "dynamic":
                q_scale = attention.dynamic_head_scale(query, per_head)
            if self.scales == "dynamic" or self.smooth_k:
                k_scale = attention.dynamic_head_scale(key, per_head)
            return self.attention(query, key, v, q_scale, k_scale, attention.dynamic_head_scale(v, per_head))

        return (Rule(attend, in_fp8, all_line_up),)

    def attention(self, query: Any, key: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
        operands = ((query, q_scale), (key, k_scale), (v, v_scale))
        q8, k8, v8 = (attention.quantize_heads(one, scale) for one, scale in operands)
        return attention.fp8_attention(q8, k8, v8, q_scale, k_scale, v_scale, v.dtype, self.backend)

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

        return (Decline("attention is causal", causal), Decline("attention has a mask", masked))

    def mutants(self) -> Sequence[Mutant]:
        return (
            Mutant("V's scale is not taken back", _VStaysScaled()),
            Mutant("one head of K has twice the scale it was cast with", _OneHeadOff()),
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
    def attention(self, query: Any, key: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
        q8, k8 = attention.quantize_heads(query, q_scale), attention.quantize_heads(key, k_scale)
        v8, none = attention.quantize_heads(v, v_scale), aten.ones_like(v_scale)
        return attention.fp8_attention(q8, k8, v8, q_scale, k_scale, none, v.dtype, self.backend)


@dataclass(frozen=True)
class _OneHeadOff(FP8Attention):
    def attention(self, query: Any, key: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
        operands = ((query, q_scale), (key, k_scale), (v, v_scale))
        q8, k8, v8 = (attention.quantize_heads(one, scale) for one, scale in operands)
        first, others = aten.slice.Tensor(k_scale, 0, 0, 1), aten.slice.Tensor(k_scale, 0, 1, 2**31)
        off = aten.cat([first * 2.0, others])
        return attention.fp8_attention(q8, k8, v8, q_scale, off, v_scale, v.dtype, self.backend)
