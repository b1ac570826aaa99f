"""What a user does with the state of an optimized model: save, load, cast, copy, train, watch with hooks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import call_inputs, relative_error, run

from h3opt import optimize
from h3opt.errors import PassOptionError, PipelineError
from h3opt.pass_api.registry import make_pass
from h3opt.reference import trained_pipeline

KEEPING = ["fp8_linear", "modulation_table", "hoist_step_invariants"]
ALL = [*KEEPING, "vae_fp8_linear", "audio_direct_depthwise"]
COMPONENTS = ("transformer", "vae", "audio_vae")


@pytest.fixture(scope="module")
def loaded() -> Any:
    return trained_pipeline()


@pytest.fixture
def pipe(loaded: Any) -> Iterator[Any]:
    before = {name: contents(getattr(loaded, name)) for name in COMPONENTS}
    yield loaded
    for name in COMPONENTS:
        getattr(loaded, name).to(torch.float32).load_state_dict(before[name])


@pytest.fixture(scope="module")
def inputs(loaded: Any) -> dict[str, Any]:
    return call_inputs(loaded.transformer)


def contents(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def other_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor * 0.9 for key, tensor in model.state_dict().items()}


def sound(pipe: Any) -> torch.Tensor:
    latents = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return pipe.audio_vae.decoder(latents)


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_checkpoint_of_an_optimized_model_is_that_of_the_unmodified_model(
    pipe: Any, name: str, tmp_path: Path
) -> None:
    model = getattr(pipe, name)
    before = contents(model)
    with optimize(pipe, ALL, "cpu"):
        assert same(contents(model), before)
        model.save_pretrained(tmp_path)
    assert same(contents(type(model).from_pretrained(tmp_path)), before)


def test_loaded_weights_reach_fp8_layers_tables_and_hoisted_results(pipe: Any, inputs: dict[str, Any]) -> None:
    new, transformer = other_weights(pipe.transformer), pipe.transformer
    with optimize(pipe, KEEPING, "cpu") as opt:
        run(transformer, inputs)
        transformer.load_state_dict(new)
        loaded_while_on = run(transformer, inputs)
        opt.restore()
        unmodified = run(transformer, inputs)
    with optimize(pipe, KEEPING, "cpu"):
        assert torch.equal(run(transformer, inputs), loaded_while_on)
    assert same(contents(transformer), new)
    assert relative_error(loaded_while_on, unmodified) < 0.1


def test_loaded_weights_reach_the_audio_decoder(pipe: Any) -> None:
    decoder = pipe.audio_vae.decoder
    new, first = other_weights(decoder), sound(pipe)
    with optimize(pipe, ["audio_direct_depthwise"], "cpu"):
        decoder.load_state_dict(new)
        loaded_while_on = sound(pipe)
    assert torch.allclose(sound(pipe), loaded_while_on, atol=1e-5) and not torch.allclose(sound(pipe), first, atol=1e-3)
    assert same(contents(decoder), new)


def test_a_cast_reaches_every_parameter_and_is_that_of_the_unmodified_model(pipe: Any, inputs: dict[str, Any]) -> None:
    before = contents(pipe.transformer)
    with optimize(pipe, KEEPING, "cpu"):
        run(pipe.transformer, inputs)
        pipe.transformer.to(torch.bfloat16)
        assert {parameter.dtype for parameter in pipe.transformer.parameters()} == {torch.bfloat16}
        assert torch.isfinite(run(pipe.transformer, inputs)).all()
    assert same(contents(pipe.transformer), {key: tensor.to(torch.bfloat16) for key, tensor in before.items()})


def test_two_casts_that_lose_bits_are_noticed_although_nothing_ran_between(pipe: Any, inputs: dict[str, Any]) -> None:
    with optimize(pipe, ["modulation_table", "hoist_step_invariants"], "cpu"):
        run(pipe.transformer, inputs)
        pipe.transformer.to(torch.bfloat16).to(torch.float32)
        actual = run(pipe.transformer, inputs)
    assert torch.equal(run(pipe.transformer, inputs), actual)


def test_a_cast_of_the_audio_decoder_is_refused_at_the_next_call(pipe: Any) -> None:
    with optimize(pipe, ["audio_direct_depthwise"], "cpu"):
        pipe.audio_vae.decoder.to(torch.bfloat16)
        with pytest.raises(PipelineError, match="cast to torch.bfloat16.* restore"):
            sound(pipe)
    assert {parameter.dtype for parameter in pipe.audio_vae.decoder.parameters()} == {torch.bfloat16}


def test_layerwise_casting_after_optimize_is_refused_and_restore_gives_the_unmodified_output(
    inputs: dict[str, Any],
) -> None:
    outputs = []
    for passes in ([], ["fp8_linear"], ["modulation_table"]):
        transformer = trained_pipeline().transformer
        opt = optimize(transformer, passes, "cpu") if passes else None
        transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        if opt is not None:
            with pytest.raises(PipelineError, match="moves or casts .*restore"):
                run(transformer, inputs)
            opt.restore()
        outputs.append(run(transformer, inputs))
    assert torch.equal(outputs[1], outputs[0]) and torch.equal(outputs[2], outputs[0])


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    ("name", "component"),
    [("fp8_linear", "transformer"), ("modulation_table", "transformer"), ("vae_fp8_linear", "vae")],
)
def test_a_copy_is_refused_with_what_to_do(pipe: Any, how: str, name: str, component: str) -> None:
    with optimize(pipe, [name], "cpu"), pytest.raises(PipelineError, match=r"restore\(\) before"):
        COPIES[how](getattr(pipe, component))


def test_freed_weights_cannot_be_saved_nor_loaded(inputs: dict[str, Any]) -> None:
    transformer = trained_pipeline().transformer
    new = other_weights(transformer)
    optimize(transformer, ["fp8_linear"], "cpu", restorable=False)
    for action in (transformer.state_dict, lambda: transformer.load_state_dict(new)):
        with pytest.raises(PipelineError, match="restorable=False"):
            action()
    assert torch.isfinite(run(transformer, inputs)).all()


def test_gradients_are_those_of_the_unmodified_model(pipe: Any, inputs: dict[str, Any]) -> None:
    def gradients() -> dict[str, torch.Tensor]:
        transformer = pipe.transformer
        transformer.zero_grad()
        sum(part.float().pow(2).mean() for part in transformer(**inputs)).backward()
        found = {
            name: weight.grad.clone() for name, weight in transformer.named_parameters() if weight.grad is not None
        }
        transformer.zero_grad()
        return found

    pipe.transformer.requires_grad_(True)
    expected = gradients()
    assert len(expected) == len(list(pipe.transformer.parameters()))
    with optimize(pipe, ["modulation_table", "hoist_step_invariants"], "cpu"):
        served = run(pipe.transformer, inputs)
        assert same(gradients(), expected)
        assert torch.equal(run(pipe.transformer, inputs), served)
    pipe.transformer.requires_grad_(False)


@pytest.mark.parametrize(
    "path", ["transformer_blocks.1.adaln_proj.linear", "time_embedder.linear_2", "context_embedder"]
)
def test_a_hook_runs_in_every_call_also_where_its_result_changes(pipe: Any, inputs: dict[str, Any], path: str) -> None:
    strength = {"now": 1.0}
    strengths = (0.5, 2.0, 0.5)
    hook = pipe.transformer.get_submodule(path).register_forward_hook(lambda _, args, out: out * strength["now"])
    try:
        expected = []
        for strength["now"] in strengths:
            expected.append(run(pipe.transformer, inputs))
        with optimize(pipe, ["modulation_table", "hoist_step_invariants"], "cpu"):
            for strength["now"], result in zip(strengths, expected, strict=True):
                assert torch.equal(run(pipe.transformer, inputs), result)
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["fp8_linear", "vae_fp8_linear"])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"layers": []}, "layers is empty"),
        ({"layers": None}, "layers must be a list"),
        ({"keep_first": 3, "keep_last": 3}, "keep all . blocks, so nothing would become FP8"),
    ],
)
def test_options_that_leave_nothing_to_do_are_refused(pipe: Any, name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(PassOptionError, match=why):
        optimize(pipe, [make_pass(name, options)], "cpu")
