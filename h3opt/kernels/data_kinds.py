"""Kinds of random data for tests, probes, checks and benchmarks: shapes alone do not show how a sum goes wrong.

On zero-mean data the partial sums of a long reduction stay small, so an accumulator with few bits looks right. Data of
trained networks has offsets per channel, drifts along the tokens, clusters of similar tokens and outliers. The names:

* ``zero_mean``: standard normal.
* ``offset_0.3``, ``offset_2``: each channel has an offset of its own, normal with 0.3 or 2 standard deviations.
* ``drift``: each channel goes slowly up and down along the tokens, by about two standard deviations.
* ``clusters``: groups of 64 tokens belong to one of 23 clusters, each with a mean of its own (objects in a video). In
  attention, tokens of one cluster also look at one another a little more.
* ``heavy_tails``: Student's t with three degrees of freedom, scaled to unit variance.
* ``outlier_channels``: a few channels (one in 32, at least one) are 100 times the rest.
* ``peaked``, ``flat``: normal data with a softmax that a few keys dominate, or that weighs all keys alike. They concern
  attention; a tensor that is drawn alone is zero-mean.
* ``nan_row``: normal, and every value of one token is NaN.

The module stands in ``kernels`` because the checks that operators register are the lowest code that draws kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FINITE_KINDS = ("zero_mean", "offset_0.3", "offset_2", "drift", "clusters", "heavy_tails", "outlier_channels")
ATTENTION_KINDS = (*FINITE_KINDS, "peaked", "flat")
KINDS = (*ATTENTION_KINDS, "nan_row")

_CLUSTERS, _CLUSTER_TOKENS = 23, 64
_CLUSTER_SPREAD, _CLUSTER_PULL = 1.5, 0.35  # standard deviation of V's means; how far Q and K share a direction
_LEANING = 0.5
_OUTLIER, _CHANNELS_PER_OUTLIER = 100.0, 32
_PEAKED, _FLAT = 3.0, 0.01  # what Q is multiplied by: logits have this standard deviation


def draw(kind: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random data of one kind.

    Args:
        kind: one of :data:`KINDS`.
        shape: ``[batch, tokens, ..., channels]`` or ``[tokens, channels]``. A vector ``[channels]`` is drawn as one
            token, and ``nan_row`` leaves it finite: a parameter with NaN would make every token NaN.
        generator: the data is drawn on its device; the global generators are left alone.

    Returns:
        float32 of ``shape``, with unit variance but for what the kind adds.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no kind of data {kind!r}; use one of {', '.join(KINDS)}")
    noise = torch.randn(tuple(shape), generator=generator, device=generator.device)
    structure = _STRUCTURES.get(kind)
    if structure is None or not noise.numel() or not noise.ndim:
        return noise
    if noise.ndim == 1:
        return noise if kind == "nan_row" else structure(noise[None, None], generator)[0, 0]
    return structure(noise[None], generator)[0] if noise.ndim == 2 else structure(noise, generator)


def draw_attention(kind: str, shape: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random Q, K and V of one kind, float32 ``[batch, tokens, heads, head_dim]`` each.

    Offsets and drift are those of V: what they add to K does not change a softmax. ``outlier_channels`` has outliers in
    K and V; Q is smaller by the same factor in K's, so the logits are ordinary. ``nan_row`` has one NaN token in Q.

    Raises:
        ValueError: there is no such kind.
    """
    shape = tuple(shape)
    if kind in ("heavy_tails", "zero_mean"):
        q, k, v = (draw(kind, shape, generator) for _ in range(3))
        return q, k, v
    q, k = (draw("zero_mean", shape, generator) for _ in range(2))
    if kind == "nan_row":
        return draw(kind, shape, generator), k, draw("zero_mean", shape, generator)
    v = draw(kind, shape, generator)
    if not v.numel():
        return q, k, v
    if kind == "clusters":
        pull = _CLUSTER_PULL * _cluster_means(shape, generator)
        q, k = q + pull, k + pull
    elif kind == "outlier_channels":
        channels = _outliers(shape[-1], generator)
        q[..., channels] /= _OUTLIER
        k[..., channels] *= _OUTLIER
    elif kind in ("peaked", "flat"):
        q = q * (_PEAKED if kind == "peaked" else _FLAT)
    return q, k, v


