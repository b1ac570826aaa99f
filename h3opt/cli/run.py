"""``h3opt run``: generate a clip with a pipeline on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass
from h3opt.cli.console import check_output_files, console, is_stdout, print_json, resume_collection, say
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
    generation_settings,
    parse_device,
    parse_dtype,
    parse_pass_names,
)


def run(
    model: Annotated[Path, typer.Option(help="A directory that diffusers' save_pretrained wrote.")],
    prompt: Annotated[str, typer.Option(help="What to draw.")],
    out: Annotated[Path, typer.Option(help="The clip to write.")] = Path("clip.mp4"),
    profile: Profile = "auto",
    passes: Passes = None,
    no_passes: Annotated[bool, typer.Option("--no-passes", help="Capture only.")] = False,
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
    from h3opt.files import write_json
    from h3opt.pipeline.generation import generate
    from h3opt.pipeline.loading import load_pipeline
    from h3opt.render.media import write_mp4
    from h3opt.render.tables import report_table

    settings = generation_settings(prompt, height, width, frames, steps, seed)
    names = [] if no_passes else parse_pass_names(passes)
    check_output_files(out, json)
    resume_collection()
    pipe = load_pipeline(model, parse_dtype(dtype, device), parse_device(device))
    opt = optimize(pipe, passes=names, profile=profile, restorable=False)  # it ends with this process
    media, report = generate(pipe, settings), opt.report
    write_mp4(out, media.video, media.audio, media.sampling_rate)
    if not is_stdout(json):
        console.print(report_table(report))
        say(f"\n{report.device}, profile {report.profile}; wrote {out}")
    data = {"out": str(out), "settings": settings.to_dict(), "report": report.to_dict()}
    if json is not None:
        print_json(data) if is_stdout(json) else write_json(json, data)
