"""On a CUDA device: no host sync between the first transformer call and the first decoded tile, and streams that keep
the bits whichever of them is late."""

from contextlib import ExitStack

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import MiniMaxH3AudioActivation1d

import h3opt
from h3opt.kernels import kernel_names
from h3opt.metrics.audio import audio_snr_db
from h3opt.metrics.bits import bits_equal
from h3opt.pipeline.hooks import wrap_calls
from h3opt.pipeline.minimax_h3 import SET_TIMESTEPS_STEP
from h3opt.pipeline.steps import find_steps, wrap_step
from h3opt.reference import tiny_call, tiny_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LOOP = ["timestep_plan", "deferred_sync"]
EXACT = [*LOOP, "audio_overlap"]
OTHERS = ["norm_modulate", "fused_swiglu", "residual_fold", "modulation_table", "hoist_step_invariants", "tile_batch"]
LATE = 100_000_000  # clock cycles: some 50 ms


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_pipeline(dtype=torch.bfloat16, device="cuda")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def unmodified(pipe):
    return tiny_call(pipe)


def assert_same(expected, found):
    for key in ("videos", "audio"):
        comparison = bits_equal(expected[key], found[key])
        assert comparison, f"{key}: {comparison}"


@pytest.mark.parametrize("passes", [*([name] for name in EXACT), EXACT], ids="+".join)
def test_the_bits_are_the_unmodified_ones(pipe, unmodified, passes):
    with h3opt.optimize(pipe, passes=passes) as opt:
        for seed in (0, 1, 0):  # a second generation must not get anything of the first
            found = tiny_call(pipe, seed=seed)
        assert all(opt.report[name].matched == opt.report[name].expected > 0 for name in passes)
    assert_same(unmodified, found)
    assert_same(unmodified, tiny_call(pipe))


@pytest.mark.parametrize("frames", [124, 141])
@pytest.mark.parametrize(("height", "width"), [(64, 96), (64, 288), (288, 288)])
def test_untiled_and_tiled_the_bits_are_the_unmodified_ones(pipe, height, width, frames):
    canvas = {"height": height, "width": width, "num_frames": frames}
    expected = tiny_call(pipe, **canvas)
    with h3opt.optimize(pipe, passes=EXACT):
        assert_same(expected, tiny_call(pipe, **canvas))


# --- syncs -------------------------------------------------------------------------------------------------------


