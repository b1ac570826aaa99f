"""``h3opt run``: generate a clip with a pipeline on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h3opt.cli.console import check_output_files, is_stdout, resume_collection, say, write_or_print
from h3opt.cli.options import (
    DeviceName,
    Dtype,
    Frames,
    Height,
    Json,
    Passes,
    Profile,
    Seed,
    Steps,
    Width,
    check_profile,
    generation_settings,
    parse_device,
    parse_dtype,
    parse_pass_names,
)


def run(
    model: Annotated[Path, typer.Option(help="A pipeline directory that diffusers' save_pretrained wrote.")],
    prompt: Annotated[str, typer.Option(help="Text that describes the video.")],
    out: Annotated[Path, typer.Option(help="The clip to write, as mp4.")] = Path("clip.mp4"),
    profile: Profile = "auto",
    passes: Passes = None,
    no_passes: Annotated[bool, typer.Option("--no-passes", help="Capture graphs, but run no pass.")] = False,
    height: Height = 544,
    width: Width = 960,
    frames: Frames = 124,
    steps: Steps = 8,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: DeviceName = "cpu",
    json: Json = None,
) -> None:
    """Generate a clip with a pipeline on disk."""
    from h3opt.compiler.optimize import optimize
    from h3opt.pipeline.generation import generate
    from h3opt.pipeline.loading import load_pipeline
    from h3opt.pipeline.sequence_length import sequence_length
    from h3opt.render.media import write_mp4
    from h3opt.render.tables import report_table

    settings = generation_settings(prompt, height, width, frames, steps, seed)
    names = [] if no_passes else parse_pass_names(passes)
    check_profile(profile)
    check_output_files(out, devices=False)
    check_output_files(json)
    resume_collection()
    pipe = load_pipeline(model, parse_dtype(dtype, device), parse_device(device))
    tokens = sequence_length(pipe, settings)
    # Nothing is restored: the pipeline ends with this process.
    optimized = optimize(pipe, passes=names, profile=profile, tokens=tokens, restorable=False)
    media = generate(pipe, settings)
    report = optimized.report
    write_mp4(out, media.video, media.audio, media.sampling_rate)
    if not is_stdout(json):
        say(report_table(report))
        say(f"\n{report.device}, profile {report.profile}; wrote {out}")
    write_or_print(json, {"out": str(out), "settings": settings.to_dict(), "report": report.to_dict()})
