"""Error messages about profiles: file, line and field, what is wrong, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from h3opt.errors import ProfileError

FieldPath = tuple[str | int, ...]
"""Keys and list indices that lead from the root of a document to a value, e.g. ``("passes", 0, "when")``."""


@dataclass(frozen=True)
class Problem:
    """An error in a profile.

    Attributes:
        line: from 1; for a missing key the line of the mapping that lacks it.
        field: the path of the value, as :func:`format_path` writes it.
        message: what is wrong and what to do, without the place.
        absent: whether a key is missing.
    """

    line: int
    field: str
    message: str
    absent: bool = False


def raise_first(problems: Sequence[Problem], path: str) -> NoReturn:
    """Raise a :class:`~h3opt.errors.ProfileError` for the first problem, with the number of the others.

    Missing keys come last: a misspelled key also makes the right key missing, and the misspelling is the cause.
    """
    first = min(problems, key=lambda problem: (problem.absent, problem.line))
    more = len(problems) - 1
    tail = f" ({more} more problem{'s' if more > 1 else ''} in this file)" if more else ""
    raise ProfileError(f"{path}:{first.line}: {first.field or 'document'}: {first.message}{tail}")


def nearest_line(lines: Mapping[FieldPath, int], path: FieldPath) -> int:
    """Return the line of a path, or of the innermost enclosing value that the file has."""
    return next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), 0)


def format_path(path: FieldPath) -> str:
    """Write a path as ``passes[0].when``."""
    return "".join(_path_steps(path)).removeprefix(".")


def _path_steps(path: FieldPath) -> Iterator[str]:
    for step in path:
        if isinstance(step, int):
            yield f"[{step}]"
        else:
            yield f".{step}" if re.fullmatch(r"[\w-]{1,60}", step) else f"[{quote_clipped(step)}]"


def describe_value(value: Any) -> str:
    """Describe a value of a document for an error message, e.g. ``the text 'yes'``."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {quote_clipped(value)}"
        case list():
            return "a list"
    return "a mapping"


def quote_clipped(text: str) -> str:
    """Quote text from a file for a one-line message: shortened to 60 characters, control characters escaped."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def escape_unprintable(text: str) -> str:
    """Escape the characters of a path or a message that a terminal cannot show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
