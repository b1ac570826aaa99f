"""Measures of latents agree with their definitions, and tracing them changes nothing."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
import torch
from conftest import assert_same_media

from h3opt.errors import PipelineError
from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.pipeline.view import PipelineView
from h3opt.verification.latents import adjacent_cell_cosine, excess_kurtosis, trace_latents


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_neighbouring_cells_of_a_constant_are_alike_and_of_noise_are_not():
    flat = torch.ones(1, 24, 3, 8, 12)
    assert adjacent_cell_cosine(flat).mean == pytest.approx(1)
    white = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    assert abs(adjacent_cell_cosine(white).mean) < 0.05
    assert adjacent_cell_cosine(white).pairs == pytest.approx(1, abs=0.05)
    grid = white.repeat_interleave(2, 3).repeat_interleave(2, 4)
    assert adjacent_cell_cosine(grid).within == pytest.approx(1) and abs(adjacent_cell_cosine(grid).across) < 0.05
    single = adjacent_cell_cosine(white, (1, 1, 1))
    assert math.isnan(single.within) and single.mean == single.across and single.to_dict()["within"] is None
    with pytest.raises(PipelineError, match="Video latents"):
        adjacent_cell_cosine(white[0])


def test_kurtosis_tells_uniform_from_gaussian():
    assert abs(excess_kurtosis(torch.randn(50_000, generator=torch.Generator().manual_seed(0)))[0]) < 0.1
    kurtosis, error = excess_kurtosis(noise(50_000))
    assert kurtosis == pytest.approx(-1.2, abs=0.05) and error == pytest.approx(math.sqrt(24 / 50_000))


def test_a_trace_has_every_step_and_changes_nothing(silent):
    clip = GenerationSettings(num_inference_steps=3)
    view = PipelineView.of(silent)
    plain = generate(silent, clip)
    with ExitStack() as undo:
        trace = trace_latents(view, undo)
        traced = generate(silent, clip)
        first = trace.to_dict()
        generate(silent, clip)
        assert trace.to_dict() == first, "a second generation starts anew"
    assert_same_media(plain, traced)
    assert len(trace.steps) == 2 and set(trace.steps[0]) == {"video", "audio", "video_motion", "audio_motion"}
    assert trace.initial is not None and trace.final is not None and trace.audio_final is not None
    assert trace.patch == tuple(silent.patch_size)
    assert abs(excess_kurtosis(trace.initial)[0]) < 0.3, "MiniMax-H3 starts from Gaussian noise"
    rms = trace.final.float().square().mean().sqrt().item()
    assert trace.steps[-1]["video"] == pytest.approx(rms, rel=1e-4), "the last step is what is decoded"
    generate(silent, clip)
    assert len(trace.steps) == 2, "the hooks are off"


def test_a_bare_model_has_no_trace(silent):
    with pytest.raises(PipelineError, match="cannot be traced"), ExitStack() as undo:
        trace_latents(PipelineView.of(silent.transformer), undo)
