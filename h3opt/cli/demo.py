"""``h3opt demo``: generate with the small trained reference unmodified and optimized, compare, and write both."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any

import typer

from h3opt.cli.console import check_output_files, is_stdout, progress_bar, say, show_verdict
from h3opt.cli.options import (
    DeviceName,
    Dtype,
    Json,
    Profile,
    Prompt,
    check_profile,
    generation_settings,
    parse_device,
    parse_dtype,
)


def demo(
    out: Annotated[Path, typer.Option(help="Directory for clips, frames and report.")] = Path("out"),
    json: Json = None,
    dtype: Dtype = "auto",
    device: DeviceName = "cpu",
    profile: Profile = "auto",
    prompt: Prompt = None,
) -> None:
    """Run the trained reference pipeline unmodified and optimized; compare the clips, show and write both."""
    from h3opt.cli.demonstration import run_demo
    from h3opt.files import write_json

    settings = generation_settings(prompt=prompt)
    options: dict[str, Any] = {"dtype": parse_dtype(dtype, device), "device": parse_device(device), "profile": profile}
    check_profile(profile)
    if json is not None and out not in json.parents:
        check_output_files(json)
    if not is_stdout(json):
        say("The reference is the unmodified pipeline with small trained weights. Times on a CPU say nothing about a")
        say("GPU; look at the comparison.")
        say(f'Prompt: "{settings.prompt}"\n')
    with progress_bar(json) as progress:
        gc.set_threshold(50_000, 20, 20)  # fewer collections save six seconds; the models are small, so memory suffices
        verdict = run_demo(out, settings=settings, progress=progress, **options)
    show_verdict(verdict, json, verdict.to_dict())
    if not is_stdout(json):
        say(f"\nwrote {out}/reference.mp4, optimized.mp4, frames.png, report.json")
        if json is not None:
            write_json(json, verdict.to_dict())
    raise typer.Exit(0 if verdict.held else 1)
