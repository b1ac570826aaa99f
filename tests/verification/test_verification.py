"""``h3opt.verify`` names the pass that moved what, holds each to its promise, and leaves the pipeline as it was."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from conftest import COMPONENTS, assert_same_media, differing, fingerprint, installed
from sample_verdict import verdict as sample_verdict

import h3opt
from h3opt.errors import CheckpointError, PassConflictError, PipelineError, ShortfallError, UnknownPassError
from h3opt.kernels import ops
from h3opt.pass_api.promises import Exact, Perceptual, Rounding
from h3opt.pass_api.registry import make_pass
from h3opt.pass_api.testing import with_replacement
from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.render.tables import verdict_lines
from h3opt.verification.difference import Difference
from h3opt.verification.noise_floors import Floor
from h3opt.verification.verdict import PassVerdict, Verdict
from h3opt.verification.verify import _most_changed, holds

aten = torch.ops.aten
CLIP = GenerationSettings(num_inference_steps=3)
OTHER_PROMPT = "a green ring moves left over blue, a high hum"  # as long as the default: stale results fit
pytestmark = pytest.mark.xdist_group("bfloat16 pipeline")


def verify(pipe: Any, passes: Any, prompts: Any = None, **options: Any) -> Verdict:
    return h3opt.verify(pipe, prompts, passes, "cpu", settings=CLIP, **options)


def mutant(name: str, number: int = 0) -> Any:
    return make_pass(name).mutants()[number].instance


def slightly_off() -> Any:
    """fused_swiglu with a kernel that is wrong in the last places."""

    def wrong(x, dim, middle, end):
        return aten.mul.Tensor(ops.swiglu(x), 1 + 2**-20)

    return with_replacement(make_pass("fused_swiglu"), wrong)  # type: ignore[arg-type]


def module_types(found: dict[Any, Any]) -> dict[Any, type]:
    return {key: one[0] for key, one in found.items() if key[0] in COMPONENTS and key[1] != "weight"}


# --- what it finds ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_pass_of_the_profile_keeps_its_promise_on_the_tiny_pipeline(silent):
    told: list[tuple[str, int, int]] = []
    before = fingerprint(silent)
    verdict = verify(silent, None, progress=lambda *what: told.append(what))
    assert verdict.held and verdict.broken == []
    assert verdict.capture.equal and verdict.exact_set is not None and verdict.exact_set.equal
    assert "fp8_linear" in verdict.moved and "norm_modulate" not in verdict.moved
    assert not verdict.all_passes.equal and verdict.all_passes.lpips < 0.03
    assert verdict.noise_floor is not None and not verdict.noise_floor.equal
    enabled = {one.name for one in h3opt.load_profile("cpu").passes if one.enabled}
    assert {one.name for one in verdict.passes} == enabled and len(enabled) > 15
    assert all(one.held for one in verdict.passes)
    assert set(verdict.exact_names) <= {one.name for one in verdict.passes if str(one.promise) == "exact"}
    assert "fp8_linear" not in verdict.exact_names and "residual_fold" in verdict.exact_names
    # progress: one call before each generation, and the end
    done = [what[1] for what in told]
    assert done == list(range(len(told))) and told[-1] == ("done", told[-1][2], told[-1][2])
    assert {what[2] for what in told} == {len(told) - 1}
    # the verdict as JSON
    text = json.dumps(verdict.to_dict(), allow_nan=False)
    found = json.loads(text)
    assert found["held"] is True and found["moved"] == verdict.moved
    assert found["capture"]["psnr_db"] is None, "infinite decibels have no JSON"
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["settings"] == [CLIP.to_dict()]
    assert found["report"]["passes"][0]["name"] in verdict.report
    assert differing(before, fingerprint(silent)) == []


def test_the_exact_pass_that_broke_is_named_and_no_other(silent):
    verdict = verify(silent, ["norm_modulate", "fused_swiglu", mutant("modulation_table")])
    assert not verdict.held
    assert verdict.broken == verdict.moved == ["modulation_table"]
    assert {one.name: one.held for one in verdict.passes} == {
        "norm_modulate": True,
        "fused_swiglu": True,
        "modulation_table": False,
    }
    assert verdict.capture.equal and verdict.noise_floor is None, "no Rounding pass needs a floor"
    assert verdict.exact_set is not None and not verdict.exact_set.equal
    (broken,) = [one for one in verdict.passes if one.held is False]
    assert broken.difference.video_differing > 0 and broken.measured.startswith("LPIPS")


@pytest.mark.slow
def test_sound_counts_as_picture_does(pipe):
    verdict = verify(pipe, [mutant("modulation_table")])
    (one,) = verdict.passes
    assert one.difference.audio_differing > 0 and math.isfinite(one.difference.audio_snr_db)
    assert verdict.broken == ["modulation_table"]


def test_a_wrong_kernel_is_caught_with_the_probe_off_and_declined_with_it_on(silent):
    caught = verify(silent, [slightly_off()], probe=False)
    assert not caught.held and caught.broken == ["fused_swiglu"]
    declined = verify(silent, [slightly_off()])
    assert declined.held and declined.moved == []
    (one,) = declined.passes
    assert one.held is None and one.declined and one.measured.startswith("declined: ") and one.counts == "–"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_linear", "tile_batch"])
def test_a_promise_that_is_not_exact_is_broken_by_a_mutant(silent, name):
    verdict = verify(silent, ["norm_modulate", mutant(name)])
    assert verdict.broken == [name] and not verdict.held
    assert verdict.exact_names == ["norm_modulate"] and verdict.exact_set is not None and verdict.exact_set.equal


@pytest.mark.slow
def test_what_only_a_second_prompt_shows_is_seen_with_two_prompts(silent):
    stale = mutant("hoist_step_invariants")
    assert verify(silent, [stale]).held, "one prompt cannot tell"
    verdict = verify(silent, [stale], [CLIP.prompt, OTHER_PROMPT])
    assert verdict.broken == ["hoist_step_invariants"]
    assert [one.prompt for one in verdict.settings] == [CLIP.prompt, OTHER_PROMPT]
    assert verify(silent, ["hoist_step_invariants"], [CLIP.prompt, OTHER_PROMPT]).held


def test_without_an_exact_pass_there_is_no_exact_set(silent):
    verdict = verify(silent, ["tile_batch"])
    assert verdict.exact_set is None and verdict.exact_names == [] and verdict.held
    assert verdict.to_dict()["exact_set"] is None


def test_without_a_pass_capture_alone_is_verified(silent):
    verdict = verify(silent, [])
    assert verdict.held and verdict.passes == [] and verdict.noise_floor is None
    assert verdict.all_passes == Difference()


def test_several_seeds_and_leaving_out_are_summed_up(silent):
    told: list[tuple[str, int, int]] = []
    verdict = verify(silent, ["norm_modulate"], seeds=2, leave_out=True, progress=lambda *what: told.append(what))
    assert [one.seed for one in verdict.settings] == [0, 1] and len(verdict.pairs) == len(verdict.differences) == 2
    (one,) = verdict.passes
    assert one.left_out == Difference() and one.tried and one.spread["lpips"].clips == 2
    assert verdict.held and verdict.faults == [] and verdict.traces is not None
    assert len(verdict.traces[0].steps) == CLIP.num_inference_steps - 1
    text = "\n".join(verdict_lines(verdict))
    assert "LPIPS over 2 clips: worst 0.0000, mean 0.0000, no worse than 0.0000 with confidence 0.95" in text
    assert "leaving out norm_modulate: bits equal" in text and "white_latents" in text
    assert [what[1] for what in told] == list(range(len(told))) and told[-1][1] == told[-1][2]


FLOOR = Difference(1, 1, 0.01, 60.0, 40.0)


@pytest.mark.parametrize(
    ("promise", "difference", "floor", "held"),
    [
        (Exact(), Difference(), None, True),
        (Exact(), Difference(1, 0), None, False),
        (Exact(), Difference(0, 1), FLOOR, False),
        (Rounding(), Difference(), None, True),
        (Rounding(), Difference(1, 1, 0.01, 60.0, 40.0), FLOOR, True),
        (Rounding(), Difference(1, 1, 0.0101, 60.0, 40.0), FLOOR, False),
        (Rounding(), Difference(1, 1, 0.01, 60.0, 39.9), FLOOR, False),
        (Rounding(), Difference(1, 1, math.nan, 60.0, 40.0), FLOOR, False),
        (Rounding(), Difference(1, 0), None, False),
        (Perceptual(0.02, 30.0), Difference(1, 1, 0.02, 60.0, 30.0), FLOOR, True),
        (Perceptual(0.02, 30.0), Difference(1, 1, 0.0201, 60.0, 30.0), FLOOR, False),
        (Perceptual(0.02, 30.0), Difference(1, 1, 0.02, 60.0, 29.9), FLOOR, False),
        (Perceptual(0.02, 30.0), Difference(1, 1, 0.02, 60.0, math.nan), FLOOR, False),
        (Perceptual(0.02), Difference(1, 0, 0.02, 60.0), FLOOR, True),
        (Perceptual(0.02), Difference(1, 1, 0.02, 60.0, 150.0), FLOOR, False),
        (Perceptual(0.02), Difference(1, 0, 0.0201, 60.0), FLOOR, False),
    ],
    ids=str,
)
def test_a_promise_holds_up_to_its_limit_in_picture_and_sound(promise, difference, floor, held):
    assert holds(promise, difference, floor) is held


def test_perceptual_passes_may_move_no_more_together_than_the_sum_of_their_promises():
    promised = PassVerdict(
        "fp8_linear", "format", Perceptual(0.03, 40.0), "1/1", Difference(1, 1, 0.02), True, None, 1.0
    )
    other = dataclasses.replace(promised, name="fp8_attention", promise=Perceptual(0.01, 40.0))
    rounding = dataclasses.replace(promised, name="fused_qk_cast", promise=Rounding())
    floor = Floor("ulp", Difference(5, 7, 0.02, 45.0, 60.0))

    def together(lpips: float, snr: float, *passes: PassVerdict, **changed: Any) -> bool:
        found = sample_verdict(passes=list(passes), all_passes=Difference(1, 1, lpips, audio_snr_db=snr), **changed)
        assert found.to_dict()["together"]["held"] is found.together_held
        assert found.held is found.together_held
        return found.together_held

    assert together(0.0399, 37.0, promised, other, floors=[])
    assert not together(0.0401, 50.0, promised, other, floors=[]), "each held, and both tint alike"
    assert not together(0.01, 36.9, promised, other, floors=[]), "half the noise power each"
    assert not together(float("nan"), 50.0, promised, other, floors=[])
    assert together(0.0599, 36.97, promised, other, rounding, floors=[floor])
    declined = dataclasses.replace(other, held=None, declined="no FP8")
    assert not together(0.035, 50.0, promised, declined, floors=[])
    assert sample_verdict(passes=[dataclasses.replace(promised, promise=Exact())]).together is None


def test_alone_a_pass_is_compared_with_the_unmodified_pipeline_and_what_builds_on_others_says_so(silent):
    told: list[tuple[str, int, int]] = []
    verdict = h3opt.verify(
        silent,
        None,
        ["fp8_linear", "quant_producer_fusion"],
        "cpu",
        settings=dataclasses.replace(CLIP, num_inference_steps=2),
        alone=True,
        progress=lambda *what: told.append(what),
    )
    fp8, fused = verdict.passes
    assert fused.difference.equal and fp8.alone == fp8.difference == verdict.all_passes and not fp8.alone.equal
    assert fused.alone is None and fused.tried_alone and not fused.tried
    text = "\n".join(verdict_lines(verdict))
    assert f"fp8_linear alone: {fp8.difference}" in text
    assert "quant_producer_fusion alone: nothing to do: it builds on fp8_linear, vae_fp8_linear" in text
    found = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))["passes"]
    assert found[0]["alone"]["lpips"] == fp8.difference.lpips and found[1]["alone"] is None
    assert found[1]["alone_failed"].startswith("nothing to do")
    assert [what[1] for what in told] == list(range(len(told))) and told[-1][1] == told[-1][2]
    assert [what for what, *_ in told if what.endswith("alone")] == ["fp8_linear alone"]


def test_the_clip_that_moved_most_is_shown_by_picture_then_sound_then_bits():
    still, moved = Difference(), Difference(9, 9, 0.2, 40.0, 50.0)
    for further in (
        Difference(1, 1, 0.3, 50.0, 60.0),
        Difference(1, 1, 0.2, 50.0, 40.0),
        Difference(9, 10, 0.2, 40.0, 50.0),
        Difference(1, 0, math.nan),
    ):
        assert _most_changed([still, moved, further]) == 2 and _most_changed([further, moved, still]) == 0


def test_no_seed_is_no_clip(silent):
    with pytest.raises(PipelineError, match="0 seeds make no clip"):
        verify(silent, ["norm_modulate"], seeds=0)


def test_weights_of_lpips_that_are_missing_are_said_before_anything_runs(silent, monkeypatch, tmp_path):
    monkeypatch.setattr("h3opt.metrics.lpips._weights_path", lambda: tmp_path / "none.safetensors")
    told: list[Any] = []
    with pytest.raises(CheckpointError, match="LPIPS weights .* are missing"):
        verify(silent, ["tile_batch"], progress=lambda *what: told.append(what))
    assert told == []


def test_a_pass_that_changes_the_length_of_the_clip_is_named(silent, monkeypatch):
    before = fingerprint(silent)
    made = iter(range(9))

    def shorter(pipe: Any, clip: GenerationSettings) -> Any:
        media = generate(pipe, clip)
        cut = next(made) >= 2  # the unmodified pipeline and capture alone come before the pass
        return dataclasses.replace(media, video=media.video[:, :-1]) if cut else media

    monkeypatch.setattr("h3opt.verification.verify.generate", shorter)
    with pytest.raises(PipelineError, match="cannot compare shapes") as caught:
        verify(silent, ["norm_modulate"])
    assert "Without norm_modulate the clip has another length" in caught.value.__notes__[0]
    assert differing(before, fingerprint(silent)) == []


def test_a_seam_where_the_unmodified_pipeline_has_no_tile_border_is_named(silent, monkeypatch):
    made = iter(range(9))

    def brighter(pipe: Any, clip: GenerationSettings) -> Any:
        media = generate(pipe, clip)
        video = media.video.clone()
        video[..., 48:] = (video[..., 48:] * 0.9).clamp(0, 1)
        return dataclasses.replace(media, video=video) if next(made) >= 2 else media

    monkeypatch.setattr("h3opt.verification.verify.generate", brighter)
    verdict = verify(silent, ["norm_modulate"])
    assert ("seam", "column 48") in [(one.name, one.where) for _, one in verdict.faults] and not verdict.held


# --- how it leaves things --------------------------------------------------------------------------------------


def test_passes_installed_before_are_installed_again(silent):
    reference = generate(silent, CLIP)
    with h3opt.optimize(silent, ["modulation_table", "norm_modulate"], "cpu") as opt:
        inside = fingerprint(silent)
        verdict = verify(silent, ["fused_swiglu"])
        assert verdict.held and [one.name for one in verdict.passes] == ["fused_swiglu"]
        assert installed(opt) and opt.report["modulation_table"].counts == "4/4"
        assert module_types(inside) == module_types(fingerprint(silent))
        assert_same_media(reference, generate(silent, CLIP))
        assert opt.report["norm_modulate"].counts == "8/8"


@pytest.mark.parametrize(
    ("prompts", "passes", "error"),
    [
        ([], ["norm_modulate"], PipelineError),
        ("", ["norm_modulate"], PipelineError),
        (["A fox.", "  "], ["norm_modulate"], PipelineError),
        ([None], ["norm_modulate"], PipelineError),
        (None, ["norm_modulat"], UnknownPassError),
        (None, ["tile_batch", "tile_batch"], PassConflictError),
    ],
    ids=["no prompts", "empty prompt", "blank prompt", "no text", "unknown pass", "a pass twice"],
)
def test_what_cannot_be_verified_is_refused_before_anything_runs(silent, prompts, passes, error):
    told: list[Any] = []
    before = fingerprint(silent)
    with pytest.raises(error):
        verify(silent, passes, prompts, progress=lambda *what: told.append(what))
    assert told == [] and differing(before, fingerprint(silent)) == []


def test_a_bare_model_cannot_be_verified(silent):
    with pytest.raises(PipelineError, match="Pass the pipeline, not one of its models"):
        verify(silent.transformer, ["norm_modulate"])


def test_a_failure_on_the_way_leaves_the_pipeline_as_it_was_found(silent):
    cls = type(make_pass("norm_modulate"))
    greedy = type("Greedy", (cls,), {"expect": lambda self, facts: 9 if facts.region == "transformer.block" else 0})()
    reference = generate(silent, CLIP)
    with h3opt.optimize(silent, ["modulation_table"], "cpu") as opt:
        with pytest.raises(ShortfallError):
            verify(silent, [greedy])
        assert installed(opt) and opt.report["modulation_table"].counts == "4/4"
        assert_same_media(reference, generate(silent, CLIP))


@pytest.mark.parametrize("where", ["unmodified pipeline", "noise floor", "captured, no pass", "+ tile_batch"])
def test_an_interruption_leaves_the_pipeline_as_it_was_found_and_nothing_on_disk(silent, where, tmp_path):
    def interrupt(what: str, done: int, total: int) -> None:
        if what == where:
            raise KeyboardInterrupt

    with h3opt.optimize(silent, ["modulation_table"], "cpu") as opt:
        inside = fingerprint(silent)
        with pytest.raises(KeyboardInterrupt):
            verify(silent, ["tile_batch"], evidence=tmp_path / "evidence", progress=interrupt)
        assert installed(opt) and [one.name for one in opt.passes] == ["modulation_table"]
        assert module_types(inside) == module_types(fingerprint(silent))
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_in_the_middle_of_a_step_leaves_the_pipeline_as_it_was_and_a_rerun_is_whole(silent, tmp_path):
    before, calls = fingerprint(silent), []
    block = silent.vae.decoder.transformer_blocks[0]

    def interrupt(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = block.ff.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        verify(silent, ["norm_modulate"])
    hook.remove()
    assert len(calls) == 3 and differing(before, fingerprint(silent)) == []
    assert verify(silent, ["norm_modulate"]).held
