"""``h3opt verify`` and ``h3opt replay``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3opt.cli.console import check_output_files, is_stdout, progress_bar, say, show_verdict, write_or_print
from h3opt.cli.options import (
    DeviceName,
    Dtype,
    Frames,
    Height,
    Json,
    Model,
    Passes,
    Profile,
    Seed,
    Steps,
    Width,
    check_profile,
    generation_settings,
    is_calibrated,
    open_pipeline,
    parse_device,
    parse_dtype,
    parse_pass_names,
    read_prompts,
)
from h3opt.errors import PipelineError

if TYPE_CHECKING:
    from h3opt.pass_api.base import Pass


def verify(
    model: Model = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text that describes a video; repeat it for several.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    passes: Passes = None,
    profile: Profile = "auto",
    height: Height = 64,
    width: Width = 96,
    frames: Frames = 124,
    steps: Steps = 4,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="Number of seeds per prompt, counted up from --seed.")] = 1,
    leave_out: Annotated[bool, typer.Option("--leave-out", help="Also compare all passes without each one.")] = False,
    alone: Annotated[bool, typer.Option("--alone", help="Also compare each pass by itself.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Print what the Perceptual promises should be.")
    ] = False,
    floors: Annotated[
        str,
        typer.Option(
            help="Floors to measure, comma-separated: ulp, compile, cache, attention, seed. "
            "ulp is always measured where a pass needs it."
        ),
    ] = "",
    report: Annotated[Path | None, typer.Option(help="Write a page to look at and listen to.")] = None,
    blind: Annotated[
        Path | None, typer.Option(help="Write a page that asks which of two clips looks and sounds better.")
    ] = None,
    evidence: Annotated[Path, typer.Option(help="Folder for the tensors that show a broken promise.")] = Path(
        "out/evidence"
    ),
    dtype: Dtype = "auto",
    device: DeviceName = "cpu",
    json: Json = None,
) -> None:
    """Add passes one by one and check the promise of each; exit code 1 if a promise broke."""
    from h3opt.files import write_json
    from h3opt.render.page import check_page, write_blind, write_report
    from h3opt.verification.calibration import calibrations
    from h3opt.verification.evidence import check_folder
    from h3opt.verification.noise_floors import choose_floors
    from h3opt.verification.verify import verify as verify_pipeline

    settings = generation_settings(None, height, width, frames, steps, seed)
    texts = [*(prompt or []), *(read_prompts(prompts) if prompts is not None else [])]
    if seeds < 1:
        raise PipelineError(f"{seeds} seeds make no clip. Use at least one.")
    names = parse_pass_names(passes)
    check_profile(profile)
    check_folder(evidence, names or ())
    requested: list[str] | list[Pass] | None = names
    if calibrate and names is None:
        requested = _perceptual_passes(tiny=model is None)
    floor_names = [name.strip() for name in floors.split(",") if name.strip()]
    choose_floors(floor_names, ulp=True)
    pages = [page for page in (report, blind) if page is not None]
    files = [os.path.abspath(file) for file in (json, *pages) if file is not None]
    if len(set(files)) < len(files):
        raise PipelineError("--report, --blind and --json name one file twice. Give each its own.")
    for page in pages:
        check_page(page)
    check_output_files(json, *pages)
    pipe = open_pipeline(model, dtype, device)
    with progress_bar(json) as progress:
        verdict = verify_pipeline(
            pipe,
            texts or None,
            passes=requested,
            profile=profile,
            settings=settings,
            seeds=seeds,
            leave_out=leave_out,
            alone=alone,
            floors=floor_names,
            evidence=evidence,
            on_reference=model is None and is_calibrated(device, height, width) and (calibrate or not texts),
            progress=progress,
        )
    data = verdict.to_dict()
    if calibrate:
        data["calibration"] = [calibration.to_dict() for calibration in calibrations(verdict)]
    show_verdict(verdict, json, data)
    if calibrate and not is_stdout(json):
        say("\n".join(["", *map(str, calibrations(verdict))]))
    if report is not None:
        write_report(report, verdict)
    if blind is not None:
        write_blind(blind, verdict)
    if pages and not is_stdout(json):
        say("wrote " + ", ".join(map(str, pages)))
    if json is not None and not is_stdout(json):
        write_json(json, data)
    raise typer.Exit(0 if verdict.held else 1)


def replay(
    folder: Annotated[Path, typer.Argument(help="A folder that verify wrote for a broken promise.")],
    model: Model = None,
    dtype: Annotated[str | None, typer.Option(help="By default the dtype of the verification.")] = None,
    device: Annotated[str | None, typer.Option(help="By default the type of device of the verification.")] = None,
    json: Json = None,
) -> None:
    """Run the first call that differed when a promise broke again; exit code 1 if it still differs."""
    from h3opt.verification.replay import replay_evidence

    check_output_files(json)
    if dtype is not None:
        parse_dtype(dtype)

    def open_verified_pipeline(verified_dtype: Any, verified_device: str) -> Any:
        return open_pipeline(model, dtype or str(verified_dtype).removeprefix("torch."), verified_device)

    result = replay_evidence(folder, open_verified_pipeline, None if device is None else parse_device(device))
    if not is_stdout(json):
        say(str(result))
    write_or_print(json, result.to_dict())
    raise typer.Exit(1 if result.differs else 0)


def _perceptual_passes(tiny: bool) -> list[Pass]:
    """All passes with a Perceptual promise; for the tiny reference with options that fit its small canvas."""
    from h3opt.pass_api.promises import Perceptual
    from h3opt.pass_api.registry import list_passes, make_pass

    instances = [make_pass(cls.name) for cls in list_passes() if isinstance(cls.promise, Perceptual)]
    return [instance.test_instance() for instance in instances] if tiny else instances
