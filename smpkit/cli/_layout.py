"""Text that fits the terminal: tables and lists folded between their parts, never within a number or a name."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

__all__ = ["fold", "table", "width"]

_NARROWEST: Final = 40


def width() -> int:
    """Columns of the terminal, or of COLUMNS; 80 in a pipe."""
    shown = shutil.get_terminal_size() if sys.stdout.isatty() else shutil.get_terminal_size((80, 24))
    return max(shown.columns, _NARROWEST)


def fold(head: str, parts: Iterable[str], columns: int, separator: str = "  ") -> Iterator[str]:
    """Yield `head` and `parts` in lines of at most `columns`, the later ones indented below the first part.

    A part that is longer than a line is broken after a comma, if it has one.
    """
    line, empty = head, True
    for part in parts:
        pieces = [part] if len(head) + len(part) <= columns else re.findall(r"[^,]*,|[^,]+$", part)
        for index, piece in enumerate(pieces):
            gap = "" if empty or index else separator
            if not empty and len(line) + len(gap) + len(piece) > columns:
                yield line.rstrip()
                line, gap = " " * len(head), ""
            line, empty = line + gap + piece, False
    yield line.rstrip()


def table(rows: Sequence[Sequence[str]], columns: int) -> Iterator[str]:
    """Yield the lines of a table; one too wide loses spacing, or is split into several that repeat the first column.

    The first column is what the row is about, and stands to the left; all others to the right. A column with nothing
    below its heading is left out.
    """
    said = [n == 0 or len(rows) == 1 or any(cells[1:]) for n, cells in enumerate(zip(*rows, strict=True))]
    rows = [[cell for cell, kept in zip(row, said, strict=True) if kept] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    first, rest = 1, len(widths)
    gap = next((gap for gap in (2, 1) if sum(widths) + gap * (rest - 1) <= columns), 2)
    while first < rest:
        last, taken = first, widths[0]
        while last < rest and (last == first or taken + gap + widths[last] <= columns):
            taken += gap + widths[last]
            last += 1
        if first > 1:
            yield ""
        for row in rows:
            cells = [row[i].rjust(widths[i]) for i in range(first, last)]
            yield (" " * gap).join([row[0].ljust(widths[0]), *cells]).rstrip()
        first = last
