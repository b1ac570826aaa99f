"""The work behind ``h3opt demo``: verify the small trained reference and write the clips and the report."""

from __future__ import annotations

from pathlib import Path

import torch

from h3opt.errors import PipelineError
from h3opt.files import write_json
from h3opt.pipeline.generation import GenerationSettings, reference_pipeline
from h3opt.profiles.selection import load_profile
from h3opt.render.media import write_frame_strip, write_mp4
from h3opt.verification.verdict import Verdict
from h3opt.verification.verify import Progress, verify


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
        out: the directory to write to; it is created if it is missing.
        dtype, device: dtype and device of the pipeline.
        profile: chooses the passes, see :func:`h3opt.optimize`.
        settings: what to generate.
        progress: called before each generation.

    Raises:
        PipelineError: a file cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipelineError(f"{out} cannot be made: {error.strerror}. Give another directory.") from error
    if profile != "auto":
        load_profile(profile)  # refuse a wrong profile before a model is built
    pipe = reference_pipeline(dtype=dtype, device=device)
    calibrated = device == "cpu" and (settings or GenerationSettings()) == GenerationSettings()
    verdict = verify(pipe, profile=profile, settings=settings, on_reference=calibrated, progress=progress)
    for name, media in (("reference", verdict.reference), ("optimized", verdict.optimized)):
        write_mp4(out / f"{name}.mp4", media.video, media.audio, media.sampling_rate)
    strip = {"unmodified": verdict.reference.video, "optimized": verdict.optimized.video}
    write_frame_strip(out / "frames.png", strip)
    write_json(out / "report.json", verdict.to_dict())
    return verdict
