"""The decode suite: which passes it measures where, in what order, and what it says of what they changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import build

from h3opt.bench.decode import DecodeBench, DecodeVariant, bench_decode
from h3opt.bench.peers import Peer
from h3opt.errors import PipelineError
from h3opt.reference import decode_inputs, decode_pipeline, full_audio_vae
from h3opt.reference.tiny import AUDIO_VAE_CONFIG

ASKED = ["audio_overlap", "tile_batch", "norm_modulate", "vae_fp8_linear", "tile_buffer_reuse", "deferred_sync",
         "quant_producer_fusion", "audio_direct_depthwise"]  # fmt: skip


@pytest.fixture(scope="module")
def decoders() -> Any:
    """Both decode steps; sound is a stand-in that reads its weights, as the tiny decoder takes a second."""
    pipe = build("bfloat16")
    return decode_pipeline(pipe.vae, pipe.audio_vae)


@pytest.fixture
def quick_sound(decoders: Any) -> Iterator[Any]:
    decoders.audio_vae.decode = lambda latents, *args, **kwargs: (latents.mean(1, keepdim=True).repeat(1, 1, 8),)
    yield decoders
    del decoders.audio_vae.decode


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    return decode_inputs("64x96x22", device="cpu")


def test_passes_are_measured_where_they_change_something_and_the_stricter_first(
    quick_sound: Any, inputs: dict[str, torch.Tensor]
) -> None:
    seen: list[list[str]] = []
    clip = torch.rand(1, 3, 22, 64, 96, generator=torch.Generator().manual_seed(0))

    def visited(result: DecodeBench) -> None:
        seen.append([variant.name for variant in result.variants if variant.rounds])

    found = bench_decode(quick_sound, inputs, ASKED, rounds=1, peers=[], clips={"noise": clip}, after_run=visited)
    assert [variant.name for variant in found.variants] == [
        "video: eager",
        "video: h3opt, no pass",
        "video: + tile_buffer_reuse",
        "video: + tile_batch",
        "video: + vae_fp8_linear",
        "video: + quant_producer_fusion",
        "audio: eager",
        "audio: + audio_direct_depthwise",
        "video + audio: eager",
        "video + audio: + audio_overlap",
        "video + audio: passes of either",
        "video + audio: passes of either + audio_overlap",
    ]
    assert [variant.failure for variant in found.variants] == [None] * 12 and [len(one) for one in seen] == [
        *range(1, 13)
    ]
    variants = {variant.name: variant for variant in found.variants}
    for name in ("video: eager", "video: + tile_buffer_reuse", "audio: eager", "video + audio: + audio_overlap"):
        assert variants[name].differing == 0 and variants[name].error == 0.0
    fp8 = variants["video: + vae_fp8_linear"]
    assert fp8.differing and fp8.lpips and 0 < fp8.lpips <= fp8.error * 10
    assert 0 < fp8.clip_lpips["noise"] <= fp8.clip_worst["noise"] < 0.05
    assert variants["video: + tile_buffer_reuse"].clip_lpips == {"noise": 0.0}
    assert json.loads(json.dumps(found.to_dict()))["tiles"] == found.tiles == 1
    assert "_decode" not in vars(quick_sound.vae)


@pytest.fixture
def quick_video(decoders: Any) -> Iterator[Any]:
    """The decode steps with a stand-in for video, and sound of a fraction of the tiny decoder's channels."""
    sound = full_audio_vae(device="cpu", **{**AUDIO_VAE_CONFIG, "decoder_dim": 64})
    decoders.vae.decode = lambda latents, *args, **kwargs: (latents.mean().expand(1, 3, 2, 32, 32),)
    yield decode_pipeline(decoders.vae, sound)
    del decoders.vae.decode


def test_an_arm_that_changes_the_sound_has_a_distance(quick_video: Any, inputs: dict[str, torch.Tensor]) -> None:
    found = bench_decode(quick_video, inputs, ["audio_direct_depthwise"], rounds=1, peers=[], cumulative=False)
    assert [variant.name for variant in found.variants if variant.decodes == "audio"] == [
        "audio: eager",
        "audio: h3opt, all passes",
    ]
    changed = next(variant for variant in found.variants if variant.name == "audio: h3opt, all passes")
    assert changed.differing and changed.audio_snr_db is not None and 40 < changed.audio_snr_db < 200


def test_an_arm_that_fails_says_why_and_the_others_go_on(
    quick_video: Any, quick_sound: Any, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any) -> Any:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr("h3opt.bench.decode.DECODE_PEERS", [Peer("compile", fail)])
    found = bench_decode(quick_sound, inputs, [], rounds=2, peers=["compile"])
    variants = {variant.name: variant for variant in found.variants}
    assert variants["video: compile"].failure == "RuntimeError: no compiler" and not variants["video: compile"].rounds
    assert len(variants["video + audio: eager"].rounds) == 2 and "no compiler" in str(found)


def test_what_it_cannot_measure_is_refused(decoders: Any, inputs: dict[str, torch.Tensor]) -> None:
    with pytest.raises(PipelineError, match=r"no peer 'compil' \(did you mean 'compile'\?\)"):
        bench_decode(decoders, inputs, [], peers=["compil"])
    with pytest.raises(PipelineError, match="does not decode video and sound"):
        bench_decode(decoders.vae, inputs, [])


def test_every_row_has_the_columns_of_the_head_and_ratios_are_of_one_group() -> None:
    variants = [
        DecodeVariant("video: eager", [60.0], install_seconds=0.0, first_call_seconds=1.0, peak_gib=2.0, differing=0),
        DecodeVariant("video: compile", [30.0], spent={"attention": 2.0, "gemm": 1.0, "h3opt": 0.0, "other": 1.0}),
        DecodeVariant(
            "audio: eager", [8.0], decodes="audio", spent=dict.fromkeys(("attention", "gemm", "h3opt", "other"), 1.0)
        ),
        DecodeVariant("audio: + x", [4.0], decodes="audio", audio_snr_db=50.0),
        DecodeVariant("video: + x", failure="RuntimeError: no"),
    ]
    found = DecodeBench("H200", 36, "544x960x124", 105, 15, 4.0, 700.0, 1e12, 7e11, variants, {})
    rows = found.table().markdown().splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert rows[3].startswith("| video: compile | 30.0 | 2.000 | 1.000 |")
    assert rows[5].startswith("| audio: + x | 4.0 | 2.000 | – |") and "50.0 |" in rows[5]
    assert "15 of 105 tiles" in str(found) and "1.00 (700)" in str(found) and "RuntimeError: no" in str(found)
    assert "| audio: eager | 1.00 | 1.00 |" in found.kernels_table().markdown()  # sound has no counted products
    assert found.profiled_share(variants[0]) == 15 / 105 and found.profiled_share(variants[2]) == 1.0
