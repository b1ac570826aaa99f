"""Which parts of a MiniMax-H3 pipeline h3opt knows, and how each is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

from h3opt.device import Device
from h3opt.errors import PipelineError
from h3opt.pipeline.region import Region

StepWrapper = Callable[..., Any]
"""See :meth:`PipelineView.around_step`."""


_BATCH, _TOKENS, _ROWS = 0, 1, 0  # dimensions of [batch, tokens, channels] and [rows, ...]


@dataclass(frozen=True, eq=False)
class PipelineView:
    """The components of one pipeline that passes may touch; any of them may be missing.

    Attributes:
        pipe: the pipeline, or ``None`` when a bare model was given.
        transformer: the denoiser.
        vae: the video autoencoder.
        audio_vae: the audio autoencoder.
        scope: what one captured graph spans, ``"block"`` or ``"model"``.
        restorable: whether passes must keep what they replace, to put it back.
    """

    # Any: diffusers' top level has only stand-ins for a type checker to see
    pipe: Any = None
    transformer: Any = None
    vae: Any = None
    audio_vae: Any = None
    scope: str = "block"
    restorable: bool = True

    @classmethod
    def of(cls, target: Any, scope: str = "block", restorable: bool = True) -> PipelineView:
        """Look into a pipeline or a single model.

        Raises:
            PipelineError: nothing in it is a MiniMax-H3 component.
        """
        kinds = {
            "transformer": MiniMaxH3Transformer3DModel,
            "vae": AutoencoderKLMiniMaxH3,
            "audio_vae": AutoencoderKLMiniMaxH3Audio,
        }
        components = getattr(target, "components", None)
        pipe = target if isinstance(components, dict) else None
        candidates = list(components.values()) if isinstance(components, dict) else [target]
        found: dict[str, Any] = {}
        for name, kind in kinds.items():
            for candidate in candidates:
                if isinstance(candidate, kind):
                    found.setdefault(name, candidate)
        if not found:
            raise PipelineError(
                f"{type(target).__name__} has no component h3opt knows. Pass a diffusers MiniMax-H3 pipeline with its "
                "components loaded (pipe.load_components()), its transformer, or one of its VAEs."
            )
        return cls(pipe=pipe, scope=scope, restorable=restorable, **found)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The known components that are present."""
        return [module for module in (self.transformer, self.vae, self.audio_vae) if module is not None]

    @property
    def device(self) -> Device:
        """Where the components are."""
        return Device.of(next(self.modules[0].parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """What the components were loaded as; modules that diffusers keeps in float32 do not count."""
        first: Any = self.modules[0]
        found: torch.dtype = first.dtype
        return found

    def regions(self) -> list[Region]:
        """What to capture: each repeated block class once, or the transformer as a whole with ``scope="model"``."""
        regions = []
        if self.transformer is not None:
            transformer = self.transformer
            if self.scope == "model":
                regions.append(
                    Region(
                        "transformer",
                        [transformer],
                        {
                            "hidden_states": (_BATCH, _TOKENS),
                            "audio_hidden_states": (_BATCH, _TOKENS),
                            "encoder_hidden_states": (_BATCH, _TOKENS),
                            "timestep": (_ROWS,),
                            "timestep_indices": (_ROWS,),
                            "token_tags": (_ROWS,),
                            "position_ids": (_ROWS,),
                            "video_indices": (_ROWS,),
                            "audio_indices": (_ROWS,),
                            "text_indices": (_ROWS,),
                        },
                        {
                            "transformer.block": len(transformer.transformer_blocks),
                            "transformer.refiner": len(transformer.token_refiner.refiner_blocks),
                            "transformer.head": 1,
                        },
                    )
                )
            else:
                regions.append(
                    Region(
                        "transformer.block",
                        list(transformer.transformer_blocks),
                        {
                            "hidden_states": (_BATCH, _TOKENS),
                            "temb": (_ROWS,),
                            "adaln_indices": (_ROWS,),
                            "rotary_emb": (_ROWS,),
                        },
                    )
                )
                regions.append(
                    Region(
                        "transformer.refiner",
                        list(transformer.token_refiner.refiner_blocks),
                        {"hidden_states": (_BATCH, _TOKENS)},
                    )
                )
        if self.vae is not None:
            regions.append(
                Region(
                    "vae.block",
                    list(self.vae.decoder.transformer_blocks),
                    {"hidden_states": (_BATCH, _TOKENS), "rotary_emb": (_BATCH, _TOKENS)},
                )
            )
        return [region for region in regions if region.modules]

    def steps(self, *names: str) -> list[Any]:
        """The pipeline's steps whose class has one of these names, in running order; none for a bare model."""
        return [block for block in self._all_steps() if type(block).__name__ in names]

    def steps_making(self, *outputs: str) -> list[Any]:
        """The pipeline's innermost steps, of any class, that leave one of these values in its state."""
        innermost = [block for block in self._all_steps() if not getattr(block, "sub_blocks", None)]
        return [step for step in innermost if set(outputs).intersection(step.intermediate_output_names)]

    def loops(self) -> list[Any]:
        """The pipeline's denoising loops, one per workflow; none for a bare model."""
        return [block for block in self._all_steps() if isinstance(block, LoopSequentialPipelineBlocks)]

    def around_step(self, step: Any, wrapper: StepWrapper, undo: ExitStack, innermost: bool = False) -> None:
        """Send runs of one pipeline step through ``wrapper``, outside those already there (or inside them all).

        Args:
            step: one of :meth:`steps`.
            wrapper: called as ``wrapper(proceed, components, state, **loop)``; ``proceed``, called alike, goes on to
                the step. Both return ``(components, state)``. ``loop`` has the variables of a loop the step is in.
            undo: takes the wrapper off; wrappers may be taken off in any order.
            innermost: put the wrapper next to the step.
        """
        if "_wrappers" not in vars(type(step)):
            _make_wrappable(step)
        wrappers: list[StepWrapper] = type(step)._wrappers
        wrappers.insert(0 if innermost else len(wrappers), wrapper)

        def remove() -> None:
            wrappers.remove(wrapper)
            if not wrappers:
                step.__class__ = type(step).__base__

        undo.callback(remove)

    def after_step(self, step: str, action: Callable[[Any], None], undo: ExitStack) -> int:
        """Call ``action(state)`` after every run of the pipeline step whose class is called ``step``.

        Args:
            step: e.g. ``"MiniMaxH3SetTimestepsStep"``.
            action: gets the pipeline state the step left; from a step of the denoising loop, the loop's block state.
            undo: takes the call back.

        Returns:
            How many such steps the pipeline has; 0 for a bare model.
        """

        def call(proceed: Any, components: Any, state: Any, **loop: Any) -> Any:
            components, state = proceed(components, state, **loop)
            action(state)
            return components, state

        steps = self.steps(step)
        for block in steps:
            self.around_step(block, call, undo)
        return len(steps)

    def hide_step_bars(self, undo: ExitStack) -> None:
        """Switch diffusers' own progress bars off, wherever they are; ``undo`` brings them back.

        The pipeline's ``set_progress_bar_config`` reaches its outermost blocks alone, and the loop is further in.
        """
        for block in self._all_steps():
            if hasattr(block, "set_progress_bar_config"):
                before = dict(getattr(block, "_progress_bar_config", None) or {})
                undo.callback(block.set_progress_bar_config, **before)
                block.set_progress_bar_config(**{**before, "disable": True})

    def _all_steps(self) -> Iterator[Any]:
        return _blocks(self.pipe._blocks) if self.pipe is not None else iter(())


def _make_wrappable(step: Any) -> None:
    """Give a step a class of its own, of the same name, whose calls go through a list of wrappers."""
    original = type(step)
    wrappers: list[StepWrapper] = []

    def call(self: Any, components: Any, state: Any, **loop: Any) -> Any:  # steps inside a loop get its variables
        def at(depth: int, components: Any, state: Any, **loop: Any) -> Any:
            if depth == 0:
                return original.__call__(self, components, state, **loop)
            return wrappers[depth - 1](lambda c, s, **v: at(depth - 1, c, s, **v), components, state, **loop)

        return at(len(wrappers), components, state, **loop)

    body = {"__call__": call, "__module__": original.__module__, "_wrappers": wrappers}
    step.__class__ = type(original.__name__, (original,), body)


def _blocks(block: Any) -> Iterator[Any]:
    yield block
    for inner in getattr(block, "sub_blocks", {}).values():
        yield from _blocks(inner)
