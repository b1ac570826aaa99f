"""The length of the packed sequence that MiniMax-H3's transformer reads."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    align_num_frames,
    audio_latent_num_frames,
    video_latent_num_frames,
)

from h3opt.pipeline.generation import GenerationSettings


def sequence_length(pipe: Any, settings: GenerationSettings) -> int:
    """Count the rows of the packed sequence of one text-to-video generation.

    Counts what diffusers' step for the packed sequence counts: a row for each token of the prompt, a row for each
    latent of each audio channel, and a row for each patch of each latent frame of the video. Rows of keyframes and of
    references are not counted. A pipeline without a tokenizer counts no text.

    Args:
        pipe: a MiniMax-H3 pipeline; nothing is computed.
        settings: what is generated.
    """
    chunk = pipe.vae_frames_per_chunk, pipe.vae_latents_per_chunk
    frames = align_num_frames(settings.num_frames, *chunk)
    ratio, (_, patch_height, patch_width) = pipe.vae_spatial_compression_ratio, pipe.patch_size
    patches = (settings.height // ratio // patch_height) * (settings.width // ratio // patch_width)
    tokenizer = getattr(pipe, "tokenizer", None)
    text = 0 if tokenizer is None else len(tokenizer(settings.prompt, add_special_tokens=False)["input_ids"])
    audio = audio_latent_num_frames(frames) * pipe.audio_channels
    return text + audio + video_latent_num_frames(frames, *chunk) * patches
