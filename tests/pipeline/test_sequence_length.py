"""The length of the packed sequence is counted before a generation as the pipeline counts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.pipeline.sequence_length import sequence_length
from h3opt.reference import parse_canvas


@pytest.mark.parametrize("prompt", ["A fox.", "a green ring moves left over blue, a high hum"])
def test_the_count_is_the_length_that_the_transformer_reads(silent: Any, prompt: str) -> None:
    settings = GenerationSettings(prompt=prompt, height=96, width=64, num_inference_steps=2)
    lengths = []
    hook = silent.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["position_ids"].shape[0]), with_kwargs=True
    )
    generate(silent, settings)
    hook.remove()
    assert lengths == [sequence_length(silent, settings)]


def test_without_a_tokenizer_the_rows_of_text_are_not_counted(silent: Any) -> None:
    canvas = parse_canvas("128x192x141")
    names = ("vae_frames_per_chunk", "vae_latents_per_chunk", "vae_spatial_compression_ratio", "patch_size")
    bare = SimpleNamespace(**{name: getattr(silent, name) for name in (*names, "audio_channels")})
    settings = GenerationSettings(height=128, width=192, num_frames=141)
    assert sequence_length(bare, settings) == canvas.video_rows + canvas.audio_rows
