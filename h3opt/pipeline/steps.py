"""The steps of a modular pipeline: find them, wrap their runs, and run them on other components or states.

A *step* is a block of the pipeline that changes the pipeline's state. Functions that take ``pipe`` find nothing in
``None``, which stands for a bare model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from h3opt.pipeline.hooks import Wrapper, WrapperChain


def find_steps(pipe: Any, *class_names: str) -> list[Any]:
    """Return the steps whose class has one of these names, in running order."""
    return [step for step in _all_steps(pipe) if type(step).__name__ in class_names]


def find_steps_making(pipe: Any, *outputs: str) -> list[Any]:
    """Return the innermost steps, of any class, that leave one of these values in the state, in running order."""
    innermost = [step for step in _all_steps(pipe) if not getattr(step, "sub_blocks", None)]
    return [step for step in innermost if set(outputs).intersection(step.intermediate_output_names)]


def find_loops(pipe: Any) -> list[Any]:
    """Return the denoising loops, one per workflow."""
    from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

    return [step for step in _all_steps(pipe) if isinstance(step, LoopSequentialPipelineBlocks)]


def wrap_step(step: Any, wrapper: Wrapper, undo: ExitStack, innermost: bool = False) -> None:
    """Send runs of a step through ``wrapper``, outside the wrappers already there (or inside them all).

    Args:
        step: a step that one of the functions above returned.
        wrapper: called as ``wrapper(proceed, components, state, **loop)``; ``proceed``, called alike, goes on to the
            step. Both return ``(components, state)``. ``loop`` holds the variables of the loop that the step is in.
        undo: takes the wrapper off; wrappers may be taken off in any order.
        innermost: put the wrapper next to the step.
    """
    if "_wrappers" not in vars(type(step)):
        _make_wrappable(step)
    wrappers: WrapperChain = type(step)._wrappers
    wrappers.add(wrapper, innermost)

    def remove() -> None:
        wrappers.remove(wrapper)
        if not wrappers:
            step.__class__ = type(step).__base__

    undo.callback(remove)


def after_step(pipe: Any, class_name: str, action: Callable[[Any], None], undo: ExitStack) -> int:
    """Call ``action(state)`` after every run of the steps whose class is called ``class_name``.

    Args:
        pipe: the pipeline, or ``None``.
        class_name: e.g. :data:`h3opt.pipeline.minimax_h3.SET_TIMESTEPS_STEP`.
        action: gets the pipeline state that the step left; after a step of the denoising loop, the loop's block state.
        undo: takes the call back.

    Returns:
        How many such steps the pipeline has; 0 for a bare model.
    """

    def call(proceed: Any, components: Any, state: Any, **loop: Any) -> Any:
        components, state = proceed(components, state, **loop)
        action(state)
        return components, state

    steps = find_steps(pipe, class_name)
    for step in steps:
        wrap_step(step, call, undo)
    return len(steps)


def hide_progress_bars(pipe: Any, undo: ExitStack) -> None:
    """Switch the progress bars of all steps off; ``undo`` brings them back.

    The pipeline's own ``set_progress_bar_config`` reaches the outermost steps alone, and the loop is further in.
    """
    for step in _all_steps(pipe):
        if hasattr(step, "set_progress_bar_config"):
            before = dict(getattr(step, "_progress_bar_config", None) or {})
            undo.callback(step.set_progress_bar_config, **before)
            step.set_progress_bar_config(**{**before, "disable": True})


def copy_state(state: Any, **values: Any) -> Any:
    """Return a state with the same values and inputs, some ``values`` replaced; writes to it do not reach ``state``."""
    return type(state)({**state.values, **values}, state.kwargs_mapping)


def execution_device(components: Any) -> Any:
    """Return the device on which the pipeline runs."""
    return components._execution_device


class Overlay:
    """An object seen with some attributes replaced, e.g. components as a single step is to see them."""

    def __init__(self, below: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _below=below)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def components_on(components: Any, device: Any) -> Overlay:
    """Return the components as steps see them in a pipeline that runs on ``device``; nothing is moved."""
    return Overlay(components, _execution_device=device)


def _all_steps(pipe: Any) -> Iterator[Any]:
    return _walk(pipe._blocks) if pipe is not None else iter(())


def _walk(step: Any) -> Iterator[Any]:
    yield step
    for inner in getattr(step, "sub_blocks", {}).values():
        yield from _walk(inner)


def _make_wrappable(step: Any) -> None:
    """Give a step a class of its own, with the same name, whose calls go through a chain of wrappers."""
    original = type(step)
    wrappers = WrapperChain()

    def call(self: Any, components: Any, state: Any, **loop: Any) -> Any:
        def run(components: Any, state: Any, **loop: Any) -> Any:
            return original.__call__(self, components, state, **loop)

        return wrappers.call(run, components, state, **loop)

    body = {"__call__": call, "__module__": original.__module__, "_wrappers": wrappers}
    step.__class__ = type(original.__name__, (original,), body)
