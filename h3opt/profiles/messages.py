"""Error messages of profiles: file, line, field, what is wrong, what to write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from h3opt.errors import ProfileError

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    line: int
    field: str
    message: str  # what is wrong and what to do, without the place
    absent: bool = False  # about a key that is not there, so the line is that of the mapping


def raise_first(problems: Sequence[Problem], path: str) -> NoReturn:
    # A missing key comes last: where another is misspelled, that one is the news.
    first = min(problems, key=lambda problem: (problem.absent, problem.line))
    more = len(problems) - 1
    tail = f" ({more} more problem{'s' if more > 1 else ''} in this file)" if more else ""
    raise ProfileError(f"{path}:{first.line}: {first.field or 'document'}: {first.message}{tail}")


def nearest_line(lines: Mapping[FieldPath, int], path: FieldPath) -> int:
    """The line of a path, or of the innermost thing around it that the file has."""
    return next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), 0)


def format_path(path: FieldPath) -> str:
    return "".join(_path_steps(path)).removeprefix(".")


def _path_steps(path: FieldPath) -> Iterator[str]:
    for step in path:
        if isinstance(step, int):
            yield f"[{step}]"
        else:
            yield f".{step}" if re.fullmatch(r"[\w-]{1,60}", step) else f"[{quote_clipped(step)}]"


def describe_value(value: Any) -> str:
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
    """Text of the file as a one-line message quotes it: short, control characters escaped."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def escape_unprintable(text: str) -> str:
    """Text of our own making, or a path, with whatever a terminal cannot show escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
