"""On a CUDA device: merging on a side stream keeps every bit whatever the streams' delays, and memory its budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import h3opt
from h3opt.device import Device, to_host
from h3opt.errors import DeviceError
from h3opt.kernels import kernel_names
from h3opt.kernels.ops import attention
from h3opt.metrics.bits import bits_equal, relative_error
from h3opt.metrics.lpips import lpips_per_frame
from h3opt.pass_api.registry import make_pass
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.tiling.cuda_graphs import CudaGraphRun
from h3opt.pipeline.tiling.plan import plan_decode
from h3opt.pipeline.tiling.strategies import Blender, TileOptions
from h3opt.pipeline.view import PipelineView
from h3opt.reference import CANVASES, full_vae, tiny_call, tiny_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZES = {"one tile": (4, 4), "tiled one way": (4, 9), "tiled both ways": (10, 9)}
EXACT = [["async_assembly"], ["tile_buffer_reuse"], ["async_assembly", "tile_buffer_reuse"]]
DELAYS = {
    "none": (0, 0),
    "slow decoder": (3_000_000, 0),
    "slow merge": (0, 3_000_000),
    "both": (2_000_000, 2_000_000),
}
"""Cycles that the decoder's stream and the merging one sleep at most, per tile."""


@pytest.fixture(scope="module")
def pipe() -> Any:
    pipe = tiny_pipeline(dtype=torch.bfloat16, device="cuda")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def vae(pipe: Any) -> Iterator[Any]:
    """The tiny pipeline's VAE, with tiles so small that a small canvas has several."""
    vae = pipe.vae
    before = vae.tile_sample_min_height, vae.tile_sample_min_overlap_height
    vae.enable_tiling(64, 64, 16, 16)
    yield vae
    vae.enable_tiling(before[0], before[0], before[1], before[1])


def latents(size: tuple[int, int], frames: int) -> torch.Tensor:
    return torch.randn(1, 24, frames, *size, generator=torch.Generator().manual_seed(2)).cuda()


