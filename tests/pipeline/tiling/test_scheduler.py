"""The tile scheduler cuts, runs and merges as the VAE's own methods do, and needs no more memory than planned."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from h3opt.errors import PipelineError
from h3opt.metrics.bits import bits_equal
from h3opt.metrics.seams import seam_visibility
from h3opt.pipeline.tiling.plan import plan_decode, plan_encode
from h3opt.pipeline.tiling.scheduler import TileScheduler, schedule_tiles
from h3opt.pipeline.tiling.strategies import Blender, TileOptions
from h3opt.reference.random_weights import cast_as_loaded, fill_random
from h3opt.reference.tiny import VAE_CONFIG

TILE, OVERLAP = 64, 16


def tiny_vae(dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """The tiny VAE with tiles so small that a cheap canvas has several."""
    with torch.random.fork_rng(devices=[]):
        vae = AutoencoderKLMiniMaxH3(**{**VAE_CONFIG, **config})
    fill_random(vae, torch.Generator().manual_seed(1))
    cast_as_loaded(vae.eval(), dtype).requires_grad_(False)
    vae.enable_tiling(TILE, TILE, OVERLAP, OVERLAP)
    return vae


def latents(rows: int, columns: int, frames: int = 12, samples: int = 1) -> torch.Tensor:
    return torch.randn(samples, 24, frames, rows, columns, generator=torch.Generator().manual_seed(2))


def scheduled(vae: Any, run: Callable[[], Any], options: TileOptions | None = None) -> Any:
    with ExitStack() as undo:
        schedule_tiles(vae, options or TileOptions(), undo)
        return run()


def decode(vae: Any, z: torch.Tensor) -> torch.Tensor:
    return vae.decode(z, return_dict=False)[0]


def moments(vae: Any, x: torch.Tensor) -> torch.Tensor:
    return vae.encode(x, return_dict=False)[0].parameters


@pytest.fixture(scope="module")
def vae() -> Any:
    return tiny_vae()


# --- same cuts, same bits --------------------------------------------------------------------------------------

DECODES: dict[str, tuple[dict[str, Any], dict[str, Any], torch.Tensor]] = {
    "a whole number of chunks": ({}, {}, latents(10, 9)),
    "a last chunk to fill": ({}, {}, latents(4, 9, 15)),
    "the shortest video": ({}, {}, latents(4, 4, 3)),
    "two samples": ({}, {}, latents(4, 9, 7, samples=2)),
    "sliced": ({}, {"use_slicing": True}, latents(4, 9, 7, samples=2)),
    "tiling off": ({}, {"use_tiling": False}, latents(10, 9, 7)),
    "tiles that cover each other by more than half": ({}, {}, latents(5, 4, 7)),
    "tiles of no whole number of latents": ({}, {"tile_sample_min_width": 70}, latents(4, 9, 7)),
    "nothing dropped": ({"token_drop": 0}, {}, latents(4, 9, 10)),
    "clips of whole latents": ({"clip_length": 16, "token_drop": 2}, {}, latents(4, 4, 9)),
}


@pytest.mark.parametrize("name", DECODES)
def test_decoding_gives_the_bits_and_strides_of_the_unmodified_method(name: str, vae: Any) -> None:
    config, attributes, z = DECODES[name]
    vae = tiny_vae(**config) if config or attributes else vae
    for attribute, value in attributes.items():
        setattr(vae, attribute, value)
    expected = decode(vae, z)
    found = scheduled(vae, lambda: decode(vae, z))
    assert bits_equal(expected, found), str(bits_equal(expected, found))
    assert expected.stride() == found.stride()


@pytest.mark.parametrize("shape", [(1, 160, 144), (20, 64, 50), (18, 100, 64)])
def test_encoding_gives_the_bits_of_the_unmodified_method(shape: tuple[int, int, int], vae: Any) -> None:
    x = torch.randn(1, 3, *shape, generator=torch.Generator().manual_seed(3))
    assert bits_equal(moments(vae, x), scheduled(vae, lambda: moments(vae, x)))


def test_batches_hold_the_tiles_of_neighbouring_chunks(vae: Any) -> None:
    z, calls = latents(4, 9), []
    hook = vae.decoder.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    expected = decode(vae, z)
    calls.clear()
    found = scheduled(vae, lambda: decode(vae, z), TileOptions(max_tiles=4))
    hook.remove()
    assert calls == [3, 3] == plan_decode(vae, z.shape, [TileOptions(max_tiles=4)]).to_dict()["batches"]
    assert (expected - found).abs().max() < 1e-4 * expected.abs().max()


def test_with_gradients_it_gives_the_same_ones(vae: Any) -> None:
    z = latents(4, 9, 7).requires_grad_()
    (expected,) = torch.autograd.grad(decode(vae, z).square().sum(), z)
    (found,) = torch.autograd.grad(scheduled(vae, lambda: decode(vae, z)).square().sum(), z)
    torch.testing.assert_close(found, expected)


def test_a_video_too_short_for_a_chunk_is_refused(vae: Any) -> None:
    with pytest.raises(PipelineError, match="2 latent frames make no chunk. Decode at least 7"):
        scheduled(vae, lambda: decode(vae, latents(4, 4, 2)))


# --- coming and going ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_vae_has_its_own_methods_back_when_the_last_one_leaves(order: tuple[int, int], vae: Any) -> None:
    stacks = [ExitStack(), ExitStack()]
    before = set(vars(vae))
    for stack in stacks:
        schedule_tiles(vae, TileOptions(), stack)
    stacks[order[0]].close()
    assert set(vars(vae)) - before == {"_decode", "_encode"}
    stacks[order[1]].close()
    assert set(vars(vae)) == before


def test_what_someone_else_put_in_place_of_a_method_is_put_back() -> None:
    vae = tiny_vae()
    vae._decode = theirs = lambda z: z
    scheduled(vae, lambda: None)
    assert vae._decode is theirs and "_encode" not in vars(vae)


@pytest.mark.parametrize("part", ["decoder", "blend"])
def test_an_error_in_flight_reaches_the_caller_and_the_next_decode_is_right(part: str, vae: Any) -> None:
    z, calls = latents(4, 9), [0]
    expected = decode(vae, z)

    def fail(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("out of luck")
        return type(vae)._blend(vae, *args) if part == "blend" else None

    with ExitStack() as undo:
        schedule_tiles(vae, TileOptions(max_tiles=2), undo)
        with ExitStack() as fault, pytest.raises(RuntimeError, match="out of luck"):
            if part == "blend":
                vae._blend = fail
                fault.callback(vae.__dict__.pop, "_blend")
            else:
                fault.callback(vae.decoder.register_forward_pre_hook(fail).remove)
            decode(vae, z)
        again = decode(vae, z)
    assert calls[0] == 3
    assert (expected - again).abs().max() < 1e-4 * expected.abs().max()
    assert bits_equal(expected, decode(vae, z))


class HardCut(Blender):
    def blend(self, before: torch.Tensor, after: torch.Tensor, dim: int) -> None:
        """Leave the pixels of the later tile."""


def test_a_seam_shows_at_the_borders_of_the_plan_unless_it_is_blended(vae: Any) -> None:
    z = latents(4, 9, 7)
    plan = plan_decode(vae, z.shape)
    assert plan.columns.borders == [32, 64, 80, 96] and plan.rows.borders == []

    def picture(options: TileOptions) -> torch.Tensor:
        brightness = iter((0.0, 1.0, 2.0))
        noise = torch.Generator().manual_seed(4)
        scheduler = TileScheduler(vae, [options])
        return scheduler.run(
            plan, z, lambda tile: next(brightness) + 0.1 * torch.randn(1, 3, 28, 64, 64, generator=noise)
        ).transpose(1, 2)

    assert seam_visibility(picture(TileOptions()), [], plan.columns.borders) < 1.2
    assert seam_visibility(picture(TileOptions(blender=HardCut)), [], plan.columns.borders) > 5


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_decode_holds_no_more_than_its_plan_says(dtype: torch.dtype, batch: int) -> None:
    vae, options = tiny_vae(dtype), TileOptions(max_tiles=batch)
    z = latents(4, 9).to(dtype)
    plan = plan_decode(vae, z.shape, [options])
    decode(vae, z)  # what is made at first use
    with ExitStack() as undo:
        schedule_tiles(vae, options, undo)
        with LiveBytes(vae) as live:
            decode(vae, z)
    assert 0.4 * plan.peak(plan.batch) < live.peak <= plan.peak(plan.batch)


def test_an_encode_holds_no_more_than_its_plan_says(vae: Any) -> None:
    x = torch.randn(1, 3, 17, 64, 112)
    plan = plan_encode(vae, x.shape)
    with ExitStack() as undo:
        schedule_tiles(vae, TileOptions(), undo)
        with LiveBytes(vae) as live:
            moments(vae, x)
    assert 0.6 * plan.peak(1) < live.peak <= plan.peak(1)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and nobody has dropped; weights do not count."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known | given:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size