def call_without_syncs(pipe):
    """A generation in which a sync between the first transformer call and the first decoded tile raises."""
    tiles = []

    def first_call(proceed, *args, **kwargs):
        if not tiles:
            torch.cuda.set_sync_debug_mode("error")
        return proceed(*args, **kwargs)

    def first_tile(proceed, *args, **kwargs):
        tile = proceed(*args, **kwargs)
        tiles.append(torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("default")
        return tile

    with ExitStack() as undo:
        undo.callback(torch.cuda.set_sync_debug_mode, "default")
        wrap_calls(pipe.transformer, first_call, undo)
        wrap_calls(pipe.vae.decoder, first_tile, undo)
        out = tiny_call(pipe)
    assert tiles[0] == 2, "syncs raised until the first tile was there"
    return out


@pytest.mark.parametrize("passes", [LOOP, EXACT, [*EXACT, *OTHERS]], ids="+".join)
def test_nothing_syncs_between_the_first_transformer_call_and_the_first_decoded_tile(pipe, passes):
    with h3opt.optimize(pipe, passes=passes):
        expected = tiny_call(pipe)  # captures graphs, compiles kernels, probes
        assert_same(expected, call_without_syncs(pipe))


@pytest.mark.parametrize("passes", [[], ["timestep_plan"]], ids=["none", "timestep_plan"])
def test_the_unmodified_loop_syncs(pipe, passes):
    with h3opt.optimize(pipe, passes=passes):
        tiny_call(pipe)
        with pytest.raises(RuntimeError, match="synchroniz"):
            call_without_syncs(pipe)


def test_the_plan_is_made_with_one_copy_each_way(pipe):
    """One copy of the row indices to the host; then one of float32 and one of int64 to the device."""

    def copies(passes):
        found = []

        def profiled(proceed, components, state):
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                result = proceed(components, state)
                torch.cuda.synchronize()
            kinds = {event.key: event.count for event in profile.key_averages() if event.key.startswith("Memcpy")}
            found.append([sum(n for key, n in kinds.items() if way in key) for way in ("DtoH", "HtoD")])
            return result

        with h3opt.optimize(pipe, passes=passes), ExitStack() as undo:
            for step in find_steps(pipe, SET_TIMESTEPS_STEP):
                wrap_step(step, profiled, undo)
            tiny_call(pipe)
        return found[0]

    assert copies(["timestep_plan"]) == [1, 2]
    to_host, to_device = copies([])
    assert to_host >= 9 and to_device >= 8  # three steps


# --- streams -----------------------------------------------------------------------------------------------------


def late(proceed, *args, **kwargs):
    torch.cuda._sleep(LATE)
    return proceed(*args, **kwargs)


def late_result(proceed, *args, **kwargs):
    result = proceed(*args, **kwargs)
    torch.cuda._sleep(LATE)
    return result


@pytest.mark.parametrize("others", [[], LOOP, [*LOOP, "audio_direct_depthwise"]], ids=["alone", "loop", "direct"])
@pytest.mark.parametrize("slow", ["nothing", "latents", "audio", "audio result", "video"])
def test_whichever_stream_is_late_the_bits_are_the_same(pipe, slow, others):
    with h3opt.optimize(pipe, passes=others):
        expected = tiny_call(pipe)
    with h3opt.optimize(pipe, passes=["audio_overlap", *others]), ExitStack() as undo:
        if slow == "latents":
            wrap_calls(pipe.transformer, late_result, undo)
        elif slow == "audio":
            wrap_calls(pipe.audio_vae.decoder, late, undo)
        elif slow == "audio result":
            wrap_calls(pipe.audio_vae.decoder, late_result, undo)
        elif slow == "video":
            wrap_calls(pipe.vae.decoder, late, undo)
        for _ in range(3):
            found = tiny_call(pipe)
            # what comes after the audio step may write into memory that the audio decode has freed
            churn = [torch.full((2, 1, 165_600), float("nan"), device="cuda") for _ in range(8)]
            assert_same(expected, found)
            del churn


def test_sound_decodes_on_a_stream_of_its_own(pipe):
    streams = {}

    def note(kind):
        def call(proceed, *args, **kwargs):
            streams.setdefault(kind, torch.cuda.current_stream())
            return proceed(*args, **kwargs)

        return call

    with h3opt.optimize(pipe, passes=["audio_overlap"]), ExitStack() as undo:
        wrap_calls(pipe.vae.decoder, note("video"), undo)
        wrap_calls(pipe.audio_vae.decoder, note("audio"), undo)
        tiny_call(pipe)
        assert list(streams) == ["audio", "video"]
        assert streams["video"] == torch.cuda.current_stream() != streams["audio"]


@pytest.mark.parametrize("component", ["vae", "audio_vae"])
def test_a_decode_that_fails_in_flight_says_so_and_the_next_generation_is_right(pipe, unmodified, component):
    def fail(proceed, *args, **kwargs):
        torch.cuda._sleep(LATE)
        proceed(*args, **kwargs)
        raise FloatingPointError("in flight")

    with h3opt.optimize(pipe, passes=EXACT):
        with ExitStack() as undo:
            wrap_calls(getattr(pipe, component).decoder, fail, undo)
            with pytest.raises(FloatingPointError, match="in flight"):
                tiny_call(pipe)
        assert_same(unmodified, tiny_call(pipe))
    assert_same(unmodified, tiny_call(pipe))


# --- audio decode ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_direct_activations_keep_the_promise_and_their_kernels_run(pipe):
    latents = torch.randn(2, 32, 207, generator=torch.Generator().manual_seed(0)).cuda()
    expected = pipe.audio_vae.decode(latents, return_dict=False)[0]
    with h3opt.optimize(pipe, passes=["audio_direct_depthwise"]) as opt:
        promise = opt.report["audio_direct_depthwise"].promise
        found = pipe.audio_vae.decode(latents, return_dict=False)[0]
        assert (audio_snr_db(expected.transpose(0, 1), found.transpose(0, 1)) >= promise.audio_snr_db).all()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            pipe.audio_vae.decode(latents, return_dict=False)
            torch.cuda.synchronize()
        ran = {event.key: event.count for event in profile.key_averages()}
    activations = sum(isinstance(one, MiniMaxH3AudioActivation1d) for one in pipe.audio_vae.decoder.modules())
    assert [ran.get(kernel_names[name]) for name in ("upsample_snake", "downsample")] == [activations] * 2
    assert not [key for key in ran if "weight_norm" in key or "replication_pad" in key], ran
    assert bits_equal(expected, pipe.audio_vae.decode(latents, return_dict=False)[0])
