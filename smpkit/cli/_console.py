"""What a command says and writes: talk on stderr, so that stdout is data alone; tables that fit the terminal; files.

::

    _console.note("sent 3 files")      # default verbosity, not with -q
    _console.detail("to /opt/ml/code") # with -v
    _console.warn(problem)             # a `Problem`, or a sentence
    raise SmpkitError(...)             # errors are raised; `smpkit.cli.main` prints them
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Literal

import click

from smpkit.errors import ConfigError, Problem, SmpkitError
from smpkit.units import things

if TYPE_CHECKING:  # `--help` does without it
    from pathlib import Path

_NARROWEST: Final = 40
_CLOUD_COMMAND: Final = re.compile(r"(`smpkit (?:submit|jobs|status|logs|stop|resume)\b[^`]*)`")
_REPEATED: Final = ContextVar("repeated", default="")
"""Options of the present command, such as ` --backend slurm`, that commands in messages need as well."""


def set_up(ctx: click.Context, verbosity: int) -> None:
    """Keep in the context how much to say (-1 errors only, 0 calm, 1 more), and let the help pages obey NO_COLOR."""
    ctx.obj = verbosity
    ctx.color = _color()
    _REPEATED.set("")


def repeat_in_commands(options: str) -> None:
    """Add options to each command for managed jobs that messages name: without them it would ask another cloud."""
    _REPEATED.set(_REPEATED.get() + options)


def note(text: str) -> None:
    """Say something that is good to know."""
    _say(0, text)


def detail(text: str) -> None:
    """Say why or how, to those who asked with `-v`."""
    _say(1, text)


def warn(what: Problem | str) -> None:
    """Warn of what is legal, but probably not intended."""
    _say(0, f"{style('warning:', 'yellow')} {_with_hint_styled(str(what))}")


def hint(text: str) -> None:
    """Say the one thing to do next."""
    _say(0, f"{style('hint:', 'cyan')} {text}")


def _say(verbosity: int, text: str) -> None:
    ctx = click.get_current_context(silent=True)  # a thread has none
    if (0 if ctx is None else ctx.obj or 0) >= verbosity:
        _talk(text)


def style(text: str, color: Literal["red", "yellow", "green", "cyan"]) -> str:
    """Colour a word; click takes the colour out again where it is not wanted."""
    return click.style(text, fg=color, bold=color != "cyan")


def print_error(error: SmpkitError) -> None:
    """Print what happened and what to try; a ConfigError with all its problems, the count last, where the eye rests."""
    if not isinstance(error, ConfigError):
        print_failure(error.message, error.hint)
        return
    for problem in error.problems:
        _talk(_with_hint_styled(str(problem)) + "\n")
    print_failure(f"{things(len(error.problems), 'problem')} in the {error.subject}", error.hint)


def print_failure(message: str, hint: str | None = None) -> None:
    """Print the two lines that every error has."""
    _talk(f"{style('error:', 'red')} {message}")
    if hint is not None:
        _talk(f"{style('hint:', 'cyan')} {hint}")


def _talk(text: str) -> None:
    text = _CLOUD_COMMAND.sub(lambda command: f"{command[1]}{_REPEATED.get()}`", text)
    click.echo(text, err=True, color=_color())


def _color() -> bool | None:
    """False where colours are not wanted; None leaves it to click, which asks whether the stream is a terminal."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def _with_hint_styled(text: str) -> str:
    before, mark, after = text.rpartition("\n    hint: ")
    return f"{before}\n    {style('hint:', 'cyan')} {after}" if mark else text


# ---- text that fits the terminal -------------------------------------------------------------------------------------


def width() -> int:
    """Columns of the terminal, or of COLUMNS; 80 in a pipe."""
    return max(shutil.get_terminal_size().columns, _NARROWEST)


def fold(head: str, parts: Iterable[str], columns: int, separator: str = "  ") -> Iterator[str]:
    """Yield `head` and `parts` in lines of at most `columns`, the later ones indented below the first part.

    A part that is longer than a line is broken after a comma, if it has one; never within a number or a name.
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
    cells_of = [cells for n, cells in enumerate(zip(*rows, strict=True)) if n == 0 or len(rows) == 1 or any(cells[1:])]
    widths = [max(map(len, cells)) for cells in cells_of]
    rows = list(zip(*cells_of, strict=True))
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


# ---- data ------------------------------------------------------------------------------------------------------------


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print what `--json` gives: data classes by their fields, times and paths as text, infinity and NaN as strings."""
    from pydantic_core import to_jsonable_python

    # Not pydantic's `to_json`: names of files may hold what UTF-8 cannot, which `dumps` escapes.
    text = json.dumps(to_jsonable_python(value))
    click.echo(json.dumps(json.loads(text, parse_constant=str), indent=indent))


# ---- files -----------------------------------------------------------------------------------------------------------


def write_file(path: Path, text: str, what: str) -> None:
    """Write a file; raise SmpkitError, which names `what`, where that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files may hold anything
    except OSError as error:
        raise SmpkitError(f"the {what} cannot be written to `{path}`: {error.strerror}") from None
