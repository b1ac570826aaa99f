"""What commands print and write, and where to."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from h3opt.errors import PipelineError

if TYPE_CHECKING:
    from h3opt.verification.verdict import Verdict
    from h3opt.verification.verify import Progress


console = Console(highlight=False, markup=False, emoji=False)  # [brackets] in paths and messages are themselves


errors = Console(stderr=True, highlight=False, markup=False, emoji=False)


def show_verdict(verdict: Verdict, json: Path | None, data: dict[str, Any]) -> None:
    from h3opt.render.tables import verdict_lines, verdict_table

    if is_stdout(json):
        print_json(data)
        return
    console.print(verdict_table(verdict))
    console.print()
    for line in verdict_lines(verdict):
        say(line)


@contextlib.contextmanager
def progress_bar(json: Path | None) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not gc.isenabled():
        resume_collection()
    if not errors.is_terminal:  # a bar would say nothing until the end
        yield lambda what, done, total: errors.print(f"{done}/{total} {what}") if what != "done" else None
        return
    columns = (TextColumn("{task.description:28s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def resume_collection() -> None:
    gc.freeze()
    gc.enable()


def is_stdout(json: Path | None) -> bool:
    return json is not None and str(json) == "-"


def check_output_files(*files: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    for file in files:
        if file is None or is_stdout(file):
            continue
        if os.path.isdir(file):
            raise PipelineError(f"{file} is a directory. Give a file in it.")
        if not os.path.isdir(file.parent):
            raise PipelineError(f"{file} cannot be written: there is no directory {file.parent}. Give another path.")
        if not os.access(file.parent, os.W_OK):
            raise PipelineError(f"{file} cannot be written: {file.parent} is read-only. Give another path.")


def write_or_print(path: Path | None, data: Any) -> None:
    from h3opt.files import write_json

    if path is None:
        return
    if is_stdout(path):
        print_json(data)
    else:
        write_json(path, data)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


def say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
