"""The components of a pipeline that h3opt may change, and the regions that are captured from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from h3opt.device import Device
from h3opt.errors import PipelineError
from h3opt.pipeline import minimax_h3
from h3opt.pipeline.region import Region


@dataclass(frozen=True, eq=False)
class PipelineView:
    """The components of one pipeline that passes may change; any of them may be missing.

    Attributes:
        pipe: the pipeline, or ``None`` when a bare model was given. :mod:`h3opt.pipeline.steps` finds its steps.
        transformer: the denoiser.
        vae: the video autoencoder.
        audio_vae: the audio autoencoder.
        transformer_ref: the denoiser of runs with references, where it is another than ``transformer``; passes see it
            as the transformer of a view of its own, see :attr:`views`.
        scope: what one captured graph spans, ``"block"`` or ``"model"``.
        restorable: whether passes must keep what they replace, to put it back.
    """

    # Any: diffusers' top level has only stand-ins for a type checker to see
    pipe: Any = None
    transformer: Any = None
    vae: Any = None
    audio_vae: Any = None
    transformer_ref: Any = None
    scope: str = "block"
    restorable: bool = True

    @classmethod
    def of(cls, target: Any, scope: str = "block", restorable: bool = True) -> PipelineView:
        """Find the components of a pipeline, or take a single model.

        Raises:
            PipelineError: nothing in it is a MiniMax-H3 component, or two components could be meant.
        """
        components = getattr(target, "components", None)
        is_pipeline = isinstance(components, dict)
        named: dict[str, Any] = components if isinstance(components, dict) else {"": target}
        known: dict[str, Any] = {}
        for name, component_class in minimax_h3.component_classes().items():
            candidates = {key: item for key, item in named.items() if isinstance(item, component_class)}
            second = candidates.pop(minimax_h3.SECOND_TRANSFORMER, None) if name == "transformer" else None
            if len({id(item) for item in candidates.values()}) > 1:
                raise PipelineError(
                    f"{type(target).__name__} has several components that can be the {name}: {', '.join(candidates)}. "
                    f"Keep one of them, or optimize them one by one: h3opt.optimize(pipe.{next(iter(candidates))})."
                )
            known.update((name, item) for item in candidates.values())
            if second is not None and known.setdefault(name, second) is not second:
                known[minimax_h3.SECOND_TRANSFORMER] = second
        if not known:
            raise PipelineError(
                f"{type(target).__name__} has no component h3opt knows. Pass a diffusers MiniMax-H3 pipeline with its "
                "components loaded (pipe.load_components()), its transformer, or one of its VAEs."
            )
        return cls(pipe=target if is_pipeline else None, scope=scope, restorable=restorable, **known)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The known components that are present."""
        known = (self.transformer, self.vae, self.audio_vae, self.transformer_ref)
        return [module for module in known if module is not None]

    @property
    def views(self) -> list[PipelineView]:
        """This view, and a view of ``transformer_ref`` alone if there is one: passes are installed in each."""
        if self.transformer_ref is None:
            return [self]
        return [self, PipelineView(transformer=self.transformer_ref, scope=self.scope, restorable=self.restorable)]

    @property
    def weights_device(self) -> torch.device:
        """The device that the weights are on.

        Raises:
            PipelineError: there are no weights on a device: they are offloaded, or were never loaded.
        """
        for module in self.modules:
            if any(parameter.is_meta for parameter in module.parameters()):
                raise PipelineError(
                    f"Weights of {type(module).__name__} are on the meta device, so there is nothing to optimize: "
                    "cpu_offload() of accelerate keeps them elsewhere between calls, or they were never loaded. Call "
                    "accelerate.hooks.remove_hook_from_module(model, recurse=True) or load the weights, and optimize "
                    "then."
                )
        return next(self.modules[0].parameters()).device

    @property
    def device(self) -> Device:
        """The device that the components are on; see :attr:`weights_device`."""
        return Device.of(self.weights_device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the components were loaded as; modules that diffusers keeps in float32 do not count."""
        first: Any = self.modules[0]
        dtype: torch.dtype = first.dtype
        return dtype

    def regions(self) -> list[Region]:
        """What to capture: each repeated block class once, or the transformer as a whole with ``scope="model"``."""
        found = minimax_h3.regions(self.transformer, self.vae, self.scope)
        return found + minimax_h3.regions(self.transformer_ref, None, self.scope, minimax_h3.SECOND_TRANSFORMER)
