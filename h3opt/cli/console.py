"""Output of the commands: what is printed, progress, and checks of the files to write."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from h3opt.errors import PipelineError

if TYPE_CHECKING:
    from h3opt.verification.verdict import Verdict
    from h3opt.verification.verify import Progress


class SafeConsole(Console):
    """A console that shows control characters in text as escapes.

    Text comes from files too (profiles, evidence, model directories), and an escape sequence in it could change what
    the terminal shows. Rich's own styles are not text and stay.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_escape_control(segment.text))


# Markup is off: [brackets] in paths and messages are text.
console = SafeConsole(highlight=False, markup=False, emoji=False)
errors = SafeConsole(stderr=True, highlight=False, markup=False, emoji=False)


def say(message: RenderableType) -> None:
    """Print a text, unwrapped, or a table on standard output."""
    with _stdout():
        console.print(message, soft_wrap=isinstance(message, str))


def print_text(text: str) -> None:
    """Print text on standard output for another program to read, without wrapping or styles."""
    with _stdout():
        print(text, flush=True)


def print_json(data: Any) -> None:
    """Print data as JSON on standard output."""
    print_text(json.dumps(data, indent=2, allow_nan=False))


def show_verdict(verdict: Verdict, json: Path | None, data: dict[str, Any]) -> None:
    """Print a verdict as a table with sentences below it, or ``data`` as JSON if ``json`` is standard output."""
    from h3opt.render.tables import verdict_lines, verdict_table

    if is_stdout(json):
        print_json(data)
        return
    say(verdict_table(verdict))
    say("")
    for line in verdict_lines(verdict):
        say(line)


@contextlib.contextmanager
def progress_bar(json: Path | None) -> Iterator[Progress]:
    """Show progress on standard error: a bar on a terminal, else a line for each unit of work."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not gc.isenabled():
        resume_collection()
    if not errors.is_terminal:  # a bar would print nothing until the end
        yield lambda what, done, total: errors.print(f"{done}/{total} {what}") if what != "done" else None
        return
    columns = (TextColumn("{task.description:28s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def resume_collection() -> None:
    """Turn the garbage collector on again, which is off during imports, and exempt the imported objects from it."""
    gc.freeze()
    gc.enable()


def is_stdout(file: Path | None) -> bool:
    """Whether a file option means standard output."""
    return file is not None and str(file) == "-"


def check_output_files(*files: Path | None, devices: bool = True) -> None:
    """Check before the work that these files can be written after it.

    Args:
        files: the files; ``None`` and standard output are skipped.
        devices: whether a device or a pipe may be written. Text may go there; a clip or a picture replaces a regular
            file.

    Raises:
        PipelineError: a file cannot be written.
    """
    for file in files:
        if file is None or is_stdout(file):
            continue
        if os.path.isdir(file):
            raise PipelineError(f"{file} is a directory. Give a file in it.")
        if os.path.exists(file) and not os.path.isfile(file):
            _check_device(file, devices)
        elif not os.path.isdir(file.parent):
            raise PipelineError(f"{file} cannot be written: there is no directory {file.parent}. Give another path.")
        elif not os.access(file.parent, os.W_OK):
            raise PipelineError(f"{file} cannot be written: {file.parent} is read-only. Give another path.")


def write_or_print(path: Path | None, data: Any) -> None:
    """Write data as JSON to a file or to standard output; nothing for ``None``."""
    from h3opt.files import write_json

    if path is None:
        return
    if is_stdout(path):
        print_json(data)
    else:
        write_json(path, data)


def _check_device(file: Path, allowed: bool) -> None:
    if not allowed:
        raise PipelineError(f"{file} cannot be written: it is not a regular file. Give another path.")
    if stat.S_ISCHR(os.stat(file).st_mode):
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_NOCTTY)
            try:
                os.write(descriptor, b"")  # writes nothing, but a full device refuses it
            finally:
                os.close(descriptor)
        except OSError as error:
            raise PipelineError(f"{file} cannot be written: {error.strerror}. Give another path.") from error


@contextlib.contextmanager
def _stdout() -> Iterator[None]:
    """Turn a standard output that cannot be written, e.g. a full disk or a closed pipe, into an error of h3opt."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # else Python fails again when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise PipelineError(
            f"Standard output cannot be written: {error.strerror}. Send the output to another place."
        ) from error


def _escape_control(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match.group())[1:-1], text)
