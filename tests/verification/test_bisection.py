"""A broken promise is traced to module, call and site, and what was saved of it replays."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import build
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import h3opt
from h3opt.compiler.optimize import prepare
from h3opt.errors import CheckpointError, DeviceError, PipelineError
from h3opt.kernels import ops
from h3opt.pass_api.registry import make_pass
from h3opt.pass_api.testing import with_replacement
from h3opt.pipeline.generation import GenerationSettings
from h3opt.pipeline.view import PipelineView
from h3opt.reference import trained_pipeline
from h3opt.verification.bisection import Culprit, bisect_pass
from h3opt.verification.evidence import CallEvidence, check_folder, encode_arguments, read_evidence, write_evidence
from h3opt.verification.replay import replay_evidence

aten = torch.ops.aten
pytestmark = pytest.mark.xdist_group("bisection")


def one_head_twice(x, shape, weight, eps, cos, sin, dim, half, rotary, end):
    """Norm and rope as they should be, but head 1 of 3 is scaled by two."""
    right = ops.head_norm_rope(x, weight, aten.squeeze.dims(cos, [0, 2]), aten.squeeze.dims(sin, [0, 2]), eps)
    head = [aten.slice.Tensor(right, 2, number, number + 1) for number in range(3)]
    return aten.cat([head[0], aten.mul.Tensor(head[1], 2.0), head[2]], 2)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A verification in which a graph pass, a format pass and a schedule pass broke."""
    folder = tmp_path_factory.mktemp("evidence")
    pipe = build()
    pipe.audio_vae.decode = lambda latents, *args, **kwargs: (latents.new_zeros(2, 1, 8),)
    verdict = h3opt.verify(
        pipe,
        ["A fox.", "A cat."],  # a stale result shows in the second
        [
            "norm_modulate",
            make_pass("hoist_step_invariants").mutants()[0].instance,
            with_replacement(make_pass("fused_qk_cast"), one_head_twice, rule=-1),  # type: ignore[arg-type]
            make_pass("fp8_linear").mutants()[0].instance,
        ],
        "cpu",
        settings=GenerationSettings(num_inference_steps=2),
        evidence=folder,
        probe=False,
    )
    yield SimpleNamespace(pipe=pipe, folder=folder, verdict=verdict, passes={one.name: one for one in verdict.passes})


def culprit(broken: Any, name: str) -> Culprit:
    found = broken.passes[name].culprit
    assert found is not None
    return found


def no_pipe(*_: Any) -> Any:
    raise AssertionError("a site needs no pipeline")


def test_only_what_broke_is_bisected(broken):
    assert broken.verdict.broken == ["fused_qk_cast", "hoist_step_invariants", "fp8_linear"]
    assert broken.passes["norm_modulate"].culprit is None
    assert sorted(path.name for path in broken.folder.iterdir()) == [
        "fp8_linear",
        "fused_qk_cast",
        "hoist_step_invariants",
    ]
    data = json.loads(json.dumps(broken.verdict.to_dict(), allow_nan=False))
    culprits = {one["name"]: one["culprit"] for one in data["passes"]}
    assert culprits["norm_modulate"] is None and culprits["fused_qk_cast"]["call"] == 0


def test_faults_of_the_reference_are_no_faults_of_the_passes(broken):
    """The tiny pipeline has random weights, so its latents are white; the fixture has no sound."""
    assert {one.name for _, one in broken.verdict.reference_faults} == {"white_latents", "silence"}
    assert broken.verdict.faults == []


def test_changes_are_given_as_multiples_of_the_noise_floor(broken):
    floor, one = broken.verdict.noise_floor, broken.passes["fp8_linear"]
    assert one.of_floor == one.difference.over(floor) > 1
    assert one.floor_words.endswith(" the noise floor") and broken.passes["norm_modulate"].floor_words == ""
    data = broken.verdict.to_dict()
    assert [entry["of_noise_floor"] for entry in data["passes"] if entry["name"] == "fp8_linear"] == [one.of_floor]
    assert data["environment"]["inductor_cache"] in ("cold", "warm") and data["environment"]["autotune"] is False


