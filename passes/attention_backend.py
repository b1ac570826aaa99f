"""Attention from the library that was measured to be fastest."""

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
    PipelineView,
    Rounding,
    Rule,
    register,
    with_replacement,
)
from h3opt.pass_api.guards import check_attention
from h3opt.pass_api.patterns import unmasked_attention

aten = torch.ops.aten


def unserved(heads: torch.Tensor) -> str | None:
    """Why no library attends over heads of this dtype or width, though torch does."""
    if heads.device.type == "cuda":
        if heads.dtype not in (torch.bfloat16, torch.float16):
            return f"libraries have no attention in {heads.dtype}"
        if heads.shape[-1] % 8 or heads.shape[-1] > 128:
            return f"libraries have no attention for heads of {heads.shape[-1]} channels"
    return None


def libraries_serve(match: Match) -> str | None:
    """Why a site's attention is none that every library has."""
    query = match.tensor("query")
    return (unserved(query) if query is not None else None) or check_attention(match, "query", "key", "value")


@register
@dataclass(frozen=True)
class AttentionBackend(GraphPass):
    """Attention that nothing else has rewritten runs in the library a profile names, not in the one torch picks.

    Libraries sum in blocks of their own sizes: the same maths with the same roundings in another order.

    Options:
        backend: fa3 (needs its package), cudnn or flash (which runs everywhere).
    """

    backend: str = "flash"

    name = "attention_backend"
    after = ("fp8_attention",)
    promise = Rounding(ulps=8)

    def __post_init__(self) -> None:
        if self.backend not in attention.BF16_BACKENDS:
            raise ValueError(f"backend must be one of {attention.BF16_BACKENDS}, got {self.backend!r}")

    def applies(self, device: Device, view: PipelineView) -> str | None:
        reason = attention.missing(self.backend, device, fp8=False)
        return reason

    def rules(self) -> Sequence[Rule]:
        def named(query, key, value, swap):
            return attention.attention(query, key, value, self.backend)

        return (Rule(unmasked_attention, named, libraries_serve),)

    def expect(self, facts: GraphFacts) -> int | None:
        """All attention that libraries have, but what `fp8_attention` takes."""
        if not facts.holds:
            return None
        attention_of_torch = aten.scaled_dot_product_attention.default
        taken = facts.per(transformer_block=1) if facts.find("fp8_attention") is not None else 0
        left = sum(unserved(out) is not None for out in facts.results.get(attention_of_torch, ()))
        return max(facts.operators.get(attention_of_torch, 0) - left - (taken or 0), 0)

    def example(self, draw: Draw) -> Example:
        return Example(_model(), _arguments(draw))

    def declines(self) -> Sequence[Decline]:
        def causal(draw: Draw) -> Example:
            return Example(_model(is_causal=True), _arguments(draw))

        def masked(draw: Draw) -> Example:
            mask = draw.tensor(draw.tokens, draw.tokens)
            return Example(_masked, (*_arguments(draw), mask))

        def other_scale(draw: Draw) -> Example:
            return Example(_model(scale=0.5), _arguments(draw))

        return (
            Decline("attention is causal", causal),
            Decline("attention has a mask", masked),
            Decline("logits have a scale of their own", other_scale),
        )

    def mutants(self) -> Sequence[Mutant]:
        def values_swapped(query, key, value, swap):
            return attention.attention(key, query, value, self.backend)

        return (Mutant("K is taken for Q", with_replacement(self, values_swapped)),)


def _model(**how: Any) -> Callable[..., torch.Tensor]:
    def model(q, k, v):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

    return model


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _model(attn_mask=mask)(q, k, v)


def _arguments(draw: Draw) -> tuple[torch.Tensor, ...]:
    return draw.attention()
