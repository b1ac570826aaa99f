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
        """Find the components of a pipeline, or take a single model.

        Raises:
            PipelineError: nothing in it is a MiniMax-H3 component.
        """
        components = getattr(target, "components", None)
        is_pipeline = isinstance(components, dict)
        candidates = list(components.values()) if isinstance(components, dict) else [target]
        known: dict[str, Any] = {}
        for name, component_class in minimax_h3.component_classes().items():
            for candidate in candidates:
                if isinstance(candidate, component_class):
                    known.setdefault(name, candidate)
        if not known:
            raise PipelineError(
                f"{type(target).__name__} has no component h3opt knows. Pass a diffusers MiniMax-H3 pipeline with its "
                "components loaded (pipe.load_components()), its transformer, or one of its VAEs."
            )
        return cls(pipe=target if is_pipeline else None, scope=scope, restorable=restorable, **known)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The known components that are present."""
        return [module for module in (self.transformer, self.vae, self.audio_vae) if module is not None]

    @property
    def device(self) -> Device:
        """The device that the components are on."""
        return Device.of(next(self.modules[0].parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the components were loaded as; modules that diffusers keeps in float32 do not count."""
        first: Any = self.modules[0]
        dtype: torch.dtype = first.dtype
        return dtype

    def regions(self) -> list[Region]:
        """What to capture: each repeated block class once, or the transformer as a whole with ``scope="model"``."""
        return minimax_h3.regions(self.transformer, self.vae, self.scope)