def test_a_graph_pass_is_traced_to_its_first_site_and_the_fault_is_named(broken):
    found = culprit(broken, "fused_qk_cast")
    assert (found.module, found.call, found.inputs_equal) == ("transformer.transformer_blocks.0", 0, True)
    assert found.site is not None and "attn" in found.site
    assert [one.name for one in found.faults] == ["head_scale"] and found.faults[0].where.endswith("head 1")
    assert found.faults[0].measured == pytest.approx(2)
    assert "h3opt replay" in str(found)


def test_the_saved_tensors_are_those_of_the_site(broken):
    tensors = load_file(broken.folder / "fused_qk_cast" / "tensors.safetensors")
    x, right, wrong = (tensors[name] for name in ("input.kwargs.x", "expected.0", "found.0"))
    assert x.shape == right.shape == wrong.shape and x.shape[-2:] == (3, 64)
    assert torch.equal(right[:, :, 0], wrong[:, :, 0]) and torch.equal(2 * right[:, :, 1], wrong[:, :, 1])


def test_a_site_replays_without_a_pipeline_and_shows_when_the_pass_is_right_again(broken):
    found = replay_evidence(broken.folder / "fused_qk_cast", no_pipe)
    assert "elements differ" in found.then
    assert found.now == "bits equal" and not found.differs, "the registered pass is right"
    assert "now:  bits equal" in str(found) and found.to_dict()["pass"] == "fused_qk_cast"


def test_a_format_pass_is_traced_to_the_layer_and_replays_in_the_pipeline(broken):
    found = culprit(broken, "fp8_linear")
    assert found.module == "transformer.transformer_blocks.0" and found.inputs_equal and found.alone
    assert found.site == "transformer.transformer_blocks.0.attn.to_q"
    again = replay_evidence(broken.folder / "fp8_linear", lambda *_: broken.pipe)
    assert again.differs and "elements differ" in again.now
    assert type(broken.pipe.transformer.transformer_blocks[0].attn.to_q).__name__ == "Linear", "nothing stays installed"


def test_what_was_kept_between_calls_is_said_to_move(broken):
    found = culprit(broken, "hoist_step_invariants")
    assert found.module == "transformer.context_embedder" and not found.alone
    assert "by what was kept between calls" in str(found)


def test_a_perceptual_pass_is_traced_to_the_block_that_it_changes_most(tmp_path):
    pipe = trained_pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe.audio_vae.decode = lambda latents, *args, **kwargs: (latents.new_zeros(2, 1, 8),)
    with torch.no_grad():
        pipe.transformer.transformer_blocks[2].attn.norm_k.weight[5] *= 1000
    session, passes = prepare(pipe, ["fp8_attention"], "cpu")
    session.install(passes)
    try:
        found = bisect_pass(session, passes, [GenerationSettings(num_inference_steps=2)], tmp_path / "fp8_attention")
    finally:
        session.uninstall()
    assert found.module == "transformer.transformer_blocks.2" and found.inputs_equal is False
    assert found.error is not None and found.error > 0.03 and "relative error" in str(found)
    assert found.site is not None and found.folder is not None


# --- files -----------------------------------------------------------------------------------------------------


def evidence(**changed: Any) -> CallEvidence:
    found = CallEvidence(
        "fused_swiglu",
        {},
        "site",
        "transformer.transformer_blocks.0",
        2,
        [],
        "somewhere",
        dtype=torch.float32,
        device="cpu",
    )
    found.inputs, found.arguments = encode_arguments(((), {"x": torch.ones(2, 8), "dim": -1, "middle": 4, "end": 8}))
    found.expected, found.actual = [torch.ones(2, 4)], [torch.zeros(2, 4)]
    for name, value in changed.items():
        setattr(found, name, value)
    return found


def test_arguments_come_back_as_they_were(tmp_path):
    given = (
        (torch.ones(2), (None, [1.5, "x"])),
        {"dtype": torch.bfloat16, "inf": float("inf"), "deep": {"t": torch.zeros(1)}},
    )
    inputs, arguments = encode_arguments(given)
    write_evidence(tmp_path / "e", evidence(inputs=inputs, arguments=arguments))
    args, kwargs = read_evidence(tmp_path / "e").call_arguments()
    assert torch.equal(args[0], torch.ones(2)) and args[1] == (None, [1.5, "x"])
    assert kwargs["dtype"] is torch.bfloat16 and kwargs["inf"] == float("inf") and kwargs["deep"]["t"].shape == (1,)


