"""Pipeline steps are found by class and by output, wrapped in order, and given back as they were."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from h3opt.pipeline.minimax_h3 import AUDIO_DECODE_STEP, LOOP_SCHEDULER_STEP, SET_TIMESTEPS_STEP, VIDEO_DECODE_STEP
from h3opt.pipeline.steps import (
    Overlay,
    after_step,
    components_on,
    copy_state,
    execution_device,
    find_loops,
    find_steps,
    find_steps_making,
    hide_progress_bars,
    wrap_step,
)


class Double:
    """A step that doubles the state's number."""

    def __call__(self, components: Any, state: Any, **loop: Any) -> Any:
        state.number = 2 * state.number + loop.get("i", 0)
        return components, state


def pipeline_of(*steps: Any) -> Any:
    return SimpleNamespace(_blocks=SimpleNamespace(sub_blocks={str(number): step for number, step in enumerate(steps)}))


def run(step: Any, number: int = 1, **loop: Any) -> int:
    state = SimpleNamespace(number=number)
    step("components", state, **loop)
    return state.number


def adding(amount: int) -> Any:
    def wrapper(proceed: Any, components: Any, state: Any, **loop: Any) -> Any:
        state.number += amount
        return proceed(components, state, **loop)

    return wrapper


def times(factor: int) -> Any:
    def wrapper(proceed: Any, components: Any, state: Any, **loop: Any) -> Any:
        state.number *= factor
        return proceed(components, state, **loop)

    return wrapper


def test_wrappers_run_from_the_outermost_and_get_the_loops_variables() -> None:
    step = Double()
    with ExitStack() as undo:
        wrap_step(step, adding(1), undo)
        wrap_step(step, times(10), undo)
        wrap_step(step, times(100), undo, innermost=True)
        assert run(step, 2, i=7) == 2 * ((2 * 10 + 1) * 100) + 7
    assert run(step, 2) == 4 and type(step) is Double


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_step_has_its_class_back_after_the_last_wrapper_in_any_order(order: tuple[int, int]) -> None:
    step, other, stacks = Double(), Double(), [ExitStack(), ExitStack()]
    for stack, amount in zip(stacks, (1, 10), strict=True):
        wrap_step(step, adding(amount), stack)
    assert type(step) is not Double and type(step).__name__ == "Double" and type(other) is Double
    stacks[order[0]].close()
    assert run(step) == 2 * (1 + (1, 10)[order[1]])
    stacks[order[1]].close()
    assert type(step) is Double


def test_an_action_runs_after_each_step_of_a_class_and_a_bare_model_has_no_steps() -> None:
    first, second, seen = Double(), Double(), []  # type: ignore[var-annotated]
    with ExitStack() as undo:
        assert after_step(pipeline_of(first, second), "Double", lambda state: seen.append(state.number), undo) == 2
        assert after_step(None, "Double", lambda state: seen.append(state.number), undo) == 0
        run(first, 3)
        run(second, 4)
    run(first, 5)
    assert seen == [6, 8]
    assert find_steps(None, "Double") == find_steps_making(None, "videos") == find_loops(None) == []


def test_the_steps_of_the_pipeline_are_found_in_running_order(pipe: Any) -> None:
    decode_steps = find_steps(pipe, AUDIO_DECODE_STEP, VIDEO_DECODE_STEP)
    assert [type(step).__name__ for step in decode_steps[:2]] == [VIDEO_DECODE_STEP, AUDIO_DECODE_STEP]
    assert find_steps_making(pipe, "videos", "audio") == decode_steps
    assert len(find_loops(pipe)) == len(find_steps(pipe, SET_TIMESTEPS_STEP)) > 0
    assert len(find_steps(pipe, LOOP_SCHEDULER_STEP)) == len(find_loops(pipe))


def test_progress_bars_of_inner_steps_are_hidden_and_come_back(pipe: Any) -> None:
    loops = find_loops(pipe)
    before = [dict(getattr(loop, "_progress_bar_config", None) or {}) for loop in loops]
    with ExitStack() as undo:
        hide_progress_bars(pipe, undo)
        assert all(loop._progress_bar_config["disable"] for loop in loops)
    assert [dict(loop._progress_bar_config) for loop in loops] == before


def test_a_copied_state_does_not_write_through() -> None:
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    state = PipelineState({"kept": 1, "replaced": 2})
    copied = copy_state(state, replaced=3)
    copied.set("kept", 4)
    assert (state.get("kept"), state.get("replaced"), copied.get("replaced")) == (1, 2, 3)


def test_an_overlay_replaces_attributes_for_its_reader_alone() -> None:
    below = SimpleNamespace(kept=1, replaced=2, _execution_device="cuda")
    overlay = Overlay(below, replaced=3)
    assert (overlay.kept, overlay.replaced, below.replaced) == (1, 3, 2)
    assert execution_device(components_on(below, "cpu")) == "cpu" and execution_device(below) == "cuda"
