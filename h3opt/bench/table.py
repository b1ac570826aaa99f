"""One table of results, rendered for the console and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of strings.

    Attributes:
        heads: the column heads.
        rows: the cells. A row with fewer cells than heads carries a message in its last cell, e.g. why a variant has
            no figures; the message does not widen its column.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Render the table as Markdown; every line has the same number of columns."""
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return "\n".join(f"| {' | '.join([*line, *[''] * (len(self.heads) - len(line))])} |" for line in lines)

    def __str__(self) -> str:
        """Render the table for a console: the first column flush left, the others flush right, long heads wrapped."""
        columns = [
            [row[number] for row in self.rows if number == 0 or len(row) == len(self.heads)]
            for number in range(len(self.heads))
        ]
        heads = [
            textwrap.wrap(head, max(map(len, [*head.split(), *cells])))
            for head, cells in zip(self.heads, columns, strict=True)
        ]
        widths = [max(map(len, [*head, *cells])) for head, cells in zip(heads, columns, strict=True)]
        height = max(map(len, heads))
        head_lines = zip(*([""] * (height - len(head)) + head for head in heads), strict=True)
        return "\n".join(_align(line, widths) for line in [*head_lines, *self.rows])


def format_cell(value: float | None, form: str) -> str:
    """Format a figure for a cell; a dash where there is none."""
    return "–" if value is None else format(value, form)


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    rest = list(cells[1:])
    if len(cells) == len(widths):
        rest = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()
