"""``h3opt demo``: the small trained reference pipeline unmodified and optimized, compared and written to disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from h3opt.errors import PipelineError
from h3opt.files import partial_of
from h3opt.pipeline.generation import GenerationSettings, reference_pipeline
from h3opt.profiles.selection import load_profile
from h3opt.render.media import write_frame_strip, write_mp4
from h3opt.verification.verify.verify import Progress, Verdict, verify


def run_demo(
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    profile: str = "auto",
    device: str = "cpu",
    settings: GenerationSettings | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Verify the trained reference and write ``reference.mp4``, ``optimized.mp4``, ``frames.png`` and ``report.json``.

    Args:
        out: directory; made if missing.
        dtype, device: of the pipeline.
        profile: which passes, see :func:`h3opt.optimize`.
        settings: what to generate.
        progress: told before each generation.

    Raises:
        PipelineError: a file cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipelineError(f"{out} cannot be made: {error.strerror}. Give another directory.") from error
    if profile != "auto":
        load_profile(profile)  # a wrong one is said before anything is built
    pipe = reference_pipeline(dtype=dtype, device=device)
    calibrated = device == "cpu" and (settings or GenerationSettings()) == GenerationSettings()
    verdict = verify(pipe, profile=profile, settings=settings, on_reference=calibrated, progress=progress)
    for name, media in (("reference", verdict.reference), ("optimized", verdict.optimized)):
        write_mp4(out / f"{name}.mp4", media.video, media.audio, media.sampling_rate)
    strip = {"unmodified": verdict.reference.video, "optimized": verdict.optimized.video}
    write_frame_strip(out / "frames.png", strip)
    write_json(out / "report.json", verdict.to_dict())
    return verdict


def write_json(path: Path, data: Mapping[str, Any] | list[Any]) -> None:
    """Write JSON whole or not at all; a device or a pipe is written to as it is.

    Raises:
        PipelineError: the file cannot be written.
    """
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text whole or not at all; a device or a pipe is written to as it is.

    Raises:
        PipelineError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")  # a device or a pipe: a file must not take its place
            return
        with partial_of(path) as partial:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    except OSError as error:
        raise PipelineError(f"{path} cannot be written: {error.strerror}. Give another path.") from error
