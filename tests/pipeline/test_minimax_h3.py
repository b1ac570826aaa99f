"""What h3opt knows about MiniMax-H3 is so in the diffusers that is installed, and knowing it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from h3opt.pipeline import minimax_h3
from h3opt.pipeline.steps import find_steps

STEPS = [name for name in vars(minimax_h3) if name.endswith("_STEP")]


@pytest.mark.parametrize("name", STEPS)
def test_the_pipeline_has_each_named_step(name: str, pipe: Any) -> None:
    assert find_steps(pipe, getattr(minimax_h3, name))


def test_the_decode_steps_decode_with_components_of_the_pipeline(pipe: Any) -> None:
    assert set(minimax_h3.DECODE_STEPS.values()) <= set(minimax_h3.component_classes())
    assert isinstance(pipe, minimax_h3.pipeline_class())
    for name, component_class in minimax_h3.component_classes().items():
        assert isinstance(getattr(pipe, name), component_class)
    assert all(hasattr(pipe, scheduler) for scheduler in minimax_h3.SCHEDULERS)
    assert set(pipe.pretrained_component_names) >= minimax_h3.OPTIONAL_COMPONENTS


def test_every_block_has_the_named_layers(pipe: Any) -> None:
    for block in (*minimax_h3.transformer_blocks(pipe.transformer), *minimax_h3.decoder_blocks(pipe.vae)):
        layers = [block.get_submodule(path) for path in minimax_h3.PROJECTIONS]
        assert all(isinstance(layer, torch.nn.Linear) for layer in layers)
        linear = {name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)}
        assert {name for name in linear if not name.startswith(minimax_h3.ADALN_PROJECTION)} == set(
            minimax_h3.PROJECTIONS
        )
    for block in minimax_h3.transformer_blocks(pipe.transformer):
        assert isinstance(getattr(block, minimax_h3.ADALN_PROJECTION), torch.nn.Module)
    assert all(hasattr(pipe.transformer, name) for name in minimax_h3.STEP_INVARIANTS)


def test_regions_are_the_repeated_blocks_or_the_transformer_as_a_whole(pipe: Any) -> None:
    blocks = {region.name: region for region in minimax_h3.regions(pipe.transformer, pipe.vae, "block")}
    assert list(blocks) == ["transformer.block", "transformer.refiner", "vae.block"]
    assert all(len({type(module) for module in region.modules}) == 1 for region in blocks.values())
    whole, decoder = minimax_h3.regions(pipe.transformer, pipe.vae, "model")
    assert whole.modules == [pipe.transformer] and decoder.name == "vae.block"
    assert whole.holds["transformer.block"] == len(blocks["transformer.block"].modules)
    assert whole.holds["transformer.refiner"] == len(blocks["transformer.refiner"].modules)
    assert [region.name for region in minimax_h3.regions(None, pipe.vae, "model")] == ["vae.block"]
    assert minimax_h3.regions(None, None, "block") == []


def test_the_video_geometry_is_that_of_the_released_model(pipe: Any) -> None:
    geometry = minimax_h3.video_geometry(pipe.vae)
    assert (geometry.temporal_ratio, geometry.spatial_ratio, geometry.chunk_frames) == (4, 16, 17)
    assert geometry.chunk_latents == 5 and geometry.dropped_latents == 3 and geometry.overlap_latents == 2
    assert geometry.chunk_latents * geometry.temporal_ratio - geometry.skipped_frames == minimax_h3.FRAME_PERIOD
    assert geometry.faded_frames == minimax_h3.FRAME_OFFSET
    assert geometry.tiled and geometry.tile == (256, 256) and geometry.overlap == (64, 64)


def test_the_timestep_is_found_by_name_and_by_position() -> None:
    timestep = torch.ones(1)
    assert minimax_h3.forward_timestep((1, 2, 3, timestep), {}) is timestep
    assert minimax_h3.forward_timestep((), {"timestep": timestep}) is timestep


def test_frame_counts_follow_the_rule() -> None:
    assert [frames for frames in range(400) if minimax_h3.is_frame_count(frames)] == [*range(124, 346, 17)]
    assert minimax_h3.FRAME_RULE == "17 n + 5, from 124 to 345"


def test_importing_it_imports_neither_torch_nor_diffusers() -> None:
    code = "import sys, h3opt.pipeline.minimax_h3; print({'torch', 'diffusers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