def draw_linear(kind: str, tokens: int, inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random activations ``[tokens, inputs]`` and weights ``[outputs, inputs]`` of one kind, float32.

    A product of independent offsets has terms of either sign. So for the kinds with offsets each row of the weights
    leans towards the offsets of the activations, by half a standard deviation: the terms of a sum then have one sign on
    average, as where a layer of a trained network reads the mean of its input. Weights of the other kinds are normal,
    but for heavy tails. Weights are divided by √inputs.
    """
    if kind.startswith("offset_"):
        direction = torch.randn(inputs, generator=generator, device=generator.device)
        x = draw("zero_mean", (tokens, inputs), generator) + float(kind.removeprefix("offset_")) * direction
        weight = draw("zero_mean", (outputs, inputs), generator) + _LEANING * direction
    else:
        x = draw(kind, (tokens, inputs), generator)
        weight = draw("heavy_tails" if kind == "heavy_tails" else "zero_mean", (outputs, inputs), generator)
    return x, weight * inputs**-0.5


def _offset(noise: Tensor, generator: torch.Generator, size: float) -> Tensor:
    return noise + size * _per_channel(noise, generator)


def _drift(noise: Tensor, generator: torch.Generator) -> Tensor:
    phase = torch.linspace(0, 8 * math.pi, noise.shape[1], device=noise.device)
    course = (phase + math.pi / 4).sin().view(1, -1, *[1] * (noise.ndim - 2))
    return noise + 2.0 * course * _per_channel(noise, generator)


def _clusters(noise: Tensor, generator: torch.Generator) -> Tensor:
    return noise + _CLUSTER_SPREAD * _cluster_means(noise.shape, generator)


def _heavy_tails(noise: Tensor, generator: torch.Generator) -> Tensor:
    chi_squared = torch.zeros_like(noise)
    for _ in range(3):
        chi_squared += torch.randn(noise.shape, generator=generator, device=noise.device).square()
    return noise / chi_squared.sqrt()  # Student's t is √3 times this, and has variance 3


def _outlier_channels(noise: Tensor, generator: torch.Generator) -> Tensor:
    noise[..., _outliers(noise.shape[-1], generator)] *= _OUTLIER
    return noise


def _nan_row(noise: Tensor, generator: torch.Generator) -> Tensor:
    noise[:, noise.shape[1] // 2] = math.nan
    return noise


def _per_channel(noise: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn((1, 1, *noise.shape[2:]), generator=generator, device=noise.device)


def _cluster_means(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """The mean of each token's cluster: ``[1, tokens, ..., channels]``."""
    device = generator.device
    means = torch.randn((_CLUSTERS, *shape[2:]), generator=generator, device=device)
    cluster = torch.arange(shape[1], device=device) // _CLUSTER_TOKENS * 7919 % _CLUSTERS  # neighbours differ
    return means[cluster][None]


def _outliers(channels: int, generator: torch.Generator) -> Tensor:
    count = max(channels // _CHANNELS_PER_OUTLIER, 1)
    return torch.randperm(channels, generator=generator, device=generator.device)[:count]


_STRUCTURES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "offset_0.3": lambda noise, generator: _offset(noise, generator, 0.3),
    "offset_2": lambda noise, generator: _offset(noise, generator, 2.0),
    "drift": _drift,
    "clusters": _clusters,
    "heavy_tails": _heavy_tails,
    "outlier_channels": _outlier_channels,
    "nan_row": _nan_row,
}
