"""How far the unmodified pipeline moves by itself, by every floor; and what is said of one that cannot be measured."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import assert_same_media, differing, fingerprint
from sample_verdict import verdict as shown
from torch._inductor import config
from torch.nn.attention import SDPBackend

import h3opt
from h3opt.errors import PassOptionError
from h3opt.pipeline.generation import GenerationSettings, Media, generate
from h3opt.pipeline.view import PipelineView
from h3opt.render.tables import verdict_lines
from h3opt.verification import noise_floors as floors
from h3opt.verification.difference import Difference
from h3opt.verification.noise_floors import (
    AUTOTUNING,
    FLOORS,
    Floor,
    choose_floors,
    count_generations,
    measure_floors,
    multiple_digits,
    multiple_words,
)

CLIP = GenerationSettings(num_inference_steps=2)
pytestmark = pytest.mark.xdist_group("bfloat16 pipeline")


def measure(pipe: Any, *names: str, clips: Sequence[GenerationSettings] = (CLIP,)) -> dict[str, Floor]:
    """The floors by name; checks that as many clips are generated as was foretold, and nothing is left behind."""
    ran: list[GenerationSettings] = []

    def run(what: str, wanted: Sequence[GenerationSettings]) -> list[Media]:
        made = [generate(pipe, clip) for clip in wanted]
        ran.extend(wanted)
        return made

    before, places = fingerprint(pipe), dict(os.environ)
    reference = [generate(pipe, clip) for clip in clips]
    found = measure_floors(names, PipelineView.of(pipe), clips, reference, run)
    assert differing(before, fingerprint(pipe)) == [] and dict(os.environ) == places
    assert_same_media(reference[0], generate(pipe, clips[0]))
    if all(floor.difference is not None for floor in found):
        assert len(ran) == count_generations(names, clips)
    return {floor.name: floor for floor in found}


def test_one_ulp_another_library_and_the_next_seed_move_the_pipeline_ever_more(silent):
    found = measure(silent, "ulp", "attention", "seed")
    ulp, attention, seed = (found[name].difference for name in ("ulp", "attention", "seed"))
    assert ulp is not None and attention is not None and seed is not None
    assert 0 < ulp.lpips < seed.lpips / 10 and 0 < attention.lpips < seed.lpips / 10
    assert found["attention"].facts == {"libraries": "flash and math"}
    assert found["seed"].kind.ceiling and found["seed"].label == "seed ceiling"
    assert "libraries flash and math" in found["attention"].summary


def test_the_next_seed_is_not_generated_twice():
    clips = [dataclasses.replace(CLIP, seed=seed) for seed in (3, 4)]
    made: list[GenerationSettings] = []

    def run(what: str, wanted: Sequence[GenerationSettings]) -> list[Media]:
        made.extend(wanted)
        return [picture(clip) for clip in wanted]

    view = PipelineView(vae=None)
    (floor,) = measure_floors(["seed"], view, clips, [picture(clip) for clip in clips], run)
    assert [clip.seed for clip in made] == [5] and count_generations(["seed"], clips) == 1
    assert floor.difference == Difference.worst(
        Difference.between(picture(clip), picture(dataclasses.replace(clip, seed=clip.seed + 1))) for clip in clips
    )


def picture(clip: GenerationSettings) -> Media:
    draw = torch.Generator().manual_seed(clip.seed)
    return Media(torch.rand(1, 4, 3, 32, 32, generator=draw), torch.rand(1, 2, 4000, generator=draw), 16000)


# --- what cannot be measured -------------------------------------------------------------------------------------


def test_one_library_alone_is_no_floor_and_says_so(silent, monkeypatch):
    monkeypatch.setitem(floors._LIBRARIES, "cpu", (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION))
    floor = measure(silent, "attention")["attention"]
    assert floor.difference is None and floor.absent is not None
    assert floor.absent.startswith("only math takes its calls on cpu; refused: efficient (")
    assert floor.summary == f"not measured: {floor.absent}" and floor.to_dict()["absent"] == floor.absent


def test_attention_that_goes_round_torch_is_no_floor(silent, monkeypatch):
    monkeypatch.setattr(floors._Library, "wrap_calls", lambda self, proceed, *args, **kwargs: proceed(*args, **kwargs))
    assert "no attention goes through" in str(measure(silent, "attention")["attention"].absent)


@pytest.mark.slow
def test_without_a_compiler_the_compiled_floors_say_so_and_the_verdict_stands(silent):
    before = fingerprint(silent)
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        verdict = h3opt.verify(silent, None, ["fused_swiglu"], "cpu", settings=CLIP, floors=["compile", "cache"])
    assert [floor.absent for floor in verdict.floors] == [
        "Inductor finds no C++ compiler; install g++ or clang, or name one in CXX"
    ] * 2
    assert verdict.held and verdict.passes[0].of_floors == {}
    text = "\n".join(verdict_lines(verdict))
    assert "compile floor         not measured: Inductor finds no C++ compiler" in text
    assert differing(before, fingerprint(silent)) == []


def test_blocks_that_are_compiled_already_are_no_eager_pipeline(silent):
    block = silent.transformer.transformer_blocks[0]
    block.compile(backend="eager")
    mine = block._compiled_call_impl
    try:
        floor = measure(silent, "compile")["compile"]
        assert floor.absent is not None and floor.absent.startswith("1 blocks are compiled already")
        assert block._compiled_call_impl is mine
    finally:
        block._compiled_call_impl = None


# --- compiled ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiling_moves_the_pipeline_and_leaves_nobody_elses_graphs_cold(silent, monkeypatch, tmp_path):
    compiled: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph

    theirs = torch.compile(lambda x: x.sin() + 1, backend=count)
    theirs(torch.ones(3))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    verdict = h3opt.verify(
        silent, None, ["norm_modulate", "fp8_linear"], "cpu", settings=CLIP, floors=["cache", "compile"]
    )
    theirs(torch.ones(3))
    assert compiled == [1], "their graph is still there"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert not list(tmp_path.rglob("fxgraph")), "nor is their cache folder filled"
    _, compile, cache = verdict.floors
    assert [floor.name for floor in verdict.floors] == ["ulp", "compile", "cache"]
    assert compile.difference is not None and not compile.difference.equal
    assert cache.difference is not None and cache.facts["cold"].startswith("0 of ") and cache.facts["warm"] > "0"
    assert {name: compile.facts[name] for name in AUTOTUNING} == AUTOTUNING
    assert verdict.environment["floors"]["compile"]["max_autotune"] is False
    (exact, fp8) = verdict.passes
    assert fp8.of_floors["compile"] == fp8.difference.over(compile.difference)
    assert fp8.floor_words.endswith(" what compiling alone does") and exact.floor_words == ""
    moved = f"fp8_linear moved {multiple_words('ulp', fp8.of_floors['ulp'])}"
    assert verdict.held and moved in "\n".join(verdict_lines(verdict))


# --- names and words ---------------------------------------------------------------------------------------------


def test_floors_are_measured_in_one_order_and_one_ulp_only_where_a_pass_may_move_bits():
    assert choose_floors(["seed", "compile", "ulp"], ulp=True) == ["ulp", "compile", "seed"]
    assert choose_floors(["seed"], ulp=False) == ["seed"]
    assert choose_floors([], ulp=True) == ["ulp"], "Rounding is judged by it"
    assert choose_floors(["seed", "ulp"], ulp=False) == ["ulp", "seed"], "what is asked for is measured"


def test_one_ulp_is_measured_for_exact_passes_when_asked_and_only_then(silent):
    asked = h3opt.verify(silent, None, ["norm_modulate"], "cpu", settings=CLIP, floors=["ulp"])
    assert [floor.name for floor in asked.floors] == ["ulp"] and asked.held
    assert asked.noise_floor is not None and not asked.noise_floor.equal
    assert any("noise floor" in line for line in verdict_lines(asked))
    assert h3opt.verify(silent, None, ["norm_modulate"], "cpu", settings=CLIP).floors == []


def test_an_unknown_floor_brings_the_nearest(silent):
    with pytest.raises(PassOptionError, match="no floor called 'compil' \\(did you mean 'compile'\\?\\)"):
        h3opt.verify(silent, None, ["norm_modulate"], "cpu", floors=["compil"])
    with pytest.raises(PassOptionError, match="one name, not a list"):
        choose_floors("ulp", ulp=True)


def test_a_verdict_says_all_floors_in_lines_and_as_json():
    verdict = shown()
    lines = verdict_lines(verdict)
    moved = "fp8_linear moved 0.6 of the noise floor, 0.4 of what compiling alone does, 0.03 of the distance to"
    assert any(line.startswith(moved) for line in lines) and not any("fused_swiglu moved" in line for line in lines)
    assert any(line.startswith("  attention floor       not measured: only flash takes its calls") for line in lines)
    assert verdict.passes[1].floor_words == "0.4 of what compiling alone does"
    data = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert [one["name"] for one in data["floors"]] == ["ulp", "compile", "attention", "seed"]
    assert [one["ceiling"] for one in data["floors"]] == [False, False, False, True]
    assert data["passes"][1]["of_floors"] == {"ulp": 0.6, "compile": 0.4, "seed": 0.03}
    assert set(data["all_passes_of_floors"]) == {"ulp", "compile", "seed"} and data["noise_floor"]["lpips"] == 0.02


@pytest.mark.parametrize(
    ("multiple", "words", "digits"),
    [
        (0.0, "far below the noise floor", "0"),
        (0.0099, "far below the noise floor", "<0.01"),
        (0.01, "0.01 of the noise floor", "0.01"),
        (0.0312, "0.031 of the noise floor", "0.031"),
        (0.4, "0.4 of the noise floor", "0.4"),
        (0.996, "1 times the noise floor", "1"),
        (12.4, "12 times the noise floor", "12"),
        (123.0, "120 times the noise floor", "120"),
        (999.9, "1000 times the noise floor", "1000"),
        (1001.0, "far above the noise floor", ">1000"),
        (2.7e9, "far above the noise floor", ">1000"),
        (math.inf, "beyond any noise floor", ">1000"),
    ],
)
def test_multiples_read_as_sentences_of_two_digits_where_these_say_something(multiple, words, digits):
    assert multiple_words("ulp", multiple) == words and multiple_digits(multiple) == digits


def test_far_above_one_ulp_alone_what_else_to_measure_is_said():
    little = [Floor("ulp", Difference(5, 7, 1e-9, 150.0, 150.0))]
    verdict = shown(floors=little)
    assert verdict.floor_words == ["far above the noise floor"] and verdict.of_floor is not None
    said = "far above the noise floor (--floors compile says what compiling alone does)"
    assert any(line.endswith(said) for line in verdict_lines(verdict))
    assert json.loads(json.dumps(verdict.to_dict()))["all_passes_of_noise_floor"] == verdict.of_floor > 1e6
    for others in ([*little, Floor("compile", None, "no compiler")], shown().floors, []):
        assert shown(floors=others).floor_hint == ""
    equal = shown(floors=little, all_passes=Difference())
    assert equal.floor_words == [] and equal.floor_hint == ""


def test_multiples_of_every_floor_read_as_sentences():
    assert multiple_words("compile", 0.4) == "0.4 of what compiling alone does"
    assert multiple_words("ulp", float("inf")) == "beyond any noise floor"
    assert multiple_words("cache", float("inf")) == "beyond any multiple of what a warm cache does"
    assert all(kind.what and kind.how for kind in FLOORS.values())
