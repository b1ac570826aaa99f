"""`timestep_plan` and `deferred_sync`: what the host waits for, seen on a pretended GPU, and the same bits.

On fake tensors that claim to be on a CUDA device every read of a device value raises by itself, and a copy between
host and device that would block is seen by a dispatch mode: the loop and the decoders run through without a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from conftest import build
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from h3opt import optimize
from h3opt.errors import ShortfallError
from h3opt.metrics.bits import bits_equal
from h3opt.pass_api.base import Pass
from h3opt.pass_api.registry import make_pass
from h3opt.passes.deferred_sync import DeferredSync, QueuedConstants
from h3opt.pipeline.generation import GenerationSettings, generate
from h3opt.pipeline.steps import find_loops, find_steps, wrap_step
from h3opt.pipeline.view import PipelineView

CUDA = torch.device("cuda", 0)
PLAN = ("timesteps", "audio_timesteps", "row_timestep_plan")


class BlockingCopies(TorchDispatchMode):
    """Counts the copies between host and device that the host waits for, and lets copies be queued."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.queued = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        source = args[1] if function is torch.ops.aten.copy_.default else next(iter(args), None)
        if isinstance(source, torch.Tensor) and isinstance(out, torch.Tensor) and source.device != out.device:
            if (kwargs or {}).get("non_blocking") or (len(args) > 2 and args[2] is True):
                self.queued += 1
            else:
                self.found.append(f"{function} {source.device} -> {out.device}")
        return out


class Stop(Exception):
    pass


def state_before_the_loop(pipe: Any) -> PipelineState:
    seen: list[PipelineState] = []

    def stop(proceed: Any, components: Any, state: Any) -> Any:
        seen.append(state)
        raise Stop

    with ExitStack() as undo:
        view = PipelineView.of(pipe)
        for loop in find_loops(view.pipe):
            wrap_step(loop, stop, undo)
        with pytest.raises(Stop):
            generate(pipe, GenerationSettings(num_inference_steps=3))
    return seen[0]


def running_on(pipe: Any, device: torch.device) -> type:
    return type("Pretended", (type(pipe),), {"_execution_device": device})


