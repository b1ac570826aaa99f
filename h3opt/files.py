"""Atomic writing of files and folders: written under a temporary name in the same folder, then renamed.

An error, Ctrl-C or SIGTERM removes the temporary file. A process that is killed leaves a hidden
``.NAME.HOST-PID.partial``, which the next process on this host that writes the same file removes.
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
    """Yield a temporary path to write to; rename it to ``path`` on success and remove it on failure.

    Args:
        path: the file to write or replace.
        encoding_error: the error of the encoder that writes the file, raised as ``PipelineError``.

    Raises:
        PipelineError: the file cannot be written or encoded.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise PipelineError(f"cannot write {path}: it is not a regular file; name a file in a folder you can write to")
    try:
        with temporary_sibling(path) as partial:
            yield partial
            os.replace(partial, path)
    except OSError as error:
        why = error.strerror or error  # without the name of the temporary file
        raise PipelineError(f"cannot write {path} ({why}); name a file in a folder you can write to") from error
    except encoding_error as error:
        raise PipelineError(f"cannot encode {path} ({error}); check the size and the rates") from error


def check_writable(path: Path) -> None:
    """Check before a long computation that :func:`atomic_write` will be able to write ``path``.

    Raises:
        PipelineError: the file cannot be written.
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
    """Yield a hidden temporary path in the folder of ``path``; a file or folder of that name is removed at the end.

    Temporary files of killed processes of this host are removed too.
    """
    stem, host = f".{path.name}.", platform.node().replace("/", "_")
    for leftover in path.parent.glob(f"{_literal(stem + host)}-*.partial"):
        number = leftover.name.removesuffix(".partial").rpartition("-")[2]
        if number.isdecimal() and not _alive(int(number)):
            _remove(leftover)
    partial = path.parent / f"{stem}{host}-{os.getpid()}.partial"  # path.parent: "." has no name to replace
    try:
        yield partial
    finally:
        _remove(partial)


def write_json(path: Path, data: Mapping[str, Any] | list[Any]) -> None:
    """Write a JSON file atomically; a device or a pipe is written directly.

    Raises:
        PipelineError: the file cannot be written.
    """
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; a device or a pipe is written directly.

    Raises:
        PipelineError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")  # a device or a pipe must not be replaced by a file
            return
        with temporary_sibling(path) as partial:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    except OSError as error:
        raise PipelineError(f"{path} cannot be written: {error.strerror}. Give another path.") from error


def _literal(text: str) -> str:
    """Escape a text for ``glob``."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
