"""Statistics of trained weights, measured on the trained reference, and random weights that have them.

Random weights are plainer than trained ones in ways that number formats care about: V has no mean over the tokens, no
channel of the residual stream is larger than the rest, norm weights are near one. ``weights/statistics.json`` has what
the project's own trained reference (:mod:`reference.trained`: 64x96 pixels, three steps of the transformer) has
instead. It was written by::

    python -P -m h3opt.reference.weight_statistics

The reference is small, and was trained for minutes: a model for users may be further from plain than this.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STATISTICS = Path(__file__).parent / "weights" / "statistics.json"
_NORMS = ("norm1", "norm2", "attn.norm_q", "attn.norm_k")
_MEDIAN, _P99 = 0.6745, 2.3263  # of |normal| and of normal with unit deviation
_SHIFT_KEPT = 0.1  # how much of AdaLN's random shift stays beside the offset: timesteps and modalities still differ


def channel_offsets(v: Tensor) -> Tensor:
    """``|mean| / standard deviation`` over the tokens of each channel: v ``[1, tokens, channels]`` → ``[channels]``."""
    return v[0].float().mean(0).abs() / v[0].float().std(0)


def measure_statistics() -> dict[str, Any]:
    """Generate one clip with the trained reference and measure.

    Returns:
        for ``transformer_blocks`` and ``refiner_blocks``: ``v_offset`` (median, 90th percentile and largest of
        :func:`channel_offsets`; over the blocks, and for the refiner its first block) and mean and standard deviation
        of the weights of each norm; ``stream``: the 99th percentile and the largest of the channels' root mean squares
        at the input of the transformer's first block, over the median channel's.
    """
    from .tiny import tiny_call
    from .trained import trained_pipeline

    pipeline = trained_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    model = pipeline.transformer
    blocks = {"transformer_blocks": model.transformer_blocks, "refiner_blocks": model.token_refiner.refiner_blocks}
    offsets: dict[str, list[Tensor]] = {"transformer_blocks": [], "refiner_blocks": []}
    streams: list[Tensor] = []
    handles = [
        block.attn.to_v.register_forward_hook(
            lambda _, args, out, kind=kind: offsets[kind].append(channel_offsets(out))
        )
        for kind, chosen in blocks.items()
        for block in (chosen if kind == "transformer_blocks" else chosen[:1])
    ]
    handles.append(
        model.transformer_blocks[0].register_forward_pre_hook(lambda _, args: streams.append(args[0][0].float()))
    )
    try:
        with torch.no_grad():
            tiny_call(pipeline, num_inference_steps=4)  # three steps of the transformer
    finally:
        for handle in handles:
            handle.remove()
    found: dict[str, Any] = {}
    for kind, chosen in blocks.items():
        found[kind] = {"v_offset": _quantiles(torch.cat(offsets[kind]))}
        for norm in _NORMS:
            weights = torch.cat([block.get_submodule(norm).weight.float() for block in chosen])
            found[kind][norm] = {"mean": _rounded(weights.mean()), "std": _rounded(weights.std())}
    sizes = torch.stack([stream.square().mean(0).sqrt() for stream in streams])
    relative = sizes / sizes.median(-1, keepdim=True).values
    found["stream"] = {"p99": _rounded(relative.flatten().quantile(0.99)), "largest": _rounded(relative.max())}
    return found


def read_statistics() -> dict[str, Any]:
    """What :func:`measure_statistics` returned when the trained weights were made."""
    return json.loads(STATISTICS.read_text("utf-8"))


@torch.no_grad()
def apply_statistics(model: Any, generator: torch.Generator) -> None:
    """Give a MiniMax-H3 transformer with random weights the statistics of trained ones, in place.

    * V's channel offsets: AdaLN's first shift gets an offset per hidden channel, the same for all modalities and
      timesteps; V, a product with random weights, then has normal offsets with the measured median. In the token
      refiner the bias of the text embedding does it.
    * outlier channels: the channels of the residual stream have log-normal sizes with the measured 99th percentile.
    * norm weights: normal, with the measured mean and standard deviation.

    Args:
        model: filled by :func:`reference.random_weights.fill_random`.
        generator: on the device of the parameters.
    """
    measured = read_statistics()
    hidden = model.transformer_blocks[0].norm1.weight.numel()

    def normal(mean: float, std: float, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=like.device) * std + mean

    for kind, blocks in (
        ("transformer_blocks", model.transformer_blocks),
        ("refiner_blocks", model.token_refiner.refiner_blocks),
    ):
        for block in blocks:
            for norm in _NORMS:
                weight = block.get_submodule(norm).weight
                weight.copy_(normal(measured[kind][norm]["mean"], measured[kind][norm]["std"], weight))
    offset = measured["transformer_blocks"]["v_offset"]["median"] / _MEDIAN
    size = measured["transformer_blocks"]["norm1"]["mean"]
    for block in model.transformer_blocks:
        linear = block.adaln_proj.linear  # rows are [modality, six parameters, hidden]; the first is the shift before V
        shared = torch.randn(hidden, generator=generator, device=linear.bias.device) * offset * size
        linear.weight.view(-1, 6, hidden, linear.in_features)[:, 0] *= _SHIFT_KEPT
        linear.bias.view(-1, 6, hidden)[:, 0] = shared.to(linear.bias.dtype)
    # text enters at unit variance, so this bias is V's offset in standard deviations
    bias = model.context_embedder.bias
    bias.copy_(normal(0.0, measured["refiner_blocks"]["v_offset"]["median"] / _MEDIAN, bias))
    _scale_stream(model, math.log(measured["stream"]["p99"]) / _P99, generator)


def _scale_stream(model: Any, spread: float, generator: torch.Generator) -> None:
    """Multiply the channels of what enters the residual stream by log-normal factors, the same for every modality."""
    like = model.proj_in.bias
    factors = (torch.randn(like.shape, generator=generator, device=like.device) * spread).exp()
    for layer in (model.proj_in, model.audio_proj_in):
        layer.weight *= factors[:, None].to(layer.weight.dtype)
        layer.bias *= factors.to(layer.bias.dtype)
    final: nn.Parameter = model.token_refiner.final_norm.weight
    final.mul_(factors.to(final.dtype))


def _quantiles(values: Tensor) -> dict[str, float]:
    return {
        "median": _rounded(values.median()),
        "p90": _rounded(values.quantile(0.9)),
        "largest": _rounded(values.max()),
    }


def _rounded(value: Tensor) -> float:
    return round(float(value), 4)


if __name__ == "__main__":
    STATISTICS.write_text(json.dumps(measure_statistics(), indent=1) + "\n", "utf-8")
