"""LoRAs through PEFT, loaded before and after ``optimize``: each change of an adapter reaches the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from adapter_cases import call_inputs, make_lora, relative_error, run

from h3opt import optimize
from h3opt.errors import PipelineError
from h3opt.pass_api.fp8 import FP8Linear
from h3opt.pipeline.adaln_tables import Tables
from h3opt.pipeline.adapters import adapter_state, scaled_adapters
from h3opt.reference import tiny_call, trained_pipeline

CACHED = ["modulation_table", "hoist_step_invariants"]
ADALN = "adaln_proj.linear"


@pytest.fixture(scope="module")
def loaded() -> Any:
    return trained_pipeline()


@pytest.fixture
def pipe(loaded: Any) -> Iterator[Any]:
    yield loaded
    loaded.unload_lora_weights()


@pytest.fixture(scope="module")
def inputs(loaded: Any) -> dict[str, Any]:
    return call_inputs(loaded.transformer)


def load(pipe: Any, part: str, name: str = "a", seed: int = 0) -> None:
    pipe.load_lora_weights(make_lora(pipe.transformer, part, seed=seed), adapter_name=name)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a quarter": lambda pipe: pipe.set_adapters("a", 0.25),
    "zero": lambda pipe: pipe.set_adapters("a", 0.0),
    "negative": lambda pipe: pipe.set_adapters("a", -1.0),
    "two at once": lambda pipe: pipe.set_adapters(["a", "b"], [0.7, 0.3]),
    "the other": lambda pipe: pipe.set_adapters("b"),
    "disabled": lambda pipe: pipe.disable_lora(),
    "enabled": lambda pipe: pipe.enable_lora(),
    "one deleted": lambda pipe: (pipe.delete_adapters("b"), pipe.set_adapters("a")),
    "unloaded": lambda pipe: pipe.unload_lora_weights(),
}


def outputs_of_changes(pipe: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    results = {"loaded": run(pipe.transformer, inputs)}
    for name, change in CHANGES.items():
        change(pipe)
        results[name] = run(pipe.transformer, inputs)
    return results


@pytest.mark.parametrize("part", [ADALN, "embedder"])
@pytest.mark.parametrize("order", ["loaded first", "loaded after optimize"])
def test_exact_passes_give_the_bits_of_the_unmodified_pipeline_after_each_change(
    pipe: Any, inputs: dict[str, Any], part: str, order: str
) -> None:
    seeds = {"a": 0, "b": 1}
    without = run(pipe.transformer, inputs)
    for name, seed in seeds.items():
        load(pipe, part, name, seed)
    pipe.set_adapters("a")
    expected = outputs_of_changes(pipe, inputs)
    assert len({result.sum().item() for result in expected.values()}) >= 6, "the adapters must matter"
    if order == "loaded first":
        for name, seed in seeds.items():
            load(pipe, part, name, seed)
    with optimize(pipe, CACHED, "cpu"):
        if order == "loaded after optimize":
            assert torch.equal(run(pipe.transformer, inputs), without)
            for name, seed in seeds.items():
                load(pipe, part, name, seed)
        pipe.set_adapters("a")
        actual = outputs_of_changes(pipe, inputs)
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    assert torch.equal(run(pipe.transformer, inputs), without)


def test_a_hoisted_refiner_follows_the_strength_of_an_adapter_inside(pipe: Any, inputs: dict[str, Any]) -> None:
    load(pipe, "token_refiner.refiner_blocks.0.ff")
    expected = []
    for strength in (1.0, 0.25):
        pipe.set_adapters("a", strength)
        expected.append(run(pipe.transformer, inputs))
    with optimize(pipe, ["hoist_step_invariants"], "cpu"):
        for strength, result in zip((1.0, 0.25), expected, strict=True):
            pipe.set_adapters("a", strength)
            assert torch.equal(run(pipe.transformer, inputs), result)


def test_a_strength_in_the_call_reaches_tables_and_is_gone_afterwards(pipe: Any, inputs: dict[str, Any]) -> None:
    load(pipe, ADALN)
    full = run(pipe.transformer, inputs)
    scaled = run(pipe.transformer, inputs, attention_kwargs={"scale": 0.3})
    with optimize(pipe, CACHED, "cpu"):
        assert torch.equal(run(pipe.transformer, inputs), full)
        assert torch.equal(run(pipe.transformer, inputs, attention_kwargs={"scale": 0.3}), scaled)
        assert torch.equal(run(pipe.transformer, inputs), full)


def test_a_strength_in_a_generation_reaches_the_tables_of_the_schedule(pipe: Any, monkeypatch: Any) -> None:
    def generate(**more: Any) -> torch.Tensor:
        return tiny_call(pipe, **more)["videos"].clone()

    made: list[Any] = []
    compute = Tables.compute
    monkeypatch.setattr(Tables, "compute", lambda self, new: made.extend(new) or compute(self, new))
    monkeypatch.setattr(pipe.audio_vae, "decode", lambda latents, *args, **kwargs: (latents.new_zeros(2, 1, 8),))
    load(pipe, ADALN)
    scale = {"attention_kwargs": {"scale": 0.25}}
    expected = generate(**scale)
    with optimize(pipe, ["modulation_table"], "cpu"):
        assert torch.equal(generate(**scale), expected)
    assert len(made) == 3, "once per step, before the first step"


def test_a_strength_of_an_adaln_adapter_captures_nothing_anew(pipe: Any, inputs: dict[str, Any]) -> None:
    load(pipe, ADALN)
    with optimize(pipe, ["modulation_table"], "cpu") as opt:
        run(pipe.transformer, inputs)
        captured = opt.report.captured
        for strength in (0.25, 0.0, -1.0):
            pipe.set_adapters("a", strength)
            run(pipe.transformer, inputs)
        assert opt.report.captured == captured


def test_a_merged_adapter_reaches_tables_also_where_nothing_runs_between(pipe: Any, inputs: dict[str, Any]) -> None:
    def merge_and_take_out(transformer: Any) -> None:
        transformer.fuse_lora()
        transformer.unfuse_lora()

    load(pipe, ADALN)
    transformer = pipe.transformer
    before = {key: tensor.clone() for key, tensor in transformer.state_dict().items()}
    expected = []
    for change in (lambda model: model.fuse_lora(), lambda model: model.unfuse_lora(), merge_and_take_out):
        change(transformer)
        expected.append(run(transformer, inputs))
    transformer.load_state_dict(before)
    with optimize(pipe, CACHED, "cpu"):
        run(transformer, inputs)
        for number, change in enumerate(
            (lambda model: model.fuse_lora(), lambda model: model.unfuse_lora(), merge_and_take_out)
        ):
            change(transformer)
            assert torch.equal(run(transformer, inputs), expected[number])
    pipe.unload_lora_weights()
    transformer.load_state_dict({key.replace("base_layer.", ""): t for key, t in before.items() if "lora_" not in key})


@pytest.fixture(scope="module")
def error_of_fp8(loaded: Any, inputs: dict[str, Any]) -> float:
    """The error of FP8 without an adapter."""
    plain = run(loaded.transformer, inputs)
    with optimize(loaded, ["fp8_linear"], "cpu"):
        return relative_error(run(loaded.transformer, inputs), plain)


@pytest.mark.parametrize(
    ("part", "order"), [("attn.to_", "loaded after optimize"), ("ff.net", "loaded first"), (ADALN, "loaded first")]
)
def test_fp8_layers_keep_an_adapter_as_a_side_branch(
    pipe: Any, inputs: dict[str, Any], error_of_fp8: float, part: str, order: str
) -> None:
    bound = 1.5 * error_of_fp8
    plain = run(pipe.transformer, inputs)
    load(pipe, part)
    expected = run(pipe.transformer, inputs)
    assert relative_error(plain, expected) > 4 * bound, "the adapter must matter"
    if order == "loaded after optimize":
        pipe.unload_lora_weights()
    with optimize(pipe, ["fp8_linear"], "cpu") as opt:
        if order == "loaded after optimize":
            load(pipe, part)
        assert opt.report["fp8_linear"].counts == "36/36"
        assert relative_error(run(pipe.transformer, inputs), expected) < bound
    assert torch.equal(run(pipe.transformer, inputs), expected)
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe.transformer, inputs), plain)


@pytest.mark.parametrize("part", ["attn.to_", "ff.net"])
def test_the_whole_profile_runs_with_an_adapter_and_the_report_names_it(
    pipe: Any, inputs: dict[str, Any], part: str
) -> None:
    load(pipe, part)
    with optimize(pipe.transformer, profile="cpu") as opt:
        run(pipe.transformer, inputs)
        assert part in str(opt.report) and "adapters read the unquantized inputs" in str(opt.report)


@pytest.mark.parametrize("name", ["fuse_lora", "unfuse_lora"])
def test_a_merge_into_fp8_weights_is_refused_with_what_to_do(pipe: Any, inputs: dict[str, Any], name: str) -> None:
    load(pipe, "attn.to_")
    expected = run(pipe.transformer, inputs)
    with optimize(pipe, ["fp8_linear"], "cpu"), pytest.raises(PipelineError, match=f"{name} .* restore"):
        getattr(pipe, name)(components=["transformer"])
    assert name not in vars(pipe.transformer) and torch.equal(run(pipe.transformer, inputs), expected)


def test_an_adapter_that_fits_nothing_is_an_error_and_changes_nothing(pipe: Any, inputs: dict[str, Any]) -> None:
    lora = make_lora(pipe.transformer, "attn.to_q")
    other = {key.replace("to_q", "to_query"): value for key, value in lora.items()}
    with optimize(pipe, ["fp8_linear", *CACHED], "cpu"):
        before = run(pipe.transformer, inputs)
        with pytest.raises(ValueError, match="arget modules"):
            pipe.load_lora_weights(other)
        assert torch.equal(run(pipe.transformer, inputs), before)


def test_a_scale_leaves_the_exact_strength_behind(pipe: Any) -> None:
    load(pipe, ADALN)
    pipe.set_adapters("a", 1 / 3)
    before = adapter_state(pipe.transformer)
    for scale in (0.3, 0.0):
        with scaled_adapters(pipe.transformer, scale):
            assert adapter_state(pipe.transformer) != before
        assert adapter_state(pipe.transformer) == before


def test_adapters_of_fp8_layers_are_found_in_the_layer_that_was_there(pipe: Any) -> None:
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    with optimize(pipe, ["fp8_linear"], "cpu"):
        assert pipe.transformer.transformer_blocks[0].attn.to_q is layer and isinstance(layer, FP8Linear)
    assert type(layer) is torch.nn.Linear