class PretendedGpu:
    """The loop and the decode steps of a tiny pipeline whose tensors claim to be on a GPU."""

    def __init__(self) -> None:
        self.pipe = build()
        self.state = state_before_the_loop(self.pipe)
        self.fake = FakeTensorMode()
        for component in (self.pipe.transformer, self.pipe.vae, self.pipe.audio_vae):
            for module in component.modules():
                for held in (module._parameters, module._buffers, module.__dict__):
                    for name, tensor in held.items():
                        if isinstance(tensor, torch.Tensor):
                            held[name] = self.move(tensor)
        for one in (self.pipe.scheduler, self.pipe.audio_scheduler):
            one.sigmas = self.move(one.sigmas)
        values = {name: self.move(value) for name, value in self.state.values.items()}
        self.state = PipelineState(values, self.state.kwargs_mapping)
        self.pipe.scheduler.timesteps = self.state.get("timesteps")
        self.pipe.audio_scheduler.timesteps = self.state.get("audio_timesteps")
        self.pipe.__class__ = running_on(self.pipe, CUDA)

    def move(self, value: Any) -> Any:
        """Replace all tensors in lists and tuples."""
        return tree_map_only(torch.Tensor, self.move_tensor, value)

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.fake:
            moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
        return torch.nn.Parameter(moved, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else moved

    def run(self, *passes: Pass) -> BlockingCopies:
        copies = BlockingCopies()
        state = PipelineState(dict(self.state.values), self.state.kwargs_mapping)
        for scheduler in (self.pipe.scheduler, self.pipe.audio_scheduler):
            scheduler._step_index = None
        view = PipelineView.of(self.pipe)
        tail = [loop for loop in find_loops(view.pipe) if type(loop).__name__ == "MiniMaxH3DenoiseStep"][:1]
        tail += find_steps(view.pipe, "MiniMaxH3AfterDenoiseStep")[:1]
        tail += find_steps(view.pipe, "MiniMaxH3VideoDecodeStep", "MiniMaxH3AudioDecodeStep")
        with ExitStack() as undo:
            for one in passes:
                one.install(view, undo)
            with self.fake, copies:
                for step in tail:
                    step(self.pipe, state)
        assert state.get("videos").device == CUDA and state.get("audio").device == CUDA
        return copies


@pytest.fixture(scope="module")
def gpu() -> PretendedGpu:
    return PretendedGpu()


@pytest.mark.parametrize("others", [(), ("hoist_step_invariants", "tile_batch")])
def test_nothing_waits_between_the_first_transformer_call_and_the_media(gpu: PretendedGpu, others: Any) -> None:
    copies = gpu.run(make_pass("deferred_sync"), *map(make_pass, others))
    assert copies.found == []
    assert copies.queued == 6, "the constants of both decode steps still reach the device"


def test_the_unmodified_loop_does_wait(gpu: PretendedGpu) -> None:
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        gpu.run()


def test_the_unmodified_constants_are_waited_for(gpu: PretendedGpu) -> None:
    class Blocking(QueuedConstants):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    class LoopOnly(DeferredSync):
        def constants(self) -> QueuedConstants:
            return Blocking()

    assert len(gpu.run(LoopOnly()).found) == 6


# --- the schedule ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned() -> tuple[Any, PipelineState]:
    """A pipeline, and the state its step that makes the schedule was called with and has filled."""
    pipe = build()
    return pipe, state_before_the_loop(pipe)


def plan(pipe: Any, state: PipelineState, passes: tuple[str, ...] = (), **inputs: Any) -> dict[str, Any]:
    view = PipelineView.of(pipe)
    own = PipelineState({**state.values, **inputs}, state.kwargs_mapping)
    with ExitStack() as undo:
        for name in passes:
            make_pass(name).install(view, undo)
        find_steps(view.pipe, "MiniMaxH3SetTimestepsStep")[0](pipe, own)
    schedulers = {"video": pipe.scheduler.sigmas, "audio": pipe.audio_scheduler.sigmas}
    assert own.get("timesteps") is pipe.scheduler.timesteps
    assert own.get("audio_timesteps") is pipe.audio_scheduler.timesteps
    assert {name for name in state.values if own.get(name) is not state.get(name)} <= {*PLAN, *inputs}
    return {**{name: own.get(name) for name in PLAN}, **schedulers}


@pytest.mark.parametrize("conditioned", [{}, {"num_condition_video_rows": 5, "num_condition_audio_rows": 2}])
@pytest.mark.parametrize("steps", [2, 3, 50])
def test_the_plan_is_the_unmodified_one(planned: Any, steps: int, conditioned: dict[str, int]) -> None:
    pipe, state = planned
    inputs = {"num_inference_steps": steps, **conditioned}
    expected, found = plan(pipe, state, (), **inputs), plan(pipe, state, ("timestep_plan",), **inputs)
    assert [len(step) for step in found["row_timestep_plan"]] == [2] * (steps - 1)
    for name in expected:
        pairs = list(zip(tree_leaves(expected[name]), tree_leaves(found[name]), strict=True))
        assert all(bits_equal(left, right) for left, right in pairs), name
        assert len({tensor.untyped_storage().data_ptr() for _, tensor in pairs}) == len(pairs)


def test_the_plan_reaches_the_device_in_one_copy_per_dtype(planned: Any) -> None:
    pipe, state = planned
    original = type(pipe)
    pipe.__class__ = running_on(pipe, torch.device("meta"))
    try:
        with BlockingCopies() as copies:
            found = plan(pipe, state, ("timestep_plan",), num_inference_steps=20)
    finally:
        pipe.__class__ = original
    assert copies.found == [] and copies.queued == 2
    assert all(tensor.is_meta for value in found.values() for tensor in tree_leaves(value))


def test_a_schedule_that_cannot_be_made_fails_as_before_and_the_next_one_is_made(planned: Any) -> None:
    pipe, state = planned
    with pytest.raises(ValueError, match="num_inference_steps"):
        plan(pipe, state, ("timestep_plan",), num_inference_steps=1)
    plan(pipe, state, ("timestep_plan",), num_inference_steps=3)


# --- the loop ----------------------------------------------------------------------------------------------------


def loop(pipe: Any, state: PipelineState, passes: tuple[str, ...], **inputs: Any) -> torch.Tensor:
    view = PipelineView.of(pipe)
    own = PipelineState({**state.values, **inputs}, state.kwargs_mapping)
    own.set("latents", own.get("latents").clone())
    own.set("audio_latents", own.get("audio_latents").clone())
    pipe.scheduler._step_index = pipe.audio_scheduler._step_index = None
    with ExitStack() as undo:
        for name in passes:
            make_pass(name).install(view, undo)
        next(one for one in find_loops(view.pipe) if type(one).__name__ == "MiniMaxH3DenoiseStep")(pipe, own)
    return own.get("latents")


def test_timesteps_that_are_not_the_schedulers_own_are_still_searched(planned: Any) -> None:
    pipe, state = planned
    own = plan(pipe, state, (), num_inference_steps=4)
    late = {
        "timesteps": own["timesteps"][1:],
        "audio_timesteps": own["audio_timesteps"][1:],
        "row_timestep_plan": own["row_timestep_plan"][1:],
    }
    whole = {name: own[name] for name in PLAN}
    for inputs in (whole, late):
        assert bits_equal(loop(pipe, state, (), **inputs), loop(pipe, state, ("deferred_sync",), **inputs))
        assert pipe.scheduler.begin_index is None
    assert not bits_equal(loop(pipe, state, (), **whole), loop(pipe, state, (), **late))


def test_a_begin_that_the_user_set_is_left_alone(planned: Any) -> None:
    pipe, state = planned
    plan(pipe, state, (), num_inference_steps=4)
    pipe.scheduler.set_begin_index(1)
    whole = {name: getattr(pipe.scheduler, name) for name in ("timesteps",)}
    with ExitStack() as undo:
        view = PipelineView.of(pipe)
        make_pass("deferred_sync").install(view, undo)
        own = PipelineState({**state.values, **whole}, state.kwargs_mapping)
        seen: list[Any] = []
        wanted = next(one for one in find_loops(view.pipe) if type(one).__name__ == "MiniMaxH3DenoiseStep")
        wrap_step(wanted, lambda *_: seen.append(pipe.scheduler.begin_index), undo, innermost=True)
        wanted(pipe, own)
    assert seen == [1] and pipe.scheduler.begin_index == 1
    pipe.scheduler.set_begin_index(None)


# --- whole generations -------------------------------------------------------------------------------------------


def test_with_both_and_the_passes_that_read_the_plan_a_generation_has_the_unmodified_bits() -> None:
    pipe = build()
    clip = GenerationSettings(num_inference_steps=3)
    expected = generate(pipe, clip)
    names = ["timestep_plan", "deferred_sync", "modulation_table"]
    with optimize(pipe, names, profile="cpu") as opt:
        found = generate(pipe, clip)
        assert all(opt.report[name].matched == opt.report[name].expected > 0 for name in names)
    assert bits_equal(expected.video, found.video) and bits_equal(expected.audio, found.audio)


@pytest.mark.slow
@pytest.mark.parametrize("frames", [124, 141])
@pytest.mark.parametrize(("height", "width"), [(64, 96), (64, 288), (288, 288)])
def test_untiled_and_tiled_the_bits_are_the_unmodified_ones(height: int, width: int, frames: int) -> None:
    pipe = build()
    clip = GenerationSettings(height=height, width=width, num_frames=frames, num_inference_steps=3)
    expected = generate(pipe, clip)
    names = ["timestep_plan", "deferred_sync", "audio_overlap"]
    with optimize(pipe, names, profile="cpu"):
        found = generate(pipe, clip)
    assert bits_equal(expected.video, found.video) and bits_equal(expected.audio, found.audio)


@pytest.mark.parametrize(
    ("name", "step"),
    [("timestep_plan", "MiniMaxH3SetTimestepsStep"), ("deferred_sync", "MiniMaxH3AudioDecodeStep")],
)
def test_a_step_of_a_class_it_does_not_know_is_a_shortfall(planned: Any, name: str, step: str) -> None:
    found = find_steps(planned[0], step)[0]
    original = type(found)
    found.__class__ = type("MyOwnStep", (original,), {})
    try:
        with pytest.raises(ShortfallError, match=name):
            optimize(planned[0], [name], profile="cpu")
    finally:
        found.__class__ = original


@pytest.mark.parametrize("name", ["timestep_plan", "deferred_sync"])
def test_a_bare_model_declines(planned: Any, name: str) -> None:
    with optimize(planned[0].vae, [name], profile="cpu") as opt:
        assert "no pipeline" in opt.report[name].declined
