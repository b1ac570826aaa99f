"""The tiny pipeline is deterministic, has the released dtypes, and is what diffusers loads back from disk."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
    ModularPipeline,
)
from transformers import Qwen3VLForConditionalGeneration

from h3opt.reference import save_tiny, tiny_call, tiny_pipeline

MODELS = ("transformer", "vae", "audio_vae", "text_encoder")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def pipelines() -> dict[str, Any]:
    return {name: tiny_pipeline(dtype) for name, dtype in DTYPES.items()}


@pytest.fixture(scope="module")
def outputs(pipelines: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: tiny_call(pipeline) for name, pipeline in pipelines.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same_outputs(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert torch.equal(left["videos"], right["videos"])
    assert torch.equal(left["audio"], right["audio"])
    assert left["sampling_rate"] == right["sampling_rate"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_returns_video_and_stereo_audio(outputs: dict[str, dict[str, Any]], dtype: str) -> None:
    output = outputs[dtype]
    assert output["videos"].shape == (1, 124, 3, 64, 96)
    assert output["videos"].dtype == torch.float32
    assert output["videos"].min() >= 0 and output["videos"].max() <= 1
    # 207 audio latents of 400 samples each.
    assert output["audio"].shape == (1, 2, 82_800)
    assert output["audio"].dtype == torch.float32
    assert output["sampling_rate"] == 16_000


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_is_not_degenerate(outputs: dict[str, dict[str, Any]], dtype: str) -> None:
    video, audio = outputs[dtype]["videos"], outputs[dtype]["audio"]
    assert video.std() > 0.1
    assert audio.isfinite().all() and (audio.std(-1) > 1e-3).all()
    assert ((video > 0) & (video < 1)).float().mean() > 0.5


def test_every_component_is_the_class_that_diffusers_and_transformers_ship(
    pipelines: dict[str, Any],
) -> None:
    pipeline = pipelines["float32"]
    assert type(pipeline.transformer) is MiniMaxH3Transformer3DModel
    assert type(pipeline.vae) is AutoencoderKLMiniMaxH3
    assert type(pipeline.audio_vae) is AutoencoderKLMiniMaxH3Audio
    assert type(pipeline.text_encoder) is Qwen3VLForConditionalGeneration
    assert type(pipeline.scheduler) is type(pipeline.audio_scheduler) is MiniMaxH3Scheduler
    assert type(pipeline) is MiniMaxH3ModularPipeline


def test_the_schedules_are_the_released_ones(pipelines: dict[str, Any]) -> None:
    pipeline = pipelines["float32"]
    assert (pipeline.scheduler.shift, pipeline.audio_scheduler.shift) == (12.0, 3.0)


def test_the_sizes_leave_passes_something_to_do(pipelines: dict[str, Any]) -> None:
    config = pipelines["float32"].transformer.config
    assert config.num_attention_heads * config.attention_head_dim > config.hidden_size
    assert 6 * config.rope_freq_dim < config.attention_head_dim
    assert config.hidden_size % 16 == 0
    assert (config.num_layers, config.num_refiner_layers) == (4, 2)


def test_no_parameter_has_a_value_that_hides_its_loss(
    pipelines: dict[str, Any],
) -> None:
    for name in MODELS:
        for parameter_name, parameter in getattr(pipelines["float32"], name).named_parameters():
            assert parameter.abs().max() > 0, f"{name}.{parameter_name}"
            if parameter.ndim == 1 and parameter.numel() > 1:
                assert parameter.std() > 0, f"{name}.{parameter_name}"


def test_two_builds_give_the_same_bits(outputs: dict[str, dict[str, Any]]) -> None:
    assert_same_outputs(tiny_call(tiny_pipeline()), outputs["float32"])


def test_another_seed_gives_other_weights(pipelines: dict[str, Any]) -> None:
    other = tiny_pipeline(seed=1)
    for name in MODELS:
        weights = [next(getattr(pipeline, name).parameters()) for pipeline in (pipelines["float32"], other)]
        assert not torch.equal(*weights)


def test_building_leaves_the_global_random_state_alone() -> None:
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].copy(),
    )
    tiny_pipeline()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state(legacy=False)["state"]["key"] == before[2]).all()


def test_the_prompt_and_the_seed_reach_the_output(
    pipelines: dict[str, Any], outputs: dict[str, dict[str, Any]]
) -> None:
    other = tiny_call(pipelines["float32"], prompt="Rain on a tin roof at night.", num_inference_steps=2)
    again = tiny_call(pipelines["float32"], num_inference_steps=2)
    assert not torch.equal(other["videos"], again["videos"])
    assert not torch.equal(other["audio"], again["audio"])
    assert not torch.equal(again["videos"], outputs["float32"]["videos"])


def test_bfloat16_keeps_the_float32_modules(pipelines: dict[str, Any]) -> None:
    pipeline = pipelines["bfloat16"]
    transformer = {name.split(".")[0] for name, p in state(pipeline.transformer).items() if p.dtype == torch.float32}
    assert transformer == {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope"}
    assert all(p.dtype == torch.float32 for p in state(pipeline.audio_vae).values())
    block = pipeline.vae.decoder.transformer_blocks[0]
    assert {block.norm1.weight.dtype, block.norm2.weight.dtype, block.scale1.dtype} == {torch.float32}
    assert block.attn.to_q.weight.dtype == torch.bfloat16
    assert {p.dtype for p in pipeline.text_encoder.parameters()} == {torch.bfloat16}
    assert all(b.dtype == torch.float32 for b in pipeline.text_encoder.buffers() if b.is_floating_point())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_pipeline_loads_offline_and_gives_the_same_bits(
    dtype: str,
    saved: str,
    pipelines: dict[str, Any],
    outputs: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = []

    def refuse(_: socket.socket, address: Any) -> None:
        connections.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    loaded = ModularPipeline.from_pretrained(saved)
    loaded.load_components(dtype=DTYPES[dtype])
    assert connections == []
    for name in MODELS:
        built, read = state(getattr(pipelines[dtype], name)), state(getattr(loaded, name))
        assert built.keys() == read.keys()
        for key, tensor in built.items():
            assert tensor.dtype == read[key].dtype, f"{name}.{key}"
            assert torch.equal(tensor, read[key]), f"{name}.{key}"
    assert_same_outputs(tiny_call(loaded), outputs[dtype])


def test_a_saved_pipeline_can_be_moved(tmp_path: Path, pipelines: dict[str, Any]) -> None:
    moved = save_tiny(tmp_path / "here").rename(tmp_path / "there")
    loaded = ModularPipeline.from_pretrained(str(moved))
    loaded.load_components("transformer", dtype=torch.float32)
    built, read = state(pipelines["float32"].transformer), state(loaded.transformer)
    assert all(torch.equal(tensor, read[name]) for name, tensor in built.items())


def test_latents_can_be_passed_in_instead_of_a_seed(
    pipelines: dict[str, Any], outputs: dict[str, dict[str, Any]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 24, 37, 4, 6, generator=generator)
    audio_rows = torch.randn(414, 32, generator=generator)
    audio_latents = audio_rows.reshape(2, 207, 32).permute(0, 2, 1)
    passed = tiny_call(pipelines["float32"], seed=1, latents=latents, audio_latents=audio_latents)
    assert_same_outputs(passed, outputs["float32"])
