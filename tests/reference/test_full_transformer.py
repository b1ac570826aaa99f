"""Full-size inputs have the pipeline's own layout, and the full-size constructor gives what loading would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from h3opt.reference import (
    CANVASES,
    Canvas,
    full_inputs,
    full_transformer,
    parse_canvas,
    tiny_call,
    tiny_pipeline,
)
from h3opt.reference.tiny import TRANSFORMER_CONFIG
from h3opt.reference.weight_statistics import channel_offsets, measure_statistics, read_statistics

TINY_CONFIG = {name: value for name, value in TRANSFORMER_CONFIG.items() if name != "num_layers"}
# What `model.config` holds beside the sizes that the tiny model changes.
CONFIG = TRANSFORMER_CONFIG | {"in_channels": 24, "audio_in_channels": 32, "patch_size": (1, 2, 2)}
PROMPT = "x" * 28  # one token a byte
LAYOUT = ("token_tags", "position_ids", "video_indices", "audio_indices", "text_indices", "timestep_indices")


class Captured(Exception):
    """Ends a generation once its transformer inputs are known."""


def pipeline_inputs(step: int, **call: Any) -> dict[str, Any]:
    """The keyword arguments that the pipeline's loop passes to the transformer at `step` of eight."""
    pipeline = tiny_pipeline(torch.bfloat16)
    seen: list[dict[str, Any]] = []

    def capture(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert args == ()
        seen.append(kwargs)
        if len(seen) > step:
            raise Captured

    pipeline.transformer.register_forward_pre_hook(capture, with_kwargs=True)
    with pytest.raises(Captured):
        tiny_call(pipeline, prompt=PROMPT, num_inference_steps=8, **call)
    return seen[step]


@pytest.mark.parametrize(("timesteps", "step"), [(1, 0), (2, 2)])
def test_full_inputs_are_what_the_pipeline_passes(timesteps: int, step: int) -> None:
    expected = pipeline_inputs(step)
    made = full_inputs(
        "64x96x124",
        text_tokens=len(PROMPT),
        timesteps=timesteps,
        device="cpu",
        config=CONFIG,
    )
    assert made.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert made[name] == value, name
            continue
        assert (made[name].shape, made[name].dtype) == (value.shape, value.dtype), name
    assert torch.equal(made["timestep"], expected["timestep"])
    for name in LAYOUT:
        assert torch.equal(made[name], expected[name]), name


def test_three_timesteps_are_a_keyframe_request() -> None:
    expected = pipeline_inputs(2, image=Image.new("RGB", (96, 64), "red"))
    text_tokens = expected["text_indices"].numel()
    made = full_inputs("64x96x124", text_tokens=text_tokens, timesteps=3, device="cpu", config=CONFIG)
    assert torch.equal(made["timestep"], expected["timestep"])
    for name in LAYOUT:
        # The keyframe's vision tokens among the text rows carry the video tag; random text has none.
        skip = text_tokens if name == "token_tags" else 0
        assert torch.equal(made[name][skip:], expected[name][skip:]), name


@pytest.mark.parametrize(
    ("name", "latents", "video_rows", "audio_rows"),
    [
        ("64x96x124", (37, 4, 6), 222, 414),
        ("544x960x124", (37, 34, 60), 18_870, 414),
        ("768x1344x124", (37, 48, 84), 37_296, 414),
        ("768x1344x209", (62, 48, 84), 62_496, 696),
        ("768x1344x345", (102, 48, 84), 102_816, 1_150),
    ],
)
def test_canvases_have_the_rows_of_the_released_model(
    name: str, latents: tuple[int, int, int], video_rows: int, audio_rows: int
) -> None:
    canvas = CANVASES[name]
    assert parse_canvas(name) == canvas
    assert (canvas.latents, canvas.video_rows, canvas.audio_rows) == (latents, video_rows, audio_rows)


def test_tokens_sets_the_length_of_the_whole_sequence() -> None:
    inputs = full_inputs("544x960x124", tokens=19_328, device="cpu")
    assert inputs["token_tags"].bincount().tolist() == [18_870, 44, 414]
    assert inputs["hidden_states"].shape == (1, 18_870, 96)
    assert inputs["encoder_hidden_states"].shape == (1, 44, 5120)


def test_the_sequence_is_text_audio_left_audio_right_video() -> None:
    inputs = full_inputs("64x96x124", text_tokens=7, device="cpu")
    tags, counts = inputs["token_tags"].unique_consecutive(return_counts=True)
    assert (tags.tolist(), counts.tolist()) == ([1, 2, 0], [7, 414, 222])
    left, right = inputs["position_ids"][7 : 7 + 414].chunk(2)
    assert torch.equal(left[:, 0], right[:, 0])
    assert left[0, 2] < right[0, 2]


@pytest.mark.parametrize("canvas", ["544x960", "axbxc", "545x960x124", "0x96x124", "64x96x125", ""])
def test_a_canvas_the_model_does_not_generate_is_refused(canvas: str) -> None:
    with pytest.raises(ValueError, match=r"HEIGHTxWIDTHxFRAMES|multiples of 32|17 \* n \+ 5"):
        full_inputs(canvas, device="cpu")


def test_no_room_for_text_is_refused() -> None:
    with pytest.raises(ValueError, match="19284 rows"):
        full_inputs("544x960x124", tokens=19_284, device="cpu")
    with pytest.raises(ValueError, match="1, 2 or 3"):
        full_inputs("64x96x124", timesteps=4, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_transformer_has_the_dtypes_and_buffers_of_a_loaded_one(dtype: torch.dtype) -> None:
    made = full_transformer(layers=4, device="cpu", dtype=dtype, **TINY_CONFIG)
    loaded = tiny_pipeline(dtype).transformer
    assert type(made) is type(loaded)
    assert not made.training
    assert [(name, p.dtype, p.shape) for name, p in made.named_parameters()] == [
        (name, p.dtype, p.shape) for name, p in loaded.named_parameters()
    ]
    assert not any(parameter.requires_grad for parameter in made.parameters())
    assert made.rope.inv_freq.dtype == torch.float32
    assert torch.equal(made.rope.inv_freq, loaded.rope.inv_freq)


def test_full_transformer_is_deterministic_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = (full_transformer(layers=1, device="cpu", **TINY_CONFIG) for _ in range(2))
    other = full_transformer(layers=1, device="cpu", seed=1, **TINY_CONFIG)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.proj_in.weight, other.proj_in.weight)


def test_trained_statistics_give_v_the_measured_offsets_and_norms_the_measured_weights() -> None:
    measured = read_statistics()["transformer_blocks"]
    found: dict[str, torch.Tensor] = {}
    for statistics in ("plain", "trained"):
        model = full_transformer(layers=2, device="cpu", statistics=statistics, **{**TINY_CONFIG, "hidden_size": 512})
        inputs = full_inputs(Canvas(64, 96, 124), device="cpu", config=model.config)
        offsets: list[torch.Tensor] = []
        model.transformer_blocks[0].attn.to_v.register_forward_hook(
            lambda _, args, out, offsets=offsets: offsets.append(channel_offsets(out))
        )
        with torch.no_grad():
            video, audio = model(**inputs)
        assert video.isfinite().all() and audio.isfinite().all()
        found[statistics] = offsets[0]
    median, p90 = found["trained"].median(), found["trained"].quantile(0.9)
    assert median == pytest.approx(measured["v_offset"]["median"], rel=0.35)
    assert p90 == pytest.approx(measured["v_offset"]["p90"], rel=0.35)
    norms = torch.cat([block.norm1.weight.float() for block in model.transformer_blocks])
    assert norms.mean() == pytest.approx(measured["norm1"]["mean"], abs=0.01)
    assert norms.std() == pytest.approx(measured["norm1"]["std"], rel=0.1)
    sizes = model.proj_in.weight.float().norm(dim=1)
    assert sizes.max() / sizes.median() > 1.3


def test_there_are_no_other_statistics() -> None:
    with pytest.raises(ValueError, match="statistics must be 'plain' or 'trained', got 'real'"):
        full_transformer(layers=1, device="cpu", statistics="real", **TINY_CONFIG)


@pytest.mark.slow
def test_the_statistics_are_those_of_the_shipped_weights() -> None:
    shipped, measured = read_statistics(), measure_statistics()
    assert shipped.keys() == measured.keys()
    for kind, entries in shipped.items():
        for name, entry in entries.items():
            assert measured[kind][name] == pytest.approx(entry, rel=0.02), (kind, name)


@pytest.mark.parametrize("timesteps", [1, 2, 3])
def test_full_inputs_run_through_full_transformer(timesteps: int) -> None:
    model = full_transformer(layers=2, device="cpu", **TINY_CONFIG)
    inputs = full_inputs(Canvas(64, 96, 124), timesteps=timesteps, device="cpu", config=model.config)
    with torch.no_grad():
        video, audio = model(**inputs)
    assert video.shape == inputs["hidden_states"].shape
    assert audio.shape == inputs["audio_hidden_states"].shape
    assert video.isfinite().all() and 0.3 < video.std() < 3
