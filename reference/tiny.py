"""The unmodified MiniMax-H3 pipeline at a size that runs on a laptop: real classes, small random weights.

Every component is the class diffusers and transformers ship, with a smaller config. The sizes keep what makes
the full model awkward: more attention channels than hidden channels, rotary on part of each head, a head
dimension that attention libraries accept, two schedulers, five-plus-two latent chunks in the video VAE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import AutoencoderKLMiniMaxH3Audio
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from diffusers.schedulers.scheduling_minimax_h3 import MiniMaxH3Scheduler
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from .random_weights import cast_as_loaded, fill_random

TEXT_DIM = 48
# The released pipeline conditions on `hidden_states[50]` and refuses a text encoder that has no layer after
# it.
TEXT_LAYERS = 51

TRANSFORMER_CONFIG: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 64,
    "hidden_size": 128,
    "num_layers": 4,
    "num_refiner_layers": 2,
    "ffn_dim": 256,
    "text_dim": TEXT_DIM,
    "freq_dim": 64,
    "time_embed_hidden_dim": 128,
    "time_embed_dim": 64,
    "rope_freq_dim": 8,
}
VAE_CONFIG: dict[str, Any] = {
    "block_out_channels": (8, 8, 8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 3,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 64,
    "decoder_ffn_mult": 2,
}
AUDIO_VAE_CONFIG: dict[str, Any] = {
    "encoder_dim": 2,
    # 400 samples a latent at 16 kHz, where the released model has 800 at 32 kHz: half its time on a CPU again
    "encoder_rates": (2, 2, 4, 5, 5),
    "decoder_rates": (5, 5, 2, 2, 2, 2),
    "decoder_kernel_sizes": (9, 9, 4, 4, 4, 4),
    "sampling_rate": 16_000,
    "latent_dim": 64,
    "latent_channels": 32,
    "num_attention_heads": 2,
    "decoder_dim": 256,
    "resblock_kernel_sizes": (3, 7),  # the released model has a third of each: half its time
    "resblock_dilation_sizes": ((1, 3), (1, 3)),
    "latents_mean": [0.0] * 32,
    "latents_std": [1.0] * 32,
}
_SPECIAL_TOKENS = {
    "end_of_text": "<|endoftext|>",
    "message_start": "<|im_start|>",
    "message_end": "<|im_end|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def tiny_pipeline(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> MiniMaxH3ModularPipeline:
    """The unmodified MiniMax-H3 pipeline with tiny random weights, ready to call.

    Args:
        dtype: as `load_components(torch_dtype=dtype)`: the modules that MiniMax-H3 keeps in float32 stay
            float32 (all of the audio VAE, the video VAE's encoder and norms, the transformer's input and
            output projections).
        device: where the weights go. They are drawn on the CPU, so they are the same on every device.
        seed: of the weights. The global random state is neither read nor changed.

    Returns:
        the pipeline; call it as diffusers documents, or through `tiny_call`.
    """
    # The classes initialise themselves from the global generator; forking keeps the caller's stream
    # untouched.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, _ = tokenizer_and_processor()
        models = {
            "transformer": MiniMaxH3Transformer3DModel(**TRANSFORMER_CONFIG),
            "vae": AutoencoderKLMiniMaxH3(**VAE_CONFIG),
            "audio_vae": AutoencoderKLMiniMaxH3Audio(**AUDIO_VAE_CONFIG),
            "text_encoder": Qwen3VLForConditionalGeneration(text_encoder_config(tokenizer)),
        }
    for offset, model in enumerate(models.values()):
        fill_random(model, torch.Generator().manual_seed(seed + offset))
        cast_as_loaded(model.eval(), dtype).to(device)
    return assemble(**models)


def assemble(**models: Any) -> MiniMaxH3ModularPipeline:
    """A pipeline of the four models, with the released model's schedulers and the byte-level tokenizer."""
    tokenizer, processor = tokenizer_and_processor()
    pipeline = cast(MiniMaxH3ModularPipeline, MiniMaxH3Blocks().init_pipeline())
    pipeline.update_components(
        tokenizer=tokenizer,
        processor=processor,
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        **models,
    )
    return pipeline


def tiny_call(
    pipeline: MiniMaxH3ModularPipeline,
    prompt: str = "a red circle moves right over grey, a low hum",
    height: int = 64,
    width: int = 96,
    num_frames: int = 124,
    num_inference_steps: int = 4,
    seed: int = 0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Generate video and audio with any MiniMax-H3 pipeline; three seconds on two cores with the tiny one.

    Args:
        height, width: pixels, multiples of 32.
        num_frames: 17 n + 5, at 24 frames a second; 124 is the shortest that the pipeline accepts.
        num_inference_steps: of the schedule; the transformer runs once less.
        seed: of the noise. It is drawn on the CPU, so it is the same on every device.
        kwargs: further arguments of the pipeline (`image`, `latents`, ...).

    Returns:
        `videos` [1, frames, 3, height, width] float32 in [0, 1], `audio` [1, 2, samples] float32 and
        `sampling_rate` in Hz.
    """
    return pipeline(
        prompt=prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=num_inference_steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        output=["videos", "audio", "sampling_rate"],
        **kwargs,
    )


def save_tiny(directory: str | os.PathLike[str], dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Save the tiny pipeline with diffusers' own `save_pretrained`; returns the directory.

    It loads like the released repository, offline: `ModularPipeline.from_pretrained(directory)`, then
    `load_components(dtype=...)`. A component that fails to load is None afterwards: diffusers logs the reason
    and raises nothing.
    """
    directory = Path(directory).resolve()
    tiny_pipeline(dtype=dtype, seed=seed).save_pretrained(str(directory), overwrite_modular_index=True)
    return directory


def tokenizer_and_processor() -> tuple[Qwen2Tokenizer, Qwen3VLProcessor]:
    """A byte-level tokenizer (256 bytes, no merges, the special tokens of the pipeline) and its processor."""
    tokens = [*sorted(ByteLevel.alphabet()), *_SPECIAL_TOKENS.values()]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        additional_special_tokens=list(_SPECIAL_TOKENS.values())[1:],
    )
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
    )
    return tokenizer, processor


def text_encoder_config(tokenizer: Qwen2Tokenizer) -> Qwen3VLConfig:
    token_ids: dict[str, Any] = {
        field: tokenizer.convert_tokens_to_ids(token)
        for field, token in _SPECIAL_TOKENS.items()
        if field.endswith("_token_id")
    }
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_DIM,
            "intermediate_size": 96,
            "num_hidden_layers": TEXT_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": TEXT_DIM,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **token_ids,
    )
