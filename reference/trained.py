"""The reference that draws: the unmodified MiniMax-H3 pipeline with small weights that were trained.

`reference/train.py` made the weights. Prompts are captions of :mod:`reference.scenes`; what the model is good for, and
what not, stands in `reference/README.md`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import AutoencoderKLMiniMaxH3Audio
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from .random_weights import cast_as_loaded, fill_random
from .tiny import AUDIO_VAE_CONFIG as TINY_AUDIO_VAE_CONFIG
from .tiny import TRANSFORMER_CONFIG as TINY_TRANSFORMER_CONFIG
from .tiny import assemble, text_encoder_config, tokenizer_and_processor

WEIGHTS = Path(__file__).parent / "weights"
TRANSFORMER_CONFIG: dict[str, Any] = {
    **TINY_TRANSFORMER_CONFIG,
    "num_attention_heads": 4,
    "hidden_size": 192,
    "num_layers": 6,
    "ffn_dim": 512,
}
VAE_CONFIG: dict[str, Any] = {
    "block_out_channels": (16, 32, 48, 64, 64, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "decoder_num_layers": 6,
    "decoder_num_attention_heads": 3,
    "decoder_attention_head_dim": 64,
    "decoder_ffn_mult": 3,
}
AUDIO_VAE_CONFIG: dict[str, Any] = {**TINY_AUDIO_VAE_CONFIG, "encoder_dim": 4}
_COMPONENTS = ("transformer", "vae", "audio_vae", "text_encoder")


class WeightsError(RuntimeError):
    """The trained weights are missing, cut short, or of another model."""


def trained_pipeline(
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    weights: Path = WEIGHTS,
    fresh: Collection[str] = (),
) -> MiniMaxH3ModularPipeline:
    """The unmodified MiniMax-H3 pipeline with trained weights, ready to call; see `tiny_call`.

    Args:
        dtype: as `load_components(torch_dtype=dtype)`, as in `tiny_pipeline`.
        device: where the weights go.
        weights: folder of `trained_<component>.safetensors`.
        fresh: components that are made anew instead of read: for training.

    Raises:
        WeightsError: a file is missing or cannot be read.
    """
    models = {}
    for name in _COMPONENTS:
        with torch.random.fork_rng(devices=[], enabled=name not in fresh):  # the classes draw before they are filled
            model = build(name)
        if name not in fresh:
            _load(model, weights / f"trained_{name}.safetensors")
        models[name] = cast_as_loaded(model.eval().requires_grad_(False), dtype).to(device)
    return assemble(**models)


def build(component: str) -> nn.Module:
    """One component before training. The text encoder is complete: it stays random."""
    if component == "transformer":
        return MiniMaxH3Transformer3DModel(**TRANSFORMER_CONFIG)
    if component == "audio_vae":
        return AutoencoderKLMiniMaxH3Audio(**AUDIO_VAE_CONFIG)
    if component == "vae":
        vae = AutoencoderKLMiniMaxH3(**VAE_CONFIG)
        for name, parameter in vae.named_parameters():
            if name.endswith(("scale1", "scale2")):
                nn.init.constant_(parameter, 0.5)  # the class starts LayerScale at 0, which no gradient passes
            elif "register_tokens" in name:
                nn.init.normal_(parameter, std=0.02)
        return cast(nn.Module, vae)
    tokenizer, _ = tokenizer_and_processor()
    encoder = fill_random(
        Qwen3VLForConditionalGeneration(text_encoder_config(tokenizer)), torch.Generator().manual_seed(0)
    )
    for name, parameter in encoder.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data *= 0.15  # so that a letter can still be told after 50 random layers
    return encoder


def save_stage(model: Any, component: str, folder: Path) -> None:
    """Write one component in bfloat16, with its latents' statistics."""
    state = {name: one.detach().cpu() for name, one in model.state_dict().items()}
    state = {name: one.bfloat16().contiguous() if one.is_floating_point() else one for name, one in state.items()}
    state = {name: one for name, one in state.items() if not _is_computed(name)}
    config = {key: list(model.config[key]) for key in ("latents_mean", "latents_std") if key in model.config}
    save_file(state, folder / f"trained_{component}.safetensors", metadata={"config": json.dumps(config)})


def _load(model: Any, path: Path) -> None:
    if not path.is_file():
        raise WeightsError(f"There is no {path.name} in {path.parent}. Install the project again, or train it anew.")
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            config = json.loads(file.metadata()["config"])
        missing, unexpected = model.load_state_dict(state, strict=False)
    except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path.name} cannot be read ({error}). Install the project again.") from error
    missing = [name for name in missing if not _is_computed(name)]
    if missing or unexpected:
        wrong = (missing or unexpected)[0]
        raise WeightsError(f"{path.name} is of another model: {wrong} does not fit. Install the project again.")
    if config:
        model.register_to_config(**config)


def _is_computed(name: str) -> bool:
    """The audio VAE's resampling filters: the class computes them, and bfloat16 would spoil them."""
    return name.endswith(".filter")
