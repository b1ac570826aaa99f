"""`audio_direct_depthwise`: the same sound to within rounding, no weight norm per call, and everything put back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from conftest import build, differing, fingerprint
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
    MiniMaxH3AudioActivation1d,
    MiniMaxH3AudioSnakeBeta,
)
from torch.nn.utils.weight_norm import WeightNorm

from h3opt import optimize
from h3opt.errors import ShortfallError
from h3opt.graph.tracing import retrace
from h3opt.metrics.audio import audio_snr_db

NAME = "audio_direct_depthwise"
STAGES, BLOCKS, ACTIVATIONS_PER_BLOCK = 6, 2, 4  # of the tiny decoder
ACTIVATIONS = STAGES * BLOCKS * ACTIVATIONS_PER_BLOCK + 1
CONVOLUTIONS = STAGES * (BLOCKS * ACTIVATIONS_PER_BLOCK + 1) + 2


@pytest.fixture(scope="module")
def pipe() -> Any:
    return build()


@pytest.fixture(scope="module")
def other() -> Any:
    """The same audio VAE, for other dtypes."""
    return build().audio_vae


def latents(length: int) -> torch.Tensor:
    return torch.randn(2, 32, length, generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def decode(vae: Any, length: int) -> torch.Tensor:
    return vae.decode(latents(length).to(vae.decoder.conv_post.weight_g.dtype), return_dict=False)[0].transpose(0, 1)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_sound_is_as_close_to_double_precision_as_the_unmodified_one(pipe: Any, other: Any, length: int) -> None:
    expected, unmodified = decode(other.double(), length), decode(pipe.audio_vae, length)
    with optimize(pipe.audio_vae, [NAME], profile="cpu") as opt:  # no pipeline needed
        found = decode(pipe.audio_vae, length)
        assert opt.report[NAME].matched == opt.report[NAME].expected == ACTIVATIONS + CONVOLUTIONS
    assert found.shape == unmodified.shape == (1, 2, 400 * length)
    assert not torch.equal(found, unmodified)
    snr = audio_snr_db(expected.float(), found)
    assert (snr > 100).all() and (snr > audio_snr_db(expected.float(), unmodified) - 6).all()


def test_weight_norm_is_computed_at_installation_only_and_comes_back(pipe: Any, monkeypatch: Any) -> None:
    before, unmodified = fingerprint(pipe), decode(pipe.audio_vae, 1)
    opt = optimize(pipe, [NAME], profile="cpu")
    calls: list[Any] = []
    original = WeightNorm.compute_weight
    monkeypatch.setattr(WeightNorm, "compute_weight", lambda *args: calls.append(1) or original(*args))
    decode(pipe.audio_vae, 1)
    assert calls == []
    opt.restore()
    decode(pipe.audio_vae, 1)
    assert len(calls) == CONVOLUTIONS
    assert differing(before, fingerprint(pipe)) == []
    assert torch.equal(decode(pipe.audio_vae, 1), unmodified)


def test_an_amp_block_is_captured_whole_with_two_operators_per_activation(pipe: Any) -> None:
    block = pipe.audio_vae.decoder.resblocks[-1]
    x = torch.randn(2, block.convs1[0].in_channels, 30)
    counts: Counter[str] = Counter()

    def count(graph: Any, _: Any) -> Any:
        counts.update(str(node.target) for node in retrace(graph).graph.nodes)
        return graph.forward

    with optimize(pipe, [NAME], profile="cpu"), torch.no_grad():
        assert torch.equal(torch.compile(block, backend=count, fullgraph=True)(x), block(x))
    assert counts["h3opt.upsample_snake_v1.default"] == counts["h3opt.downsample_v1.default"] == ACTIVATIONS_PER_BLOCK
    assert not [name for name in counts if "weight_norm" in name or "pad" in name]


def test_what_it_installs_moves_with_the_model() -> None:
    audio_vae = build().audio_vae
    with optimize(audio_vae, [NAME], profile="cpu"):
        moved = audio_vae.to("meta").decoder
        assert moved(torch.empty(2, 64, 3, device="meta")).shape == (2, 1, 1200)


def test_an_activation_of_another_shape_is_a_shortfall_and_nothing_is_left_changed(pipe: Any) -> None:
    decoder = pipe.audio_vae.decoder
    original = decoder.activation_post
    channels = original.act.alpha.numel()
    decoder.activation_post = MiniMaxH3AudioActivation1d(MiniMaxH3AudioSnakeBeta(channels), kernel_size=10)
    before = fingerprint(pipe)
    try:
        with pytest.raises(ShortfallError, match=NAME):
            optimize(pipe, [NAME], profile="cpu")
        assert differing(before, fingerprint(pipe)) == []
    finally:
        decoder.activation_post = original


def test_it_declines_where_there_is_nothing_for_it(pipe: Any, other: Any) -> None:
    with optimize(pipe.vae, [NAME], profile="cpu") as opt:
        assert opt.report[NAME].declined == "there is no audio VAE"
    with optimize(other.bfloat16(), [NAME], profile="cpu") as opt:
        assert "bfloat16" in opt.report[NAME].declined
