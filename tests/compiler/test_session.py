"""``h3opt.optimize`` changes a pipeline in place, takes it all back, and leaves it alone when anything goes wrong."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from conftest import assert_same_media, build, differing, fingerprint, installed
from torch.nn.functional import silu

import h3opt
from h3opt.errors import (
    H3OptError,
    PassConflictError,
    PassFailedError,
    PassOptionError,
    PipelineError,
    ProfileError,
    ShortfallError,
    ShortfallWarning,
    UnknownPassError,
)
from h3opt.kernels import ops
from h3opt.metrics.bits import bits_equal
from h3opt.pass_api.base import SchedulePass
from h3opt.pass_api.promises import Exact
from h3opt.pass_api.registry import make_pass
from h3opt.pass_api.testing import with_replacement
from h3opt.pipeline.adaln_tables import TableRows
from h3opt.pipeline.generation import GenerationSettings, Media, generate
from h3opt.profiles.selection import load_profile

aten = torch.ops.aten
CLIP = GenerationSettings(num_inference_steps=3)
pytestmark = pytest.mark.xdist_group("float32 pipeline")


def optimize(target: Any, passes: Any, **options: Any) -> h3opt.Optimized:
    return h3opt.optimize(target, passes, options.pop("profile", "cpu"), **options)


@dataclass(frozen=True)
class Marks(SchedulePass):
    """Sets an attribute on the transformer, and fails afterwards if told to."""

    fails: bool = False
    sites: int = 1
    name = "marks"
    promise = Exact()
    happens_before = ("Nothing before anything.",)

    def expect(self, view: Any) -> int:
        return 1

    def install(self, view: Any, undo: ExitStack) -> int:
        view.transformer.marked = True
        undo.callback(delattr, view.transformer, "marked")
        if self.fails:
            raise RuntimeError("the marker is broken")
        return self.sites

    def mutants(self) -> tuple[()]:
        return ()


def greedy() -> Any:
    """norm_modulate, but it expects more sites than there are: a shortfall at the first call."""
    cls = type(make_pass("norm_modulate"))
    return type("Greedy", (cls,), {"expect": lambda self, facts: 9 if facts.region == "transformer.block" else 0})()


@pytest.fixture
def reference(silent: Any, shared: Any) -> Media:
    """What the silent pipeline generates unmodified."""
    if not hasattr(shared, "silent_media"):
        shared.silent_media = generate(silent, CLIP)
    return shared.silent_media


@contextmanager
def untouched(pipe: Any) -> Iterator[None]:
    """The body leaves the pipeline as it was."""
    before = fingerprint(pipe)
    yield
    assert differing(before, fingerprint(pipe)) == []


# --- install and restore ---------------------------------------------------------------------------------------


def test_the_profile_decides_what_is_on_and_restore_takes_it_all_back(silent, reference):
    before = fingerprint(silent)
    opt = optimize(silent, None)
    assert installed(opt) and {one.name for one in opt.passes} == {
        row.name for row in load_profile("cpu").passes if row.enabled
    }
    generate(silent, CLIP)
    assert differing(before, fingerprint(silent))
    for entry in opt.report:
        assert entry.state == "on", (entry.name, entry.reason)
        assert entry.matched == entry.expected, entry.name
    opt.restore()
    assert not installed(opt)
    assert differing(before, fingerprint(silent)) == []
    assert_same_media(reference, generate(silent, CLIP))
    opt.restore()
    assert differing(before, fingerprint(silent)) == []


def test_the_with_block_restores_also_when_its_body_raises(silent):
    with untouched(silent), pytest.raises(KeyError), optimize(silent, None) as opt:
        raise KeyError
    assert not installed(opt)


def test_no_passes_means_none(silent):
    with optimize(silent, []) as opt:
        assert opt.passes == () and list(opt.report) == []


def test_passes_may_be_names_or_instances_in_any_order(silent):
    given = ["residual_fold", make_pass("tile_batch", {"max_tiles": 2}), "norm_modulate"]
    for order in (given, given[::-1]):
        with optimize(silent, order) as opt:
            assert [one.name for one in opt.passes] == ["norm_modulate", "residual_fold", "tile_batch"]
            assert opt.passes[-1] == given[1]


def test_exact_passes_give_the_unmodified_bits(silent, reference):
    exact = [cls.name for cls in h3opt.list_passes() if isinstance(cls.promise, Exact)]
    with optimize(silent, exact) as opt:
        assert_same_media(reference, generate(silent, CLIP))
        assert opt.report["residual_fold"].matched == len(silent.transformer.transformer_blocks)


def test_a_generation_in_inference_mode_does_not_spoil_the_next_one(silent, reference):
    passes = ["modulation_table", "hoist_step_invariants", "norm_modulate", "tile_batch"]
    with optimize(silent, passes):
        with torch.inference_mode():
            assert_same_media(reference, generate(silent, CLIP))
        assert_same_media(reference, generate(silent, CLIP))


def test_a_dropped_pipeline_is_freed_optimized_or_not():
    for restore in (True, False):
        pipe = build()
        opt = optimize(pipe, ["norm_modulate", "modulation_table"])
        block = pipe.transformer.transformer_blocks[0]
        with torch.no_grad():
            rope = pipe.transformer.rope(torch.rand(5, 3))
            block(torch.randn(1, 5, 128), torch.randn(2, 64), torch.tensor([0, 1, 2, 3, 4]), rope)
        assert opt.report.captured["transformer.block"] == 1
        if restore:
            opt.restore()
        held = weakref.ref(pipe.transformer)
        del pipe, opt, block
        gc.collect()
        assert held() is None, f"restored: {restore}"


def test_without_restorable_the_replaced_weights_are_freed_and_nothing_pretends_otherwise(silent):
    with optimize(silent, ["fp8_linear", "norm_modulate"]):
        expected = generate(silent, CLIP)
    pipe = build()
    layer = pipe.transformer.transformer_blocks[0].ff.net[2]
    opt = optimize(pipe, ["fp8_linear", "norm_modulate"], restorable=False)
    assert layer.weight.untyped_storage().nbytes() == 0
    assert opt.report["fp8_linear"].matched == opt.report["fp8_linear"].expected > 0
    for attempt in (opt.restore, opt.__enter__, partial(optimize, pipe, [])):
        with pytest.raises(PipelineError, match=r"restorable=False.*load it again"):
            attempt()
    assert installed(opt) and bits_equal(expected.video, generate(pipe, CLIP).video)


def test_without_restorable_an_error_says_that_weights_are_gone():
    pipe = build()
    with pytest.raises(ShortfallError) as caught:
        optimize(pipe, ["fp8_linear", Marks(sites=0)], restorable=False)
    assert any("load the pipeline again" in note for note in caught.value.__notes__)
    assert installed(optimize(pipe, [])), "what is left can still be used"


def test_without_restorable_an_error_is_not_hidden_by_that_of_the_passes_before():
    pipe = build()
    first = optimize(pipe, ["fp8_linear"])
    with pytest.raises(PassFailedError, match="marks could not be installed") as caught:
        optimize(pipe, ["fp8_linear", Marks(fails=True)], restorable=False)
    assert any("load the pipeline again" in note for note in caught.value.__notes__) and not installed(first)


def test_a_model_of_which_nothing_is_captured_keeps_what_is_on_it_when_the_handle_is_dropped(silent):
    with untouched(silent):
        optimize(silent.audio_vae, ["audio_direct_depthwise"])
        gc.collect()
        with optimize(silent.audio_vae, ["audio_direct_depthwise"]) as opt:
            assert opt.report["audio_direct_depthwise"].matched == opt.report["audio_direct_depthwise"].expected > 0


# --- one after the other, and side by side ---------------------------------------------------------------------


def test_optimizing_again_replaces_what_was_installed(silent, reference):
    with untouched(silent):
        first = optimize(silent, ["fp8_linear", "modulation_table"])
        second = optimize(silent, ["norm_modulate"])
        assert not installed(first) and installed(second)
        assert_same_media(reference, generate(silent, CLIP))
        assert second.report["norm_modulate"].matched == 8
        first.restore()
        assert installed(second) and len(silent.transformer._compiled_call_impl.wrappers.outer) == 1
        assert silent.transformer.transformer_blocks[0]._compiled_call_impl is not None
        second.restore()


def test_a_model_optimized_alone_and_then_in_its_pipeline_is_replaced(silent):
    with untouched(silent):
        alone = optimize(silent.transformer, ["norm_modulate"])
        whole = optimize(silent, ["fused_swiglu"])
        assert not installed(alone) and installed(whole)
        whole.restore()


def test_two_pipelines_may_run_different_passes(silent, reference):
    other = build()
    other.audio_vae.decode = silent.audio_vae.decode
    with optimize(silent, ["norm_modulate", "residual_fold"]) as one, optimize(other, ["fused_swiglu"]) as two:
        for _ in range(2):
            assert_same_media(reference, generate(silent, CLIP))
            assert_same_media(reference, generate(other, CLIP))
        assert "fused_swiglu" not in one.report and "residual_fold" not in two.report
        assert two.report["fused_swiglu"].matched == 9


def test_a_second_thread_in_the_transformer_is_an_error_and_the_first_goes_on(silent, reference):
    inside, go_on, found = threading.Event(), threading.Event(), []

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    hook = silent.transformer.proj_in.register_forward_pre_hook(wait)
    try:
        with optimize(silent, ["norm_modulate"]) as opt:
            first = threading.Thread(target=lambda: found.append(generate(silent, CLIP)))
            first.start()
            assert inside.wait(60)
            with pytest.raises(PipelineError, match="Two threads are generating"):
                generate(silent, CLIP)
            go_on.set()
            first.join()
            assert installed(opt)
    finally:
        hook.remove()
    assert_same_media(reference, found[0])


def test_restoring_one_of_two_pipelines_leaves_the_other_optimized(silent):
    other = build()
    one, two = optimize(silent, ["modulation_table"]), optimize(other, ["modulation_table"])
    one.restore()
    assert installed(two) and isinstance(other.transformer.transformer_blocks[0].adaln_proj, TableRows)
    two.restore()


def test_a_component_of_another_optimized_pipeline_is_refused(silent):
    other = build()
    other.update_components(transformer=silent.transformer)
    with optimize(silent, ["norm_modulate"]) as opt:
        before = fingerprint(other)
        with pytest.raises(PipelineError, match=r"part of another optimized pipeline\. Call restore\(\)"):
            optimize(other, ["fused_swiglu"])
        assert installed(opt) and differing(before, fingerprint(other)) == []
    with optimize(other, ["fused_swiglu"]) as opt:
        assert installed(opt)


# --- single models ---------------------------------------------------------------------------------------------


def test_a_bare_transformer_is_optimized_alone(silent):
    with untouched(silent), optimize(silent.transformer, None) as opt:
        assert set(opt.report.captured) == {"transformer.block", "transformer.refiner"}
        assert opt.report["tile_batch"].declined == "there is no video VAE"
        assert opt.report["fp8_linear"].matched == 24


def test_a_bare_vae_is_optimized_alone(silent):
    z = torch.randn(1, 24, 7, 2, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = silent.vae.decode(z, return_dict=False)[0]
        with untouched(silent), optimize(silent.vae, ["fused_swiglu", "fp8_linear"]) as opt:
            found = silent.vae.decode(z, return_dict=False)[0]
            assert opt.report["fused_swiglu"].matched == 3
            assert opt.report["fp8_linear"].declined == "there is no transformer"
    assert bits_equal(expected, found)


def test_a_bare_audio_vae_has_nothing_to_rewrite_and_says_so(silent):
    with untouched(silent), optimize(silent.audio_vae, ["norm_modulate", "tile_batch"]) as opt:
        assert opt.report.captured == {}
        assert opt.report["norm_modulate"].matched is None
        assert opt.report["tile_batch"].declined


@pytest.mark.parametrize("target", [None, object(), torch.nn.Linear(2, 2), "pipeline", 3])
def test_what_is_no_pipeline_is_refused_with_what_to_pass(target):
    with pytest.raises(PipelineError, match="has no component h3opt knows. Pass a diffusers MiniMax-H3 pipeline"):
        optimize(target, [])


# --- refused before anything is touched ------------------------------------------------------------------------

REFUSED = {
    "unknown pass": (["norm_modulat"], {}, UnknownPassError, "did you mean 'norm_modulate'"),
    "a pass twice": (["tile_batch", "tile_batch"], {}, PassConflictError, "given twice"),
    "unknown profile": ([], {"profile": "h2000"}, ProfileError, "h200"),
    "unknown executor": ([], {"executor": "indutcor"}, PassOptionError, "did you mean 'inductor'.*'direct' or"),
    "unknown scope": ([], {"scope": "modle"}, PassOptionError, "did you mean 'model'"),
    "unknown shortfall": ([], {"on_shortfall": "ignore"}, PassOptionError, "Use 'error' or 'warn'"),
    "neither name nor pass": ([3], {}, H3OptError, "3"),
    "a class": ([type(make_pass("tile_batch"))], {}, H3OptError, "TileBatch"),
    "one name, not a list": ("norm_modulate", {}, H3OptError, r"\['norm_modulate'\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_leaves_the_pipeline_alone(silent, what):
    passes, options, error, message = REFUSED[what]
    with untouched(silent), pytest.raises(error, match=message):
        optimize(silent, passes, **options)


def test_what_cannot_be_leaves_the_installed_passes_alone(silent):
    with optimize(silent, ["modulation_table"]) as opt:
        with untouched(silent), pytest.raises(UnknownPassError):
            optimize(silent, ["norm_modulat"])
        assert installed(opt)


# --- failures half-way -----------------------------------------------------------------------------------------


def test_a_pass_that_fails_half_way_is_taken_back_with_all_others(silent, reference):
    passes = ["fp8_linear", Marks(fails=True), "modulation_table"]
    with untouched(silent), pytest.raises(Exception, match="the marker is broken"):
        optimize(silent, passes)
    assert_same_media(reference, generate(silent, CLIP))


def test_the_same_pass_works_when_it_does_not_fail(silent):
    with untouched(silent), optimize(silent, ["fp8_linear", Marks(), "modulation_table"]) as opt:
        assert silent.transformer.marked and opt.report["marks"].counts == "1/1"


def test_a_module_pass_that_falls_short_is_an_error_and_taken_back(silent):
    with untouched(silent), pytest.raises(ShortfallError, match="'marks' matched 0 of 1 sites in the pipeline"):
        optimize(silent, [Marks(sites=0)])


def test_a_module_pass_that_falls_short_goes_on_when_told_to_warn(silent):
    with pytest.warns(ShortfallWarning, match="'marks' matched 0 of 1"):
        opt = optimize(silent, [Marks(sites=0)], on_shortfall="warn")
    assert opt.report["marks"].counts == "0/1"
    opt.restore()


def test_a_failed_second_call_keeps_the_passes_of_the_first(silent, reference):
    with optimize(silent, ["norm_modulate", "modulation_table"]) as opt:
        generate(silent, CLIP)
        with pytest.raises(Exception, match="the marker is broken"):
            optimize(silent, ["fp8_linear", Marks(fails=True)])
        assert installed(opt) and not hasattr(silent.transformer, "marked")
        assert opt.report["modulation_table"].counts == "4/4"
        assert_same_media(reference, generate(silent, CLIP))
        assert opt.report["norm_modulate"].counts == "8/8"


def test_a_shortfall_at_the_first_call_restores_the_pipeline_and_says_so(silent, reference):
    with untouched(silent):
        opt = optimize(silent, ["fp8_linear", greedy(), "modulation_table"])
        with pytest.raises(ShortfallError, match="'norm_modulate' matched 2 of 9 sites in transformer.block") as error:
            generate(silent, CLIP)
        assert any("has been restored" in note for note in error.value.__notes__)
        assert not installed(opt)
    assert_same_media(reference, generate(silent, CLIP))


def test_a_shortfall_at_the_first_call_only_warns_when_told_so(silent, reference):
    with (
        optimize(silent, [greedy()], on_shortfall="warn") as opt,
        pytest.warns(ShortfallWarning, match="matched 2 of 9"),
    ):
        assert_same_media(reference, generate(silent, CLIP))
    assert opt.report["norm_modulate"].per_region["transformer.block"] == (2, 9)


def test_a_pass_the_probe_refuses_is_declined_in_the_report_and_its_sites_stay_as_they_were(silent, reference):
    def wrong(x, dim, middle, end):
        return aten.mul.Tensor(ops.swiglu(x), 1 + 2**-20)

    with optimize(silent, [with_replacement(make_pass("fused_swiglu"), wrong)]) as opt:
        assert_same_media(reference, generate(silent, CLIP))
        entry = opt.report["fused_swiglu"]
    assert entry.state == "declined" and "elements different" in entry.declined
    assert entry.matched == 0 and entry.expected == 9 and len(entry.refused) >= 3


def test_without_the_probe_the_same_pass_moves_bits(silent, reference):
    def wrong(x, dim, middle, end):
        return aten.mul.Tensor(ops.swiglu(x), 1 + 2**-20)

    with optimize(silent, [with_replacement(make_pass("fused_swiglu"), wrong)], probe=False) as opt:
        assert not bits_equal(reference.video, generate(silent, CLIP).video)
        assert opt.report["fused_swiglu"].counts == "9/9"


# --- the report ------------------------------------------------------------------------------------------------


def test_before_the_first_generation_a_graph_pass_waits(silent):
    with optimize(silent, ["norm_modulate", "modulation_table"]) as opt:
        assert opt.report["norm_modulate"].state == "waiting" and opt.report["norm_modulate"].counts == "?/?"
        assert opt.report["modulation_table"].counts == "4/4"


def test_the_report_says_where_and_how_each_pass_fired(silent):
    with optimize(silent, None) as opt:
        generate(silent, CLIP)
        report = opt.report
    entry = report["norm_modulate"]
    assert (entry.matched, entry.expected, entry.counts) == (8, 8, "8/8")
    assert entry.per_region["transformer.block"] == (2, 2)
    assert any("norm1" in site or "transformer.block" in site for site in entry.sites)
    assert entry.proof.startswith("probe: bits equal at")
    text = str(report)
    for one in report:
        assert one.name in text
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["passes"][0]["name"] == next(iter(report)).name
    assert "norm_modulate" in report and "nothing" not in report


def test_a_pass_that_does_not_apply_is_declined_with_its_reason_and_changes_nothing(silent):
    @dataclass(frozen=True)
    class Never(Marks):
        """Applies nowhere."""

        def applies(self, device: Any, view: Any) -> str:
            return f"{device.name} has no marker"

    with optimize(silent, [Never()]) as opt:
        assert not hasattr(silent.transformer, "marked")
        entry = opt.report["marks"]
        assert (entry.state, entry.declined, entry.counts) == ("declined", "cpu has no marker", "–")
        assert "cpu has no marker" in str(opt.report)


def test_scope_model_is_reported_and_what_it_rules_out_is_declined(silent):
    with optimize(silent, ["hoist_step_invariants"], scope="model") as opt:
        assert opt.report.scope == "model"
        assert "scope: model" in opt.report["hoist_step_invariants"].declined


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, 12),
        ({"keep_first": 1}, 9),
        ({"keep_first": 1, "keep_last": 2}, 3),
        ({"layers": ["ff.net.0.proj", "ff.net.2"]}, 8),
        ({"layers": ["attn.to_out.0"]}, 0),
        ({"layers": ["attn.to_q", "attn.to_k"]}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("scope", ["block", pytest.param("model", marks=pytest.mark.slow)])
def test_every_quantize_with_a_producer_is_fused_whichever_layers_are_quantized(silent, scope, options, fused):
    if scope == "model" and options not in ({}, {"keep_first": 1}):
        return  # capturing the whole model takes long: two of them are enough
    passes = [make_pass("fp8_linear", options), "norm_modulate", "fused_swiglu", "quant_producer_fusion"]
    with optimize(silent, passes, scope=scope) as opt:
        run_transformer(silent.transformer)
        entry = opt.report["quant_producer_fusion"]
    assert (entry.matched, entry.expected) == (fused, fused)


def run_transformer(transformer: Any) -> None:
    """One forward on a small packed sequence: 3 text, 4 audio and 8 video rows."""
    generator = torch.Generator().manual_seed(0)
    config = transformer.config
    patch = config.in_channels * 4
    rows = torch.arange(15)
    with torch.no_grad():
        transformer(
            hidden_states=torch.randn(1, 8, patch, generator=generator),
            audio_hidden_states=torch.randn(1, 4, config.audio_in_channels, generator=generator),
            encoder_hidden_states=torch.randn(1, 3, config.text_dim, generator=generator),
            timestep=torch.tensor([0.25, 0.5]),
            timestep_indices=(rows >= 7).long(),
            token_tags=torch.tensor([1] * 3 + [2] * 4 + [0] * 8),
            position_ids=torch.rand(15, 3, generator=generator),
            video_indices=rows[7:],
            audio_indices=rows[3:7],
            text_indices=rows[:3],
        )


def test_the_swiglu_of_the_tiny_model_is_the_one_the_pass_fuses(silent):
    """What the fusion counts above rest on: the feed-forward is value times silu(gate)."""
    feed_forward = silent.transformer.transformer_blocks[0].ff.net[0]
    x = torch.randn(2, 128)
    with torch.no_grad():
        value, gate = feed_forward.proj(x).chunk(2, -1)
        assert bits_equal(feed_forward(x), value * silu(gate))