def test_new_evidence_replaces_old_and_nothing_else(tmp_path):
    write_evidence(tmp_path / "e", evidence())
    write_evidence(tmp_path / "e", evidence(call=7))
    assert read_evidence(tmp_path / "e").call == 7
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("years")
    with pytest.raises(PipelineError, match="holds something other than evidence"):
        write_evidence(tmp_path / "mine", evidence())
    assert (tmp_path / "mine" / "thesis").read_text() == "years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "mine"]


def spoil(folder: Path, how: str) -> None:
    index, tensors = folder / "evidence.json", folder / "tensors.safetensors"
    if how == "missing":
        tensors.unlink()
    elif how == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-8])
    elif how == "no json":
        index.write_text("{")
    elif how == "other json":
        index.write_text("[1]")
    elif how == "a tensor short":
        index.write_text(index.read_text().replace("kwargs.x", "kwargs.y"))
    elif how == "without dtype":
        index.write_text(index.read_text().replace('"dtype": "float32",', ""))
    elif how == "no dtype":
        index.write_text(index.read_text().replace('"float32"', '"nn"'))
    elif how == "no device":
        index.write_text(index.read_text().replace('"cpu"', '"gramophone"'))
    elif how == "nothing found":
        tensors.write_bytes(save({name: one for name, one in load_file(tensors).items() if name[:5] != "found"}))
    else:
        name, _, value = how.partition(" is ")
        index.write_text(json.dumps(json.loads(index.read_text()) | {name: json.loads(value)}))


HOW = ["missing", "truncated", "no json", "other json", "a tensor short", "without dtype", "no dtype", "no device"]
HOW += [
    "nothing found",
    'rule is "0"',
    "rule is -5",
    'pass is ["x"]',
    "module is 7",
    'kind is "foo"',
    'call is "first"',
]


@pytest.mark.parametrize("how", HOW)
def test_evidence_that_cannot_be_read_is_an_error_of_ours(how, tmp_path):
    write_evidence(tmp_path / "e", evidence())
    spoil(tmp_path / "e", how)
    with pytest.raises(CheckpointError, match="Give a folder that `h3opt verify` wrote"):
        replay_evidence(tmp_path / "e", no_pipe)


@pytest.mark.parametrize(
    "arguments", [{"y": torch.ones(2, 8)}, {"x": torch.ones(()), "dim": -1, "middle": 4, "end": 8}]
)
def test_evidence_that_does_not_fit_the_rule_is_an_error_of_ours(arguments, tmp_path):
    inputs, spelled = encode_arguments(((), arguments))
    write_evidence(tmp_path / "e", evidence(inputs=inputs, arguments=spelled))
    with pytest.raises(CheckpointError, match="does not fit the rule of fused_swiglu"):
        replay_evidence(tmp_path / "e", no_pipe)


def test_a_pipeline_tells_the_dtype_it_was_loaded_as(broken):
    assert json.loads((broken.folder / "fp8_linear" / "evidence.json").read_text())["dtype"] == "float32"
    view = PipelineView.of(build("bfloat16"))
    assert view.dtype is torch.bfloat16
    with h3opt.optimize(view.pipe, ["fp8_linear"], "cpu"):
        assert view.dtype is torch.bfloat16


def test_a_replay_asks_for_the_pipeline_as_it_was_verified(tmp_path):
    asked: list[Any] = []

    def ask(*how: Any) -> Any:
        asked.append(how)
        raise InterruptedError

    write_evidence(tmp_path / "e", evidence(kind="module", dtype=torch.bfloat16))
    for device in (None, "meta"):
        with pytest.raises(InterruptedError):
            replay_evidence(tmp_path / "e", ask, device)
    assert asked == [(torch.bfloat16, "cpu"), (torch.bfloat16, "meta")]


def test_inputs_go_to_the_device_of_the_replay(tmp_path, monkeypatch):
    seen: list[set[str]] = []

    def describe(expected: Any, actual: Any) -> str:
        seen.append({tensor.device.type for tensor in (*expected, *actual)})
        return ""

    write_evidence(tmp_path / "e", evidence())
    for module in ("evidence", "replay"):
        monkeypatch.setattr(f"h3opt.verification.{module}.describe_difference", describe)
    replay_evidence(tmp_path / "e", no_pipe, "meta")
    assert {"meta"} in seen and {"cpu"} in seen, "what was saved stays where it is"


