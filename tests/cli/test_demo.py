"""What the demo writes and shows, without its minutes of generation: ``test_cli`` runs it for real."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from h3opt.cli import demonstration as demo
from h3opt.cli.demonstration import run_demo
from h3opt.compiler.report import Report
from h3opt.errors import H3OptError, PipelineError
from h3opt.files import write_json
from h3opt.pass_api.promises import Exact, Perceptual, Promise
from h3opt.pass_api.registry import list_passes
from h3opt.pipeline.generation import GenerationSettings, Media
from h3opt.render.tables import passes_table, verdict_lines, verdict_table
from h3opt.verification.difference import Difference
from h3opt.verification.faults import Finding
from h3opt.verification.noise_floors import Floor
from h3opt.verification.verdict import PassVerdict, Verdict

MOVED = Difference(5, 7, 0.0123, 40.0, 61.1)


def clip(seed: int) -> Media:
    draw = torch.Generator().manual_seed(seed)
    video, audio = torch.rand(1, 4, 3, 32, 64, generator=draw), torch.rand(1, 2, 8000, generator=draw) - 0.5
    return Media(video, audio, 48000)


def judged(name: str, promise: Promise, difference: Difference, held: bool | None, why: str | None = None) -> Any:
    return PassVerdict(
        name, "graph", promise, "–" if why else "12/12", difference, held, why, 12.34, of_floors={"ulp": 0.4}
    )


def verdict(*passes: PassVerdict, capture: Difference | None = None) -> Verdict:
    return Verdict(
        passes=list(passes),
        capture=capture or Difference(),
        exact_set=Difference(),
        exact_names=[one.name for one in passes if isinstance(one.promise, Exact)],
        all_passes=MOVED,
        floors=[Floor("ulp", MOVED)],
        reference=clip(0),
        optimized=clip(1),
        reference_seconds=2.0,
        optimized_seconds=1.0,
        report=Report("cpu", "cpu", "direct", "block", notices=["A notice."]),
        settings=[GenerationSettings()],
    )


FORMAT = Perceptual(lpips=0.03, audio_snr_db=40)
HELD = judged("fused_swiglu", Exact(), Difference(), True), judged("fp8_linear", FORMAT, MOVED, True)


def printed(table: Any, width: int = 100) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The demo with its pipeline and verification replaced; what they were called with."""
    calls: dict[str, Any] = {}

    def verify(pipe: Any, **options: Any) -> Verdict:
        calls.update(options, pipe=pipe)
        return verdict(*HELD)

    monkeypatch.setattr(demo, "reference_pipeline", lambda **options: options)
    monkeypatch.setattr(demo, "verify", verify)
    return calls


# ----------------------------------------------------------------------------------------------------------- files


def test_the_demo_writes_two_clips_a_strip_and_a_report(judge: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    settings = GenerationSettings(prompt="a cat")
    found = run_demo(out, dtype=torch.float32, profile="h200", settings=settings)
    assert sorted(path.name for path in out.iterdir()) == [
        "frames.png", "optimized.mp4", "reference.mp4", "report.json",
    ]  # fmt: skip
    assert (out / "reference.mp4").read_bytes() != (out / "optimized.mp4").read_bytes()
    assert json.loads((out / "report.json").read_text()) == found.to_dict()
    assert judge["pipe"] == {"dtype": torch.float32, "device": "cpu"}
    assert (judge["profile"], judge["settings"]) == ("h200", settings)


@pytest.mark.usefixtures("judge")
def test_a_second_demo_replaces_the_files_of_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "report.json").write_text("old")
        run_demo(tmp_path)
        assert json.loads((tmp_path / "report.json").read_text())["held"] is True


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": [1, None]})
    assert json.loads(file.read_text()) == {"a": [1, None]}
    with pytest.raises(ValueError):
        write_json(file, {"a": math.inf})
    assert json.loads(file.read_text()) == {"a": [1, None]} and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("place", ["folder", "none/x.json", "folder/../file/x.json"])
def test_a_place_that_cannot_be_written_leaves_nothing_behind(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PipelineError, match=r"cannot be written: .*\. Give another path\."):
        write_json(tmp_path / place, {})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(pipe, {"a": 1})
        assert json.loads(os.read(reader, 1000)) == {"a": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


@pytest.mark.usefixtures("judge")
def test_a_directory_that_is_a_file_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(H3OptError, match="cannot be made"):
        run_demo(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------------------------------------------------- screen


def test_the_table_has_one_line_per_pass_on_a_hundred_columns() -> None:
    longest = max((cls.name for cls in list_passes()), key=len)
    passes = (
        judged(longest, FORMAT, MOVED, True),
        judged("fused_swiglu", Exact(), Difference(), True),
        judged("fp8_linear", FORMAT, MOVED, False),
        judged("tile_batch", FORMAT, Difference(), None, "needs SM89 or newer, " * 5),
    )
    lines = [" ".join(line.split()) for line in printed(verdict_table(verdict(*passes)))]
    assert lines[1:] == [
        f"{longest} graph 12/12 LPIPS ≤ 0.03, ≥ 40 dB 0.0123, 61.1 dB 0.4 held 12",
        "fused_swiglu graph 12/12 exact bits equal – held 12",
        "fp8_linear graph 12/12 LPIPS ≤ 0.03, ≥ 40 dB 0.0123, 61.1 dB 0.4 BROKEN 12",
        "tile_batch graph – LPIPS ≤ 0.03, ≥ 40 dB – – declined 12",
    ]


def test_below_the_table_stand_all_comparisons() -> None:
    text = "\n".join(verdict_lines(verdict(*HELD)))
    assert "captured, no pass on  bits equal" in text
    assert "Exact passes on (1)   bits equal (video and audio)" in text
    assert "all passes on         LPIPS 0.0123, audio 61.1 dB" in text
    assert "noise floor           LPIPS 0.0123, audio 61.1 dB" in text
    assert "2.0 s unmodified, 1.0 s optimized (warm), on cpu" in text
    assert "torch " in text and "diffusers " in text and "A notice." in text
    assert text.endswith("output moved by: fp8_linear") and "broken" not in text and "declined" not in text


def test_what_broke_or_declined_is_named_with_its_reason() -> None:
    broken = judged("fused_swiglu", Exact(), MOVED, False)
    lines = verdict_lines(verdict(broken, judged("fp8_linear", FORMAT, Difference(), None, "needs SM89")))
    assert lines[0] == "fp8_linear declined: needs SM89"
    assert lines[-2:] == ["promise broken by: fused_swiglu", "output moved by: fused_swiglu"]


def test_a_capture_that_moves_bits_is_named_though_no_pass_broke() -> None:
    found = verdict(*HELD, capture=MOVED)
    assert not found.held and "promise broken by: the capture itself, with no pass on" in verdict_lines(found)


def test_a_fault_breaks_the_verdict_and_is_named_once_a_clip() -> None:
    found = verdict(*HELD)
    found.faults = [(0, Finding("frozen_frames", f"frame {number}", 0.0, 0.1)) for number in (7, 8)]
    lines = verdict_lines(found)
    assert not found.held and found.to_dict()["faults"][1]["where"] == "frame 8"
    assert sum(line.startswith("FAULT: frozen_frames: ") for line in lines) == 1
    assert any("frame 7 and 1 more" in line for line in lines)
    assert "promise broken by: no pass, but there are faults" in lines


def test_the_list_of_passes_says_what_comes_after_what() -> None:
    text = "\n".join(line.rstrip() for line in printed(passes_table(), 240))
    for cls in list_passes():
        assert not cls.after or f"after {', '.join(cls.after)}" in text
