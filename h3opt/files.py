"""Files and folders that appear whole or not at all: written under another name beside their place, then renamed.

A run that ends half-way, by an error, Ctrl-C or SIGTERM, takes its partial file with it. One that was killed without
a chance to leaves a hidden ``.NAME.HOST-PID.partial``, which the next run that writes there removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from h3opt.errors import PipelineError


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], encoding_error: type[Exception] = OSError) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it on success and removed on failure.

    Raises:
        PipelineError: it cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise PipelineError(f"cannot write {path}: it is not a regular file; name a file in a folder you can write to")
    try:
        with temporary_sibling(path) as partial:
            yield partial
            os.replace(partial, path)
    except OSError as error:
        why = error.strerror or error  # not the partial file's name
        raise PipelineError(f"cannot write {path} ({why}); name a file in a folder you can write to") from error
    except encoding_error as error:
        raise PipelineError(f"cannot encode {path} ({error}); check the size and the rates") from error


def check_writable(path: Path) -> None:
    """Refuse before the work what :func:`atomic_write` could not write after it.

    Raises:
        PipelineError: it could not.
    """
    if path.exists() and not path.is_file():
        raise PipelineError(f"{path} is no regular file. Give the name of a file in a folder you can write to.")
    try:
        with temporary_sibling(path) as partial:
            partial.touch()
    except OSError as error:
        raise PipelineError(f"{path} cannot be written: {error.strerror}. Give another path.") from error


@contextlib.contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """A hidden name beside ``path`` for a file or a folder; what has that name at the end is removed.

    Partial files that processes of this host left there and did not live to remove go too.
    """
    stem, host = f".{path.name}.", platform.node().replace("/", "_")
    for leftover in path.parent.glob(f"{_literal(stem + host)}-*.partial"):
        number = leftover.name.removesuffix(".partial").rpartition("-")[2]
        if number.isdecimal() and not _alive(int(number)):
            _remove(leftover)
    partial = path.parent / f"{stem}{host}-{os.getpid()}.partial"  # "." has no name
    try:
        yield partial
    finally:
        _remove(partial)


def _literal(text: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_json(path: Path, data: Mapping[str, Any] | list[Any]) -> None:
    """Write JSON whole or not at all; a device or a pipe is written to as it is.

    Raises:
        PipelineError: the file cannot be written.
    """
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text whole or not at all; a device or a pipe is written to as it is.

    Raises:
        PipelineError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")  # a device or a pipe: a file must not take its place
            return
        with temporary_sibling(path) as partial:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    except OSError as error:
        raise PipelineError(f"{path} cannot be written: {error.strerror}. Give another path.") from error
