"""The unmodified MiniMax-H3 pipeline at a tiny size, its models at full size, real clips, and the weights of LPIPS.

Nothing here imports h3opt's engine: this is what the engine is compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h3opt.reference.full import (
        CANVASES,
        Canvas,
        decode_inputs,
        decode_pipeline,
        full_audio_vae,
        full_inputs,
        full_transformer,
        full_vae,
        parse_canvas,
    )
    from h3opt.reference.natural_clips import ClipsMissingError, load_natural_clips
    from h3opt.reference.tiny import save_tiny, tiny_call, tiny_pipeline
    from h3opt.reference.trained import WeightsError, trained_pipeline

__all__ = [
    "CANVASES",
    "Canvas",
    "ClipsMissingError",
    "WeightsError",
    "decode_inputs",
    "decode_pipeline",
    "full_audio_vae",
    "full_inputs",
    "full_transformer",
    "full_vae",
    "load_natural_clips",
    "parse_canvas",
    "save_tiny",
    "tiny_call",
    "tiny_pipeline",
    "trained_pipeline",
]

_MODULES = {
    "full": (
        "CANVASES",
        "Canvas",
        "decode_inputs",
        "decode_pipeline",
        "full_audio_vae",
        "full_inputs",
        "full_transformer",
        "full_vae",
        "parse_canvas",
    ),
    "natural_clips": ("ClipsMissingError", "load_natural_clips"),
    "tiny": ("save_tiny", "tiny_call", "tiny_pipeline"),
    "trained": ("WeightsError", "trained_pipeline"),
}


def __getattr__(name: str) -> Any:
    # diffusers takes seconds to import, and reading a weights file from this package needs none of it.
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
