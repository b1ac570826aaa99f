"""Files and folders are written atomically: complete or not at all, and the next run finds no remains."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from h3opt.files import atomic_write, temporary_sibling, write_json
from h3opt.render.media import write_frame_strip, write_mp4
from h3opt.verification.evidence import CallEvidence, read_evidence, write_evidence

VIDEO, AUDIO = torch.rand(1, 4, 3, 32, 32), torch.zeros(1, 2, 4000)


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "mp4": (lambda path: write_mp4(path, VIDEO, AUDIO, 16000), "torch.Tensor.numpy"),
    "frames": (lambda path: write_frame_strip(path, {"a": VIDEO}), "os.replace"),
    "json": (lambda path: write_json(path, {"a": 1}), "pathlib.Path.replace"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_an_interruption_leaves_the_old_file_and_no_other(kind, tmp_path, monkeypatch):
    write, stopped_in = WRITERS[kind]
    path = tmp_path / "file"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(stopped_in, stop)
        with pytest.raises(KeyboardInterrupt):
            write(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write(path)
    assert path.read_bytes() != b"old" and list(tmp_path.iterdir()) == [path]


def evidence(call: int) -> CallEvidence:
    return CallEvidence(
        "fused_swiglu",
        {},
        "module",
        "transformer",
        call,
        [],
        arguments=[{"list": []}, {"dict": {}}],
        expected=[torch.zeros(2)],
        actual=[torch.ones(2)],
        dtype=torch.float32,
        device="cpu",
    )


@pytest.mark.parametrize(
    "stopped_in", ["h3opt.verification.evidence.save_file", "pathlib.Path.write_text", "pathlib.Path.rename"]
)
def test_interrupted_evidence_stays_the_old_evidence(stopped_in, tmp_path, monkeypatch):
    write_evidence(tmp_path / "e", evidence(1))
    with monkeypatch.context() as patch:
        patch.setattr(stopped_in, stop)
        with pytest.raises(KeyboardInterrupt):
            write_evidence(tmp_path / "e", evidence(2))
    assert read_evidence(tmp_path / "e").call == 1 and [path.name for path in tmp_path.iterdir()] == ["e"]
    write_evidence(tmp_path / "e", evidence(3))
    assert read_evidence(tmp_path / "e").call == 3 and [path.name for path in tmp_path.iterdir()] == ["e"]


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = f".r*.html.{platform.node()}-{{}}.partial"
    dead, alive, far = (tmp_path / left.format(process) for process in (gone.pid, os.getppid(), "x"))
    other = tmp_path / f".rx.html.{platform.node()}-{gone.pid}.partial"
    for path in (dead, alive, far, other):
        path.write_text("half")
    with atomic_write(tmp_path / "r*.html") as partial:
        partial.write_text("whole")
        assert partial.parent == tmp_path and partial.name.startswith(".")
    assert not dead.exists() and alive.exists() and far.exists() and other.exists()
    assert (tmp_path / "r*.html").read_text() == "whole"


def test_a_partial_folder_goes_too(tmp_path):
    with pytest.raises(KeyboardInterrupt), temporary_sibling(tmp_path / "e") as partial:
        (partial / "deep").mkdir(parents=True)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
