"""The decode passes on the tiny VAE: exact where they say so, at every kind of canvas, alone and together."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3

import h3opt
from h3opt.errors import DeviceError, H3OptError, MemoryBudgetError, PassOptionError, PipelineError
from h3opt.metrics.bits import bits_equal
from h3opt.metrics.lpips import lpips_per_frame
from h3opt.pass_api.fp8 import PROJECTIONS, FP8Linear
from h3opt.pass_api.registry import make_pass
from h3opt.passes.async_assembly import SideStreamQueue
from h3opt.passes.tile_geometry import parse_tile
from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.tiling.cuda_graphs import CudaGraphRun, CudaGraphRunner, RecordedRun, SharedGraphStream
from h3opt.pipeline.tiling.plan import plan_decode
from h3opt.pipeline.tiling.scheduler import schedule_tiles
from h3opt.pipeline.tiling.strategies import TileOptions
from h3opt.pipeline.view import PipelineView
from h3opt.reference.random_weights import cast_as_loaded, fill_random
from h3opt.reference.tiny import VAE_CONFIG

CANVASES = {"one tile": (4, 4), "tiled one way": (4, 9), "tiled both ways": (5, 9)}
EXACT = [["async_assembly"], ["tile_buffer_reuse"], ["tile_graph"]]
EXACT.append([name for (name,) in EXACT])


def build(dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        vae = AutoencoderKLMiniMaxH3(**VAE_CONFIG)
    fill_random(vae, torch.Generator().manual_seed(1))
    cast_as_loaded(vae.eval(), dtype).requires_grad_(False)
    vae.enable_tiling(64, 64, 16, 16)
    return vae


def latents(canvas: str, frames: int) -> torch.Tensor:
    return torch.randn(1, 24, frames, *CANVASES[canvas], generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def decode(vae: Any, z: torch.Tensor) -> torch.Tensor:
    return vae.decode(z, return_dict=False)[0]


class Vaes:
    """One VAE per dtype, and what it decodes unmodified."""

    def __init__(self) -> None:
        self.vaes = {dtype: build(dtype) for dtype in (torch.float32, torch.bfloat16)}
        self._decoded: dict[Any, torch.Tensor] = {}

    def unmodified(self, dtype: torch.dtype, canvas: str, frames: int) -> torch.Tensor:
        key = dtype, canvas, frames
        if key not in self._decoded:
            self._decoded[key] = decode(self.vaes[dtype], latents(canvas, frames))
        return self._decoded[key]

    def decoded(self, passes: list[Any], dtype: torch.dtype, canvas: str, frames: int) -> torch.Tensor:
        vae = self.vaes[dtype]
        with ExitStack() as undo:
            for one in passes:
                one = make_pass(one) if isinstance(one, str) else one
                assert one.install(PipelineView(vae=vae), undo) == one.expect(PipelineView(vae=vae)) > 0
            return decode(vae, latents(canvas, frames))


@pytest.fixture(scope="module")
def vaes() -> Vaes:
    return Vaes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("frames", [12, 10], ids=["whole chunks", "a chunk to fill"])
@pytest.mark.parametrize("canvas", CANVASES)
@pytest.mark.parametrize("passes", EXACT, ids="+".join)
def test_exact_passes_give_the_unmodified_bits(
    passes: list[str], canvas: str, frames: int, dtype: torch.dtype, vaes: Vaes
) -> None:
    comparison = bits_equal(vaes.unmodified(dtype, canvas, frames), vaes.decoded([*passes], dtype, canvas, frames))
    assert comparison, str(comparison)


@pytest.mark.parametrize("canvas", CANVASES)
def test_exact_passes_change_no_bit_of_batched_tiles(canvas: str, vaes: Vaes) -> None:
    batched = vaes.decoded(["tile_batch"], torch.bfloat16, canvas, 12)
    together = vaes.decoded(["tile_batch", *EXACT[-1]], torch.bfloat16, canvas, 12)
    assert bits_equal(batched, together)


@pytest.mark.parametrize("canvas", CANVASES)
def test_batched_tiles_differ_by_rounding_alone(canvas: str, vaes: Vaes) -> None:
    expected = vaes.unmodified(torch.float32, canvas, 12)
    for tiles in (2, 8):
        found = vaes.decoded([make_pass("tile_batch", {"max_tiles": tiles})], torch.float32, canvas, 12)
        assert (expected - found).abs().max() < 1e-4 * expected.abs().max()


def test_one_tile_at_a_time_is_exact(vaes: Vaes) -> None:
    found = vaes.decoded([make_pass("tile_batch", {"max_tiles": 1})], torch.float32, "tiled both ways", 12)
    assert bits_equal(vaes.unmodified(torch.float32, "tiled both ways", 12), found)


def test_installed_twice_and_on_two_pipelines(vaes: Vaes) -> None:
    ours, theirs = vaes.vaes[torch.float32], build(torch.float32)
    z, expected = latents("tiled one way", 12), vaes.unmodified(torch.float32, "tiled one way", 12)
    before = set(vars(ours))
    first = h3opt.optimize(ours, ["async_assembly", "tile_geometry"], "cpu")
    with h3opt.optimize(ours, EXACT[-1], "cpu") as opt, h3opt.optimize(theirs, EXACT[0], "cpu"):
        assert not opt.report["async_assembly"].declined and "tile_geometry" not in opt.report.passes
        assert bits_equal(expected, decode(ours, z)) and bits_equal(expected, decode(theirs, z))
    first.restore()
    assert set(vars(ours)) == before and bits_equal(expected, decode(ours, z))


@pytest.mark.parametrize(
    "name", ["async_assembly", "tile_buffer_reuse", "tile_batch", "tile_geometry", "vae_fp8_linear"]
)
def test_without_a_video_vae_they_decline(name: str, pipe: Any) -> None:
    with h3opt.optimize(pipe.audio_vae, [name], "cpu") as opt:
        assert opt.report[name].declined == "there is no video VAE"


# --- streams ---------------------------------------------------------------------------------------------------


def test_memory_of_a_tile_is_given_back_after_the_computing_stream_waits_for_its_merge(stream_log: list[str]) -> None:
    queue = SideStreamQueue()

    def merge(number: int) -> Callable[[], list[torch.Tensor]]:
        tile = torch.zeros(1)
        weakref.finalize(tile, stream_log.append, f"tile {number} is free")
        return lambda: stream_log.append(f"merge {number}") or [tile]  # type: ignore[func-returns-value]

    for number in (1, 2, 3):
        queue.run(merge(number), torch.device("cuda", 0))
    queue.finish()
    in_turn = ["side waits for compute", "merge 1", "side waits for compute", "merge 2", "compute waits for side 1"]
    in_turn += ["tile 1 is free", "side waits for compute", "merge 3", "compute waits for side 2", "tile 2 is free"]
    assert stream_log == [*in_turn, "compute waits for side", "tile 3 is free"]
    assert len(queue.streams) == 1, "one stream for all decodes, as each has a memory pool of its own"
    assert not copy.deepcopy(queue).streams


def test_the_streams_join_when_a_merge_fails(stream_log: list[str]) -> None:
    queue = SideStreamQueue()

    def fail() -> list[torch.Tensor]:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        queue.run(fail, torch.device("cuda", 0))
    queue.finish()
    assert stream_log == ["side waits for compute", "compute waits for side"] and not queue.held
    queue.finish()
    assert len(stream_log) == 2, "there is nothing to wait for any more"


# --- graph passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_norm_and_rope_are_fused_in_every_block_whatever_the_batch(vaes: Vaes, dtype: torch.dtype) -> None:
    vae, z = vaes.vaes[dtype], latents("tiled one way", 12)
    with h3opt.optimize(vae, ["vae_fused_qkv"], "cpu") as opt:
        assert bits_equal(vaes.unmodified(dtype, "tiled one way", 12), decode(vae, z))
        entry = opt.report["vae_fused_qkv"]
        assert entry.matched == entry.expected == 2 * len(vae.decoder.transformer_blocks) and "probe" in entry.proof
    batched = vaes.decoded(["tile_batch"], dtype, "tiled one way", 12)
    with h3opt.optimize(vae, ["tile_batch", "vae_fused_qkv"], "cpu") as opt:
        assert bits_equal(batched, decode(vae, z))
        assert opt.report["vae_fused_qkv"].matched == entry.matched and not opt.report["vae_fused_qkv"].refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_residual_and_norm_are_fused_in_every_block_and_the_first_has_sixteen_bits(vaes: Vaes, dtype: Any) -> None:
    vae, z = vaes.vaes[dtype], latents("tiled one way", 12)
    blocks, per_block = len(vae.decoder.transformer_blocks), 2 if dtype is torch.float32 else 3
    with h3opt.optimize(vae, ["vae_residual_norm", "vae_fused_qkv"], "cpu") as opt:
        assert bits_equal(vaes.unmodified(dtype, "tiled one way", 12), decode(vae, z))
        entry, ran = opt.report["vae_residual_norm"], opt._session.operators_run()
        assert entry.matched == entry.expected == per_block * blocks and "probe" in entry.proof and not entry.refused
        assert ran["scaled_residual_norm"] == ran["scaled_residual"] > 0
        assert ran["wide_norm"] == ran["scaled_residual"] * (per_block - 2)
    assert bits_equal(vaes.unmodified(dtype, "tiled one way", 12), decode(vae, z))


FP8 = ["vae_fp8_linear", "quant_producer_fusion", "vae_residual_norm"]


@pytest.mark.parametrize(
    ("layers", "dtype", "quantized", "left"),
    [
        (PROJECTIONS, torch.float32, 3, 2),
        (PROJECTIONS, torch.bfloat16, 3, 2),
        (("attn.to_q", "ff.net.0.proj"), torch.bfloat16, 1, 3),
    ],
    ids=["all layers-float32", "all layers-bfloat16", "q and up-bfloat16"],
)
def test_norms_quantize_for_the_projections_that_all_read_fp8(
    vaes: Vaes, layers: tuple[str, ...], dtype: Any, quantized: int, left: int
) -> None:
    vae, z = vaes.vaes[dtype], latents("one tile", 7)
    one = make_pass("vae_fp8_linear", {"layers": layers})
    with h3opt.optimize(vae, [one], "cpu"):
        expected = decode(vae, z)
    with h3opt.optimize(vae, [one, *FP8[1:]], "cpu") as opt:
        assert bits_equal(expected, decode(vae, z))
        blocks = len(vae.decoder.transformer_blocks)
        found = {name: (opt.report[name].matched, opt.report[name].expected) for name in FP8[1:]}
    assert found[FP8[1]] == (quantized * blocks,) * 2
    assert found[FP8[2]] == (left * blocks,) * 2


# --- memory ----------------------------------------------------------------------------------------------------


def test_reused_buffers_compute_the_weights_once_however_long_the_video(vaes: Vaes) -> None:
    vae = vaes.vaes[torch.float32]

    def blends(passes: list[str], frames: int) -> int:
        calls = []
        vae._blend = lambda *args, **kwargs: calls.append(1) or type(vae)._blend(vae, *args, **kwargs)
        try:
            vaes.decoded([*passes], torch.float32, "tiled one way", frames)
        finally:
            del vae._blend
        return len(calls)

    assert blends(["tile_buffer_reuse"], 7) < blends(["tile_buffer_reuse"], 12) == blends(["tile_buffer_reuse"], 22)
    assert blends([], 12) < blends([], 22), "the decoder itself computes them for every border"


class Counted(CudaGraphRunner):
    """Counts how often it recorded."""

    recordings = 0

    def record(self, model: Any, tiles: torch.Tensor) -> RecordedRun:
        self.recordings += 1
        return super().record(model, tiles)


@contextmanager
def counting(vae: Any) -> Iterator[Counted]:
    with ExitStack() as undo:
        runner = Counted(vae)
        schedule_tiles(vae, TileOptions(batch_runner=runner), undo)
        yield runner


def test_a_shape_is_recorded_once_until_a_weight_lies_elsewhere(vaes: Vaes) -> None:
    vae, z = vaes.vaes[torch.float32], latents("tiled one way", 12)
    with counting(vae) as runner:
        for _ in range(2):
            decode(vae, z)
        assert runner.recordings == 1
        decode(vae, z[..., :2])
        assert runner.recordings == 2, "another shape"
        weight = vae.decoder.proj_out.weight
        weight.data = weight.data.clone()
        decode(vae, z)
        assert runner.recordings == 3
        with torch.inference_mode():
            decode(vae, z)
        assert runner.recordings == 4


def test_what_runs_is_recorded_anew_when_it_is_exchanged(vaes: Vaes) -> None:
    vae, z = vaes.vaes[torch.float32], latents("tiled one way", 7)
    first, attention = vae.decoder.proj_out, vae.decoder.transformer_blocks[0].attn
    with counting(vae) as runner, ExitStack() as undo:
        decode(vae, z)
        undo.callback(setattr, vae.decoder, "proj_out", first)
        vae.decoder.proj_out = torch.nn.Sequential(torch.nn.Identity(), first)
        vae.decoder.proj_out.weight = first.weight
        decode(vae, z)
        assert runner.recordings == 2, "a module"
        undo.callback(attention.set_processor, attention.processor)
        attention.set_processor(type(attention.processor)())
        decode(vae, z)
        assert runner.recordings == 3, "an attention processor"
        undo.callback(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled())
        torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled())
        decode(vae, z)
        assert runner.recordings == 4, "which attention kernels there are to choose from"


def test_recordings_of_another_canvas_make_way(vaes: Vaes) -> None:
    vae = vaes.vaes[torch.float32]
    with counting(vae) as runner:
        for width in (2, 3, 4, 2):
            decode(vae, latents("one tile", 12)[..., :width])
        assert runner.recordings == 4 and len(runner.recorded) == 2


def test_a_shape_whose_first_run_failed_is_not_recorded_before_it_ran(vaes: Vaes) -> None:
    runner, tiles = Counted(vaes.vaes[torch.float32]), torch.zeros(1, 2)

    def fail(tiles: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with torch.no_grad():
        with pytest.raises(RuntimeError, match="out of memory"):
            runner.run(fail, tiles, "decode")
        runner.run(torch.clone, tiles, "decode")
        assert runner.recordings == 0
        runner.run(torch.clone, tiles, "decode")
        assert runner.recordings == 1


def test_a_cuda_recording_is_of_the_device_of_its_tiles_and_waits_for_replays_on_other_streams(
    monkeypatch: pytest.MonkeyPatch, stream_log: list[str]
) -> None:
    class Graph:
        def replay(self) -> None:
            stream_log.append("replay")

    def recording(graph: Graph, pool: int, stream: Any, capture_error_mode: str) -> Any:
        stream_log.append(f"record on {stream.name} of {stream.device}")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda: "end")
    generator = SimpleNamespace(clone_state=lambda: "as it was", graphsafe_set_state=stream_log.append)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    shared, tiles = SharedGraphStream(torch.device("cuda", 1)), torch.ones(2)
    made = CudaGraphRun(lambda tiles: tiles, tiles, 7, shared)
    assert made.replay(tiles * 3).tolist() == [3, 3]
    assert stream_log == ["record on side of cuda:1", "compute waits for end", "replay", "compute records end"]

    def waits(tiles: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not while capturing\nmore")

    with pytest.raises(DeviceError, match=r"CUDA graph: not while capturing. Turn off"):
        CudaGraphRun(waits, tiles, 7, shared)
    assert stream_log[-1] == "as it was", "the random state that recording began with stays marked as being recorded"


def test_casts_that_autocast_keeps_are_not_recorded(vaes: Vaes) -> None:
    with counting(vaes.vaes[torch.float32]) as runner, torch.autocast("cpu", torch.bfloat16):
        decode(runner.vae, latents("tiled one way", 7))
    assert runner.recordings == 0


def test_a_copy_of_a_vae_makes_its_own_recordings(vaes: Vaes) -> None:
    vae, z = vaes.vaes[torch.float32], latents("tiled one way", 7)
    with counting(vae) as runner:
        expected = decode(vae, z)
        theirs = copy.deepcopy(vae)
        copied = theirs._decode.__self__.options[0].batch_runner
        assert any(runner.recorded.values()) and not copied.recorded and copied.vae is theirs
        assert bits_equal(expected, decode(theirs, z))


def test_who_listens_to_the_decoder_hears_every_call(vaes: Vaes) -> None:
    vae, z, heard = vaes.vaes[torch.float32], latents("tiled one way", 12), []
    block = vae.decoder.transformer_blocks[0]
    with counting(vae) as runner, ExitStack() as undo:
        decode(vae, z)
        hook = block.register_forward_hook(lambda *_: heard.append("hook"))
        decode(vae, z)
        hook.remove()
        wrap_calls(block, lambda proceed, *args, **kwargs: heard.append("wrapper") or proceed(*args, **kwargs), undo)
        decode(vae, z)
        block._hf_hook = "offloads"
        undo.callback(delattr, block, "_hf_hook")
        decode(vae, z)
        assert runner.recordings == 1
    with counting(vae) as runner, ExitStack() as undo:
        for module in (vae, vae.post_quant_conv):  # as hooks that move or convert weights around a call do
            module.forward = module.forward
            undo.callback(delattr, module, "forward")
            decode(vae, z)
            undo.close()
        assert runner.recordings == 0
    tiles = heard.count("hook")
    assert tiles > 2 and heard == ["hook"] * tiles + ["wrapper"] * 2 * tiles


def test_with_gradients_nothing_is_recorded(vaes: Vaes) -> None:
    vae = vaes.vaes[torch.float32]
    with counting(vae) as runner, torch.enable_grad():
        for _ in range(2):
            vae.decode(latents("tiled one way", 7), return_dict=False)
    assert runner.recordings == 0


def test_what_recordings_keep_counts_towards_the_budget(vaes: Vaes) -> None:
    vae, shape = vaes.vaes[torch.float32], latents("tiled both ways", 12).shape
    called, replayed = (
        plan_decode(vae, shape, [TileOptions(batch_runner=runner)]) for runner in (None, CudaGraphRunner(vae))
    )
    assert replayed.peak(3) - called.peak(3) == 2 * 3 * called.tile_bytes


def test_a_budget_too_small_says_the_least_and_leaves_the_pipeline_usable(silent: Any) -> None:
    clip, view = GenerationSettings(num_inference_steps=2), PipelineView.of(silent)
    expected = generate(silent, clip)
    with ExitStack() as undo:
        make_pass("tile_batch", {"memory_budget": "1MiB"}).install(view, undo)  # type: ignore[attr-defined]
        with pytest.raises(MemoryBudgetError, match=r"1.00 MiB is too small to decode 64x96, 124 frames") as caught:
            generate(silent, clip)
    least = str(caught.value).partition("needs ")[2].partition(". Set")[0]
    with ExitStack() as undo:
        make_pass("tile_batch", {"memory_budget": least}).install(view, undo)  # type: ignore[attr-defined]
        assert bits_equal(expected.video, generate(silent, clip).video)


@pytest.mark.parametrize("budget", [0, "0GiB", "", "-1GiB", "much", None, "9" * 400 + "GiB"])
def test_a_budget_of_nothing_is_refused(budget: Any) -> None:
    with pytest.raises(PassOptionError, match="positive number of bytes"):
        make_pass("tile_batch", {"memory_budget": budget})


# --- tile_geometry ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        ("288x270x32", "multiples of 16"),
        ("288x272x8", "multiples of 16"),
        ("288x272x272", "larger than its overlap"),
        ("64x288x80", "larger than its overlap"),
        ("-288x272x32", "multiples of 16"),
        ("288x272x-32", "multiples of 16"),
        ("288x272x0", "multiples of 16"),
        ("0x0x0", "multiples of 16"),
        ("288x272", "three whole numbers"),
        ("288x272x32x1", "three whole numbers"),
        ("288x272x3.5", "three whole numbers"),
        ("", "three whole numbers"),
        (288, "three whole numbers"),
        (None, "three whole numbers"),
    ],
)
def test_a_tile_that_is_none_is_refused(tile: Any, why: str) -> None:
    with pytest.raises(PassOptionError, match=why):
        make_pass("tile_geometry", {"tile": tile})


def test_a_tile_is_read() -> None:
    assert parse_tile("288x272x32") == (288, 272, 32)


@pytest.mark.parametrize("tile", ["64x80x16", "32x32x16", "80x144x16"])
def test_another_tile_gives_what_the_decoder_gives_with_it(tile: str, vaes: Vaes) -> None:
    theirs, (height, width, overlap) = build(torch.float32), parse_tile(tile)
    theirs.enable_tiling(height, width, overlap, overlap)
    found = vaes.decoded([make_pass("tile_geometry", {"tile": tile})], torch.float32, "tiled both ways", 7)
    assert bits_equal(decode(theirs, latents("tiled both ways", 7)), found)


def test_encoding_keeps_its_tiles(vaes: Vaes) -> None:
    vae, x = vaes.vaes[torch.float32], torch.randn(1, 3, 1, 160, 144)
    with torch.no_grad(), ExitStack() as undo:
        expected = vae.encode(x).latent_dist.parameters
        make_pass("tile_geometry", {"tile": "32x32x16"}).install(PipelineView(vae=vae), undo)  # type: ignore[attr-defined]
        assert bits_equal(expected, vae.encode(x).latent_dist.parameters)


@pytest.mark.parametrize("tile", ["96x64x16", "64x160x16"])
def test_a_tile_larger_than_the_frame_is_refused_when_the_frame_is_known(tile: str, vaes: Vaes) -> None:
    with pytest.raises(PipelineError, match="larger than the frame of 80x144. Choose"):
        vaes.decoded([make_pass("tile_geometry", {"tile": tile})], torch.float32, "tiled both ways", 7)


def test_with_tiling_off_a_tile_size_is_declined_or_refused() -> None:
    vae = build(torch.float32)
    one = make_pass("tile_geometry", {"tile": "64x64x16"})
    with h3opt.optimize(vae, [one], "cpu"):
        vae.disable_tiling()
        with pytest.raises(H3OptError, match="tiling is off. Call vae.enable_tiling"):
            decode(vae, latents("one tile", 7))
    with h3opt.optimize(vae, [one], "cpu") as opt:
        assert opt.report["tile_geometry"].declined == "tiling is off; vae.enable_tiling() turns it on"


# --- vae_fp8_linear --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fp8_keeps_biases_and_the_dtype_of_the_decoder(dtype: torch.dtype, vaes: Vaes) -> None:
    vae = vaes.vaes[dtype]
    before = dict(vae.named_parameters())
    with ExitStack() as undo:
        make_pass("vae_fp8_linear").install(PipelineView(vae=vae), undo)  # type: ignore[attr-defined]
        layers = [module for module in vae.decoder.modules() if isinstance(module, FP8Linear)]
        assert len(layers) == 18 and all(layer.weight_fp8.dtype == torch.float8_e4m3fn for layer in layers)
        assert all(one is before[name] for name, one in vae.named_parameters())
        found = decode(vae, latents("tiled one way", 7))
    assert dict(vae.named_parameters()).keys() == before.keys()
    expected = decode(vae, latents("tiled one way", 7))
    assert found.dtype == expected.dtype and not bits_equal(found, expected)
    pictures = [(video * 0.2 + 0.5).clamp(0, 1).transpose(1, 2).float() for video in (expected, found)]
    assert lpips_per_frame(*pictures).mean() < 0.05


def test_fp8_can_leave_layers_and_blocks_alone(vaes: Vaes) -> None:
    vae = vaes.vaes[torch.float32]
    one = make_pass("vae_fp8_linear", {"layers": ["ff.net.2"], "keep_first": 1, "keep_last": 1})
    with ExitStack() as undo:
        assert one.install(PipelineView(vae=vae), undo) == 1 == one.expect(PipelineView(vae=vae))  # type: ignore[attr-defined]
        changed = [name for name, module in vae.decoder.named_modules() if isinstance(module, FP8Linear)]
    assert changed == ["transformer_blocks.1.ff.net.2"]
    one = make_pass("vae_fp8_linear", {"keep_first": 1, "keep_last": len(vae.decoder.transformer_blocks) + 1})
    assert one.expect(PipelineView(vae=vae)) == 0  # type: ignore[attr-defined]
    with ExitStack() as undo, pytest.raises(PassOptionError, match="keep all .* blocks, so nothing would become FP8"):
        one.install(PipelineView(vae=vae), undo)  # type: ignore[attr-defined]