@torch.no_grad()
def decode(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """Read on the current stream at once, with no synchronization between: as the pipeline does."""
    return vae.decode(z, return_dict=False)[0].clone()


@contextmanager
def passes_on(vae: Any, names: list[str], **options: Any) -> Iterator[None]:
    with ExitStack() as undo:
        for name in names:
            make_pass(name, options.get(name)).install(PipelineView(vae=vae), undo)  # type: ignore[attr-defined]
        yield


@contextmanager
def delayed(vae: Any, cycles: tuple[int, int], seed: int) -> Iterator[set[int]]:
    """Let each stream sleep for a random while before its work; yields the streams that merging ran on."""
    draw, streams = random.Random(seed), set()

    def sleep(most: int) -> None:
        if most:
            torch.cuda._sleep(draw.randrange(most))

    def slow_decoder(proceed: Any, *args: Any, **kwargs: Any) -> Any:
        sleep(cycles[0])
        return proceed(*args, **kwargs)

    def slow(method: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(self: Blender, tile: torch.Tensor) -> torch.Tensor:
            streams.add(torch.cuda.current_stream().cuda_stream)
            sleep(cycles[1])
            return method(self, tile)

        return slowed

    from h3opt.passes.tile_buffer_reuse import ReusedBuffers

    with ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        if cycles[0]:
            wrap_calls(vae.decoder, slow_decoder, undo)
        reused = ReusedBuffers.own
        patch.setattr(Blender, "own", slow(Blender.own))
        patch.setattr(ReusedBuffers, "own", slow(reused))
        yield streams


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("frames", [12, 15])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("passes", EXACT, ids="+".join)
def test_exact_passes_give_the_unmodified_bits_whatever_the_delays(
    passes: list[str], size: str, frames: int, delays: str, vae: Any
) -> None:
    z = latents(SIZES[size], frames)
    expected = decode(vae, z)
    with passes_on(vae, passes):
        for run in range(3):
            with delayed(vae, DELAYS[delays], seed=run) as streams:
                found = decode(vae, z)
            comparison = bits_equal(expected, found)
            assert comparison, f"run {run}: {comparison}"
            beside = streams - {torch.cuda.current_stream().cuda_stream}
            assert len(streams) == 1 and bool(beside) == ("async_assembly" in passes)


@pytest.mark.parametrize("size", SIZES)
def test_on_batches_they_give_the_bits_of_tile_batch_alone(size: str, vae: Any) -> None:
    z = latents(SIZES[size], 12)
    with passes_on(vae, ["tile_batch"]):
        expected = decode(vae, z)
    with passes_on(vae, ["tile_batch", *EXACT[-1]]):
        for run in range(3):
            with delayed(vae, DELAYS["both"], seed=run):
                assert bits_equal(expected, decode(vae, z))


@torch.no_grad()
def test_encoding_gives_the_unmodified_bits(vae: Any) -> None:
    x = torch.randn(1, 3, 20, 160, 144, generator=torch.Generator().manual_seed(3)).cuda()
    expected = vae.encode(x).latent_dist.parameters
    with passes_on(vae, EXACT[-1]), delayed(vae, DELAYS["slow merge"], seed=0):
        found = vae.encode(x).latent_dist.parameters.clone()
    assert bits_equal(expected, found)


@pytest.mark.parametrize("failing", ["decoder", "merge"])
def test_an_error_with_tiles_in_flight_surfaces_and_the_next_decode_is_right(failing: str, vae: Any) -> None:
    z = latents(SIZES["tiled both ways"], 12)
    expected = decode(vae, z)
    calls = [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise RuntimeError("out of luck")
        return args[0](*args[1:], **kwargs) if failing == "decoder" else type(vae)._blend(vae, *args, **kwargs)

    with passes_on(vae, ["async_assembly"]):
        with ExitStack() as fault, delayed(vae, DELAYS["both"], seed=0):
            if failing == "decoder":
                wrap_calls(vae.decoder, fail, fault)
            else:
                vae._blend = fail
                fault.callback(vae.__dict__.pop, "_blend")
            with pytest.raises(RuntimeError, match="out of luck"):
                decode(vae, z)
        torch.cuda.synchronize()
        assert bits_equal(expected, decode(vae, z))


def test_on_another_stream_than_the_default_one_it_is_the_same(vae: Any) -> None:
    z = latents(SIZES["tiled both ways"], 12)
    expected = decode(vae, z)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with passes_on(vae, EXACT[-1]), torch.cuda.stream(stream), delayed(vae, DELAYS["both"], seed=1):
        found = decode(vae, z)
    torch.cuda.current_stream().wait_stream(stream)
    assert bits_equal(expected, found)


def test_reused_buffers_ask_the_allocator_less(vae: Any) -> None:
    z = latents(SIZES["tiled both ways"], 22)

    def requests(passes: list[str]) -> int:
        with passes_on(vae, passes):
            decode(vae, z)
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            decode(vae, z)
            return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    assert requests(EXACT[2]) < requests(EXACT[0])


# --- recorded and replayed -------------------------------------------------------------------------------------


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each replay of a CUDA graph so far; every one comes late."""
    found: list[int] = []
    replay = CudaGraphRun.replay

    def late(self: Any, tiles: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(2_000_000)
        found.append(len(tiles))
        return replay(self, tiles)

    monkeypatch.setattr(CudaGraphRun, "replay", late)
    return found


@pytest.mark.parametrize("delays", ["none", "slow merge"])
@pytest.mark.parametrize("frames", [12, 15])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("passes", [["tile_graph"], ["tile_graph", *EXACT[-1]]], ids="+".join)
def test_replayed_the_bits_are_the_unmodified_ones(
    passes: list[str], size: str, frames: int, delays: str, vae: Any, replays: list[int]
) -> None:
    videos = [latents(SIZES[size], frames) * sign for sign in (1, -1)]
    expected = [decode(vae, z) for z in videos]
    with passes_on(vae, passes):
        for run in range(2):
            with delayed(vae, DELAYS[delays], seed=run):
                found = [decode(vae, z) for z in videos]
            assert all(map(bits_equal, expected, found)), f"run {run}"
    assert replays
    assert bits_equal(expected[0], decode(vae, videos[0]))


def test_replays_of_rewritten_blocks_are_counted_and_seen_by_the_profiler(vae: Any, replays: list[int]) -> None:
    z, passes = latents(SIZES["tiled both ways"], 12), ["fused_swiglu", "vae_fused_qkv", "tile_batch"]
    with h3opt.optimize(vae, passes, "h200"):
        expected = decode(vae, z)
    with h3opt.optimize(vae, [*passes, "tile_graph"], "h200") as opt:
        for _ in range(2):
            decode(vae, z)
        before, replayed = opt._session.operators_run(), len(replays)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            assert bits_equal(expected, decode(vae, z))
            torch.cuda.synchronize()
        counted = opt._session.operators_run() - before
    seen = {event.key: event.count for event in profile.key_averages()}
    assert len(replays) > replayed and set(counted) == {"swiglu", "unweighted_norm_rope"}
    assert {name: seen.get(kernel_names[name]) for name in counted} == dict(counted)


def test_moved_weights_are_recorded_anew(vae: Any, replays: list[int]) -> None:
    z = latents(SIZES["tiled both ways"], 12)
    expected = decode(vae, z)
    with passes_on(vae, ["tile_graph"]):
        decode(vae, z)
        for weight in vae.decoder.parameters():
            weight.data = weight.data.clone()
        torch.cuda.empty_cache()
        rubbish = [torch.full_like(weight, float("nan")) for weight in vae.decoder.parameters()]
        before = len(replays)
        assert bits_equal(expected, decode(vae, z)) and len(replays) > before
        del rubbish


def test_replays_on_different_streams_take_turns(vae: Any, replays: list[int]) -> None:
    videos = [latents(SIZES["tiled both ways"], 12) * sign for sign in (1, -1)]
    expected = [decode(vae, z) for z in videos]
    streams = [torch.cuda.Stream() for _ in videos]
    with passes_on(vae, ["tile_graph"]):
        decode(vae, videos[0])
        torch.cuda.synchronize()
        found = []
        for stream, z in zip(streams, videos, strict=True):
            with torch.cuda.stream(stream):
                found.append(decode(vae, z))
        torch.cuda.synchronize()
    assert replays and all(map(bits_equal, expected, found))


def test_under_autocast_it_decodes_as_unmodified_each_time(vae: Any) -> None:
    z = latents(SIZES["tiled both ways"], 12)
    with torch.autocast("cuda", torch.float16):
        expected = decode(vae, z)
    with passes_on(vae, ["tile_graph"]):
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                assert bits_equal(expected, decode(vae, z))
            torch.cuda.empty_cache()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_decoder_on_another_device_than_the_current_one_is_recorded_there(replays: list[int]) -> None:
    theirs = full_vae(decoder_num_layers=2).to("cuda:1")
    videos = [latents(SIZES["tiled both ways"], 12).to("cuda:1") * sign for sign in (1, -1)]
    expected = [decode(theirs, z) for z in videos]
    with passes_on(theirs, ["tile_graph"]):
        assert all(bits_equal(one, decode(theirs, z)) for one, z in zip(expected, videos, strict=True))
    assert replays


def test_a_decoder_that_cannot_be_recorded_is_an_error_that_says_so(vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    z, stream = latents(SIZES["tiled both ways"], 12), torch.cuda.current_stream()
    expected, forward = decode(vae, z), type(vae.decoder).forward
    with passes_on(vae, ["tile_graph", "async_assembly"]), monkeypatch.context() as patch:
        waits = lambda self, x: forward(self, x) * int(x.isfinite().all())  # noqa: E731
        patch.setattr(type(vae.decoder), "forward", waits)
        with pytest.raises(DeviceError, match=r"cannot be recorded as a CUDA graph: .* Turn off the pass"):
            decode(vae, z)
        assert torch.cuda.current_stream() == stream and torch.randn(3, device="cuda").isfinite().all()
        torch.cuda.synchronize()
    assert bits_equal(expected, decode(vae, z))
    with passes_on(vae, ["tile_graph", "async_assembly"]):
        assert bits_equal(expected, decode(vae, z))


def test_weights_sent_to_the_host_come_back_as_they_were() -> None:
    weight = torch.randn(300, 70, device="cuda").t()
    there = to_host(weight)
    assert there.device.type == "cpu" and there.stride() == weight.stride() and torch.equal(there.cuda(), weight)


# --- real geometry, two layers of the decoder ------------------------------------------------------------------


@pytest.fixture(scope="module")
def released() -> Any:
    return full_vae(decoder_num_layers=2)


@pytest.fixture(scope="module")
def real_latents() -> torch.Tensor:
    _, rows, columns = CANVASES["544x960x124"].latents
    return latents((rows, columns), 12)


@pytest.mark.parametrize("passes", EXACT, ids="+".join)
def test_at_real_geometry_exact_passes_give_the_unmodified_bits(
    passes: list[str], released: Any, real_latents: torch.Tensor
) -> None:
    expected = decode(released, real_latents)
    with passes_on(released, passes):
        for _ in range(3):
            comparison = bits_equal(expected, decode(released, real_latents))
            assert comparison, str(comparison)


@pytest.mark.parametrize("graphed", [[], ["tile_graph"]], ids=["called", "replayed"])
@pytest.mark.parametrize("tiles", [1, 4, 8])
def test_a_decode_stays_within_its_budget(
    tiles: int, graphed: list[str], released: Any, real_latents: torch.Tensor
) -> None:
    runner = make_pass("tile_graph").batch_runner(released) if graphed else None  # type: ignore[attr-defined]
    budget = plan_decode(released, real_latents.shape, [TileOptions(max_tiles=tiles, batch_runner=runner)]).peak(tiles)
    passes = ["tile_batch", "async_assembly", *graphed]
    options = {"max_tiles": 8, "memory_budget": budget}
    with torch.no_grad():
        with passes_on(released, passes, tile_batch=options):
            released.decode(real_latents, return_dict=False)  # workspaces of libraries are allocated once
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with passes_on(released, passes, tile_batch=options):
            released.decode(real_latents, return_dict=False)  # records, where it does
            torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= budget


# --- FP8 -------------------------------------------------------------------------------------------------------


def test_the_fp8_decoder_keeps_its_promise(pipe: Any) -> None:
    pytest.importorskip("lpips")
    expected = tiny_call(pipe)["videos"]
    with h3opt.optimize(pipe, passes=["vae_fp8_linear", "fused_swiglu", "quant_producer_fusion"]) as opt:
        found = tiny_call(pipe)["videos"]
        report, ran = opt.report, opt._session.operators_run()
    assert report["vae_fp8_linear"].matched == report["vae_fp8_linear"].expected == 18
    assert report["quant_producer_fusion"].per_region["vae.block"] == (3, 3)
    assert all(ran[name] > 0 for name in ("scaled_linear", "swiglu_quantize", "wide_norm_quantize")), ran
    assert not bits_equal(expected, found)
    assert lpips_per_frame(expected, found).mean() < 0.05
    assert bits_equal(expected, tiny_call(pipe)["videos"])


@torch.no_grad()
def test_fused_norm_and_rope_give_the_unmodified_bits_at_real_geometry_and_run_as_often_as_they_should() -> None:
    vae = full_vae(device="cuda", decoder_num_layers=2)
    z = latents((16, 16), 7)  # one tile
    expected = decode(vae, z)
    with h3opt.optimize(vae, ["vae_fused_qkv"], "h200") as opt:
        decode(vae, z)  # captures, and probes
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            found = decode(vae, z)
            torch.cuda.synchronize()
        entry = opt.report["vae_fused_qkv"]
    assert not entry.declined and entry.matched == entry.expected == 4, str(entry)
    assert bits_equal(expected, found)
    assert {event.key: event.count for event in profile.key_averages()}["unweighted_norm_rope_kernel"] == 4


@torch.no_grad()
def test_fused_residual_and_norm_give_the_unmodified_bits_at_real_geometry_and_run_as_often_as_they_should() -> None:
    vae = full_vae(device="cuda", decoder_num_layers=2)
    z = latents((16, 16), 7)  # one tile
    expected = decode(vae, z)
    with h3opt.optimize(vae, ["vae_residual_norm"], "h200") as opt:
        decode(vae, z)  # captures, and probes
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            found = decode(vae, z)
            torch.cuda.synchronize()
        entry = opt.report["vae_residual_norm"]
    assert not entry.declined and not entry.refused and entry.matched == entry.expected == 6, str(entry)
    assert bits_equal(expected, found)
    counts = {event.key: event.count for event in profile.key_averages()}
    for kernel in ("scaled_residual_norm_kernel", "scaled_residual_kernel", "wide_norm_kernel"):
        assert counts[kernel] == 2, counts


@torch.no_grad()
def test_quantizing_in_the_norm_changes_no_bit_of_the_fp8_decoder() -> None:
    vae = full_vae(device="cuda", decoder_num_layers=2)
    z = latents((16, 16), 7)
    with h3opt.optimize(vae, ["vae_fp8_linear"], "h200"):
        expected = decode(vae, z)
    passes = ["vae_fp8_linear", "quant_producer_fusion", "vae_residual_norm"]
    with h3opt.optimize(vae, passes, "h200") as opt:
        found = decode(vae, z)
        report, ran = opt.report, opt._session.operators_run()
    assert bits_equal(expected, found)
    assert report["quant_producer_fusion"].matched == 6 and report["vae_residual_norm"].matched == 4
    assert ran["scaled_residual_norm_quantize"] == ran["wide_norm_quantize"] == ran["scaled_residual"] > 0, ran


@pytest.mark.parametrize("backend", attention.BF16_BACKENDS)
@torch.no_grad()
def test_attention_of_the_decoder_runs_in_the_library_that_is_named(backend: str) -> None:
    reason = attention.missing(backend, Device.of("cuda"), fp8=False)
    if reason is not None:
        pytest.skip(reason)
    vae = full_vae(device="cuda", decoder_num_layers=2)
    z = latents((16, 16), 7)  # one tile
    expected = decode(vae, z)
    named = make_pass("attention_backend", {"backend": backend})
    with h3opt.optimize(vae, [named, "vae_fused_qkv", "vae_residual_norm"], "h200") as opt:
        found = decode(vae, z)
        entry, ran = opt.report["attention_backend"], opt._session.operators_run()
    assert not entry.declined and not entry.refused and entry.matched == entry.expected == 2, str(entry)
    assert ran["attention"] == 2, ran
    assert relative_error(expected.float(), found.float()) < 0.05
