"""``h3opt explain``: the source of every rule, the conditions its guard calls, and the sites of one generation."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import installed

from h3opt.compiler import explain as explaining
from h3opt.compiler.explain import describe, explain, explain_plan, explain_sites, has_plan, sites_text
from h3opt.compiler.optimize import optimize
from h3opt.compiler.report import PassReport
from h3opt.errors import PipelineError, UnknownPassError
from h3opt.graph.matcher import Rule
from h3opt.pass_api.base import GraphPass, SchedulePass
from h3opt.pass_api.promises import Exact
from h3opt.pass_api.registry import find_pass, list_passes, make_pass
from h3opt.pipeline.generation import GenerationSettings
from h3opt.pipeline.sequence_length import sequence_length
from h3opt.pipeline.view import PipelineView
from h3opt.reference import full_vae
from h3opt.render.seam_picture import seam_picture

PASSES = list_passes()
SHORT = GenerationSettings(num_inference_steps=2)


@pytest.mark.parametrize("cls", PASSES, ids=lambda cls: cls.name)
def test_a_description_is_whole_and_json_ready(cls: Any) -> None:
    found = json.loads(json.dumps(describe(cls.name)))
    assert (found["name"], found["kind"], found["promise"]) == (cls.name, cls.kind, str(cls.promise))
    assert found["doc"].splitlines()[0] == cls.summary()
    assert list(found["options"]) == [field.name for field in dataclasses.fields(cls)]
    assert found["mutants"] == [mutant.why for mutant in make_pass(cls.name).mutants()]
    assert found["after"] == list(cls.after)
    assert found["happens_before"] == (list(cls.happens_before) if issubclass(cls, SchedulePass) else [])
    assert bool(found["rules"]) == issubclass(cls, GraphPass)


@pytest.mark.parametrize("cls", [one for one in PASSES if issubclass(one, GraphPass)], ids=lambda cls: cls.name)
def test_every_rule_of_a_graph_pass_shows_its_pattern_and_replacement(cls: Any) -> None:
    text = explain(cls.name)
    rules = make_pass(cls.name).rules()  # type: ignore[attr-defined]
    for number, rule in enumerate(rules, 1):
        title = f"rule {number} of {len(rules)}"
        assert f"{title}, pattern\n  def {rule.pattern.__name__}(" in text
        assert f"{title}, replacement\n  def {rule.replacement.__name__}(" in text
        assert (f"{title}, guard\n" in text) == (rule.guard is not None)


@pytest.mark.parametrize("cls", PASSES, ids=lambda cls: cls.name)
def test_the_text_has_promise_order_and_defaults(cls: Any) -> None:
    text = explain(cls.name)
    assert text.startswith(f"{cls.name}: {cls.kind} pass, promise {cls.promise}\n\n{cls.summary()}")
    for name, value in make_pass(cls.name).options().items():
        assert f"{name} = {value!r}" in text
    if cls.after:
        assert f"runs after: {', '.join(cls.after)}" in text
    for sentence in getattr(cls, "happens_before", ()):
        assert f"  {sentence}\n" in text


def test_what_pattern_and_guard_call_is_shown_once() -> None:
    helpers = describe("residual_fold")["helpers"]
    assert set(helpers) >= {"gated_residual", "modulated_norm", "check_modulation"}
    text = explain("residual_fold")
    assert text.count("def check_modulation(") == text.count("def check_fold(") == 1
    assert "rule 2 of 3, guard\n  that of rule 1 of 3" in text


def test_a_pattern_taken_from_the_shared_ones_is_not_its_own_helper() -> None:
    assert "modulated_norm" not in describe("norm_modulate")["helpers"]
    assert "def check_modulation(" in explain("norm_modulate")  # called by a lambda


def test_a_function_without_source_text_is_named() -> None:
    typed_in: dict[str, Any] = {}
    exec("def typed_in(x): return x", typed_in)
    rule = Rule(typed_in["typed_in"], functools.partial(max, 1))
    assert "typed_in" in str(explaining._source(rule.pattern))
    assert "partial" in str(explaining._source(rule.replacement))
    assert explaining._helpers((rule,)) == []


def test_an_unknown_pass_is_refused_before_the_pipeline_is_touched() -> None:
    for ask in (describe, explain, lambda name: explain_sites(None, name)):
        with pytest.raises(UnknownPassError, match="did you mean 'norm_modulate'"):
            ask("norm_modulat")


def test_sites_come_from_a_run_with_the_passes_it_builds_on(silent: Any) -> None:
    entry = explain_sites(silent, "residual_fold", SHORT)  # the fixture checks that the pipeline is given back
    assert entry.state == "on" and entry.matched == entry.expected and entry.matched
    text = sites_text(entry)
    assert text.startswith(f"sites: {entry.counts} over all modules; in one graph: ")
    assert f"\n  matched {entry.sites[0]}" in text
    assert all(re.fullmatch(r"transformer\.block: \w+.*", site) for site in entry.sites)
    reason = r"vae\.block: \w+ in attn: \d of \d operators match, but \S+ stands where aten\.\S+ is expected"
    near = next(miss for miss in entry.near_misses if re.fullmatch(reason, miss))
    assert f"\n  nearly  {near}" in text


def test_sites_are_shown_for_the_number_of_tokens_of_the_generation(
    silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def stop(*_: Any, **options: Any) -> Any:
        asked.append(options["tokens"])
        raise InterruptedError

    monkeypatch.setattr(explaining, "optimize", stop)
    with pytest.raises(InterruptedError):
        explain_sites(silent, "fused_swiglu", SHORT)
    assert asked == [sequence_length(silent, SHORT)]


@pytest.mark.slow
@pytest.mark.xdist_group("heavy")
def test_a_pass_that_falls_short_still_answers(silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = find_pass("fused_swiglu")
    monkeypatch.setattr(cls, "expect", lambda self, facts: 50)
    with pytest.warns(UserWarning, match="fused_swiglu"):
        entry = explain_sites(silent, "fused_swiglu", SHORT)
    assert entry.matched and entry.expected and entry.matched < entry.expected


def test_a_pass_that_cuts_work_shows_its_plan_and_others_have_none() -> None:
    view = PipelineView(vae=full_vae(device="meta"))
    assert "tiles      105: 3 x 5 a chunk" in str(explain_plan("tile_batch", view, (37, 34, 60)))
    plan = explain_plan("tile_geometry", view, (37, 34, 60))
    assert plan is not None and plan.to_dict()["tiles"] == 56, "2 x 4 tiles of 7 clips"
    assert [has_plan(name) for name in ("tile_batch", "norm_modulate")] == [True, False]
    assert explain_plan("norm_modulate", view, (37, 34, 60)) is None
    with pytest.raises(PipelineError, match="larger than the frame"):
        explain_plan("tile_geometry", view, (37, 4, 6))


def test_sites_say_why_a_pass_declined_and_what_it_missed() -> None:
    entry = PassReport("x", "graph", Exact(), "declined", "no such unit", refused=["a: 3 elements"], near_misses=["b"])
    assert sites_text(entry) == "sites: –\ndeclined: no such unit\n  refused a: 3 elements\n  nearly  b"


def test_a_pass_builds_on_what_it_comes_after_directly_and_through_others(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Stub:
        name: str
        after: tuple[str, ...] = ()

    stubs = [Stub("c", ("b", "not_installed")), Stub("b", ("a",)), Stub("a", ("c",)), Stub("z")]
    monkeypatch.setattr(explaining, "list_passes", lambda: stubs)
    assert sorted(explaining._with_prerequisites("c")) == ["a", "b", "c"]


def test_a_picture_shows_the_tiles_and_what_they_changed(pipe: Any, tmp_path: Path) -> None:
    latents = torch.randn(1, 24, 12, 4, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = pipe.vae.decode(latents[:, :, :7], return_dict=False)[0]
    found = seam_picture(pipe, make_pass("tile_geometry", {"tile": "64x64x16"}), latents)
    assert found.unmodified.shape == found.candidate.shape == (expected.shape[2], 3, 64, 96)
    assert found.unmodified_borders == ([], []) and found.candidate_borders == ([], [32, 64])
    data = found.to_dict()
    assert data["largest_difference"] > 0 and data["seam_visibility"]["unmodified"] == 1.0
    found.write(tmp_path / "seams.png")
    assert (tmp_path / "seams.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PipelineError, match="cannot write"):
        found.write(tmp_path / "none" / "seams.png")
    mean, std = (torch.tensor(one).view(1, -1, 1, 1, 1) for one in (pipe.pixel_mean, pipe.pixel_std))
    assert torch.equal((expected * std + mean).clamp(0, 1)[0].transpose(0, 1), found.unmodified)


def test_batches_change_no_border_and_what_was_installed_comes_back(pipe: Any) -> None:
    latents = torch.randn(1, 24, 7, 4, 6, generator=torch.Generator().manual_seed(0))
    with optimize(pipe, ["tile_buffer_reuse"], "cpu") as opt:
        found = seam_picture(pipe, make_pass("tile_batch"), latents)
        assert installed(opt) and "_decode" in vars(pipe.vae)
    assert found.unmodified_borders == found.candidate_borders
    with pytest.raises(PipelineError, match="cuts no video into tiles"):
        seam_picture(pipe, make_pass("fused_swiglu"), latents)
    with pytest.raises(PipelineError, match="larger than the frame"):
        seam_picture(pipe, make_pass("tile_geometry"), latents)