def test_evidence_of_a_device_that_is_not_here_says_so_and_replays_on_another(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write_evidence(tmp_path / "e", evidence(device="cuda"))
    with pytest.raises(DeviceError, match="was found on cuda, which is not available here. Replay it where it is"):
        replay_evidence(tmp_path / "e", no_pipe)
    assert not replay_evidence(tmp_path / "e", no_pipe, "cpu").differs


@pytest.mark.parametrize("changed", [{"module": "transformer.none"}, {"inputs": {"args.0": torch.ones(2, 3)}}])
def test_evidence_of_another_pipeline_is_said_to_be(changed, silent, tmp_path):
    inputs, arguments = encode_arguments(((torch.ones(2, 48),), {}))
    layer = {"kind": "module", "name": "hoist_step_invariants", "module": "transformer.context_embedder"}
    found = evidence(**layer, inputs=inputs, arguments=arguments)
    write_evidence(tmp_path / "right", found)
    assert not replay_evidence(tmp_path / "right", lambda *_: silent).differs
    for name, value in changed.items():
        setattr(found, name, value)
    write_evidence(tmp_path / "wrong", found)
    with pytest.raises(CheckpointError, match="does not fit this pipeline"):
        replay_evidence(tmp_path / "wrong", lambda *_: silent)


def test_a_place_for_evidence_that_cannot_be_made_is_refused_before_the_work(silent, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PipelineError, match="cannot be written"):
        h3opt.verify(silent, passes=["norm_modulate"], profile="cpu", evidence=tmp_path / "file" / "evidence")
    check_folder(tmp_path / "none" / "yet", ["norm_modulate"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_no_evidence_may_replace_is_found_before_the_work(silent, tmp_path):
    (tmp_path / "norm_modulate").mkdir()
    (tmp_path / "norm_modulate" / "thesis").write_text("years")
    told: list[Any] = []
    with pytest.raises(PipelineError, match="norm_modulate holds something other than evidence"):
        h3opt.verify(
            silent, None, ["norm_modulate"], "cpu", evidence=tmp_path, progress=lambda *what: told.append(what)
        )
    assert told == []
    write_evidence(tmp_path / "fused_swiglu", evidence())
    check_folder(tmp_path, ["fused_swiglu", "fp8_linear"])


FULL = [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]


def fills(error: Exception) -> Any:
    """A ``save_file`` for which the disk is too small."""

    def save_file(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    return save_file


@pytest.mark.parametrize("error", FULL, ids=["writing", "in safetensors"])
def test_a_disk_that_is_full_is_an_error_of_ours_and_old_evidence_stays(error, tmp_path, monkeypatch):
    write_evidence(tmp_path / "e", evidence(call=7))
    monkeypatch.setattr("h3opt.verification.evidence.save_file", fills(error))
    with pytest.raises(PipelineError, match="e cannot be written: .*No space left on device"):
        write_evidence(tmp_path / "e", evidence())
    assert read_evidence(tmp_path / "e").call == 7 and [path.name for path in tmp_path.iterdir()] == ["e"]


def test_a_disk_that_is_full_costs_the_evidence_and_not_what_was_found(silent, tmp_path, monkeypatch):
    monkeypatch.setattr("h3opt.verification.evidence.save_file", fills(FULL[1]))
    session, installed = prepare(silent, [make_pass("fp8_linear").mutants()[0].instance], "cpu")
    try:
        found = bisect_pass(session, installed, [GenerationSettings(num_inference_steps=2)], tmp_path / "fp8_linear")
    finally:
        session.uninstall()
    assert found.site == "transformer.transformer_blocks.0.attn.to_q" and list(tmp_path.iterdir()) == []
    assert "elements differ" in found.moved and "h3opt replay" not in str(found)
    why = f"{tmp_path / 'fp8_linear'} cannot be written: I/O error: No space left on device. Give another folder."
    assert str(found).endswith(f"; no evidence was saved: {why}")
    assert json.loads(json.dumps(found.to_dict()))["unsaved"] == why and found.folder is None
