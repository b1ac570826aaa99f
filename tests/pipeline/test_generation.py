"""A generation returns media on the CPU that depend on the settings alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from h3opt.metrics.bits import bits_equal
from h3opt.pipeline.generation import GenerationSettings, generate

CLIP = GenerationSettings(num_inference_steps=2)


def test_the_settings_are_what_the_media_have(silent: Any) -> None:
    media = generate(silent, CLIP)
    assert media.video.shape == (1, CLIP.num_frames, 3, CLIP.height, CLIP.width)
    assert media.video.dtype == torch.float32 and 0 <= media.video.min() <= media.video.max() <= 1
    assert media.audio.shape[:2] == (1, 2) and media.sampling_rate > 0
    assert bits_equal(media.video, generate(silent, CLIP).video)
    assert not bits_equal(media.video, generate(silent, replace(CLIP, seed=1)).video)


def test_settings_survive_json() -> None:
    assert GenerationSettings(**json.loads(json.dumps(CLIP.to_dict()))) == CLIP
