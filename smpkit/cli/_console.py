"""Talking to the user: warnings, errors, hints and notes go to stderr, so that stdout is data alone.

For commands::

    console = _console.current()
    console.note("sent 3 files")      # default verbosity, not with -q
    console.detail("to /opt/ml/code") # with -v
    console.warn(problem)             # a `Problem`, or a sentence
    raise SmpkitError(...)            # errors are raised; the boundary around all commands prints them
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import click

from smpkit.errors import ConfigError, Problem, SmpkitError

__all__ = ["Console", "current", "print_error", "print_problems", "set_up", "style"]

_CLOUD_COMMAND = re.compile(r"(`smpkit (?:submit|jobs|status|logs|stop|resume)\b[^`]*)`")


@dataclass(frozen=True)
class Console:
    """How much to say: -1 errors only, 0 calm, 1 more."""

    verbosity: int = 0
    options: str = ""
    """Options of the present command, such as ` --backend slurm`, that commands in messages need as well."""

    def complete(self, text: str) -> str:
        """Add those options to commands for managed jobs in `text`; without them they would ask another cloud."""
        return _CLOUD_COMMAND.sub(rf"\1{self.options}`", text) if self.options else text

    def note(self, text: str) -> None:
        """Say something that is good to know."""
        if self.verbosity >= 0:
            click.echo(self.complete(text), err=True, color=_color())

    def detail(self, text: str) -> None:
        """Say why or how, to those who asked with `-v`."""
        if self.verbosity >= 1:
            click.echo(text, err=True, color=_color())

    def warn(self, what: Problem | str) -> None:
        """Warn of what is legal, but probably not intended."""
        if self.verbosity >= 0:
            click.echo(
                f"{style('warning:', 'yellow')} {_with_hint_styled(self.complete(str(what)))}", err=True, color=_color()
            )

    def hint(self, text: str) -> None:
        """Say the one thing to do next."""
        if self.verbosity >= 0:
            click.echo(f"{style('hint:', 'cyan')} {self.complete(text)}", err=True, color=_color())


def set_up(ctx: click.Context, verbosity: int) -> None:
    """Put the console where `current` finds it, and let the help pages obey NO_COLOR."""
    ctx.obj = Console(verbosity)
    ctx.color = _color()


def current() -> Console:
    """The console of the command that is running."""
    ctx = click.get_current_context(silent=True)
    return (ctx.find_object(Console) if ctx is not None else None) or Console()


def _color() -> bool | None:
    """False where colours are not wanted; None leaves it to click, which asks whether the stream is a terminal."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def style(text: str, color: Literal["red", "yellow", "green", "cyan"]) -> str:
    """Colour a word; click takes the colour out again where it is not wanted."""
    return click.style(text, fg=color, bold=color != "cyan")


def print_error(error: SmpkitError) -> None:
    """Print what happened and what to try; a ConfigError with all its problems, the count last, where the eye rests."""
    if isinstance(error, ConfigError):
        print_problems(error.problems)
        count = "1 problem" if len(error.problems) == 1 else f"{len(error.problems)} problems"
        print_failure(f"{count} in the {error.subject}", error.hint)
    else:
        print_failure(error.message, error.hint)


def print_problems(problems: Iterable[Problem]) -> None:
    """Print problems with an empty line after each."""
    for problem in problems:
        click.echo(_with_hint_styled(str(problem)) + "\n", err=True, color=_color())


def print_failure(message: str, hint: str | None = None) -> None:
    """Print the two lines that every error has."""
    click.echo(f"{style('error:', 'red')} {message}", err=True, color=_color())
    if hint is not None:
        click.echo(f"{style('hint:', 'cyan')} {hint}", err=True, color=_color())


def _with_hint_styled(text: str) -> str:
    before, mark, after = text.rpartition("\n    hint: ")
    return f"{before}\n    {style('hint:', 'cyan')} {after}" if mark else text
