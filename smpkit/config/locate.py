"""A problem with its place: the file (or option, or variable) it came from, the line, and what stands there."""

from __future__ import annotations

from dataclasses import dataclass

from smpkit.config.confidential import hide_in_line
from smpkit.config.words import printable
from smpkit.errors import Problem

__all__ = ["LocatedProblem", "excerpt"]

_WIDTH = 100


@dataclass(frozen=True)
class LocatedProblem(Problem):
    """A problem and where its text is.

    Args:
        source: the file as the user named it, or what else the value came from: `--set compute.spot`, a variable.
        line: counted from 1; None if the source has no lines.
        column: counted from 1.
        text: the whole source, for the excerpt; empty for none.
        exact: the very character matters, as in a syntax error: show the column, and a mark under it.
    """

    source: str = ""
    line: int | None = None
    column: int | None = None
    text: str = ""
    exact: bool = False

    @property
    def place(self) -> str:
        """The place as editors and terminals understand it: `job.yaml:4`, `job.yaml:4:17`."""
        numbers = (self.line, self.column if self.exact else None)
        return self.source + "".join(f":{number}" for number in numbers if number is not None)

    def __str__(self) -> str:
        known = self.source == f"--set {printable(self.where)}"
        where = f"{printable(self.where)}: " if self.path and not known else ""
        lines = [f"{self.place}: {where}{self.message}"]
        shown = excerpt(self.text, self.line, self.column if self.exact else None) if self.line is not None else ""
        if shown:
            lines.append(shown)
        if self.hint is not None:
            lines += ["", f"    hint: {self.hint}"] if shown else [f"    hint: {self.hint}"]
        return "\n".join(lines)


def excerpt(text: str, line: int, column: int | None = None) -> str:
    """Show one line of `text` behind its number, with a mark under `column`; empty if there is nothing to show.

    What is probably a secret is shown as stars.

    ::

            3 | {"microbatches": four}
              |                  ^
    """
    lines = text.splitlines()
    if 1 <= line <= len(lines):
        lines[line - 1] = hide_in_line(lines[line - 1])
    if not 1 <= line <= len(lines) or not lines[line - 1].strip():
        return ""
    # Long lines (a whole JSON document on one) are cut to the part around the column.
    start = max(0, (column or 1) - _WIDTH // 2) if len(lines[line - 1]) > _WIDTH else 0
    shown = lines[line - 1][start : start + _WIDTH]
    gutter = f"    {line} | "
    result = gutter + printable(shown).rstrip()
    if column is not None:
        before = printable(shown[: column - 1 - start])
        result += "\n" + " " * (len(gutter) - 2) + "| " + " " * len(before) + "^"
    return result
