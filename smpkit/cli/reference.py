"""Write the reference of the command line from its own help: `python -m smpkit.cli.reference [--check] [FILE]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click

from smpkit.cli.main import COMMANDS, cli
from smpkit.config._page import write_or_check

__all__ = ["DEFAULT_PATH", "main", "reference"]

DEFAULT_PATH = Path("docs/reference/cli.md")

_WIDTH = 100

_INTRODUCTION = """\
<!-- Written by `python -m smpkit.cli.reference`. Change the help texts in smpkit/cli instead of this file. -->

# Command line

Data goes to stdout and talk to stderr, so a command can stand in a pipe; `--json` prints data for programs. Colours
and moving lines are for terminals only, and never where `NO_COLOR` is set. A problem with what you gave is one
sentence, with a hint, never a traceback.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the job or the operation failed, or a check found problems |
| 2 | invalid input: the command, an argument, a file; nothing was started |
| 3 | a bug in smpkit: the only case with a traceback |
| 4 | the cloud refused, or could not be reached |
| 130 | Ctrl-C; a managed job goes on |
"""


def reference() -> str:
    """Return the page."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    for section, entries in groupby(COMMANDS.items(), key=lambda item: item[1].section):
        yield f"## {section}\n"
        for name, _ in entries:
            yield f"### `smpkit {name}`\n"
            yield f"```text\n{_help_of(name)}\n```\n"


def _help_of(name: str) -> str:
    settings = {**cli.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = click.Context(cli, info_name="smpkit", **settings)
    command = cli.get_command(context, name)
    assert command is not None
    lines = command.get_help(click.Context(command, parent=context, info_name=name)).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or with `--check` only say whether it is up to date."""
    return write_or_check(arguments, "smpkit.cli.reference", DEFAULT_PATH, reference)


if __name__ == "__main__":
    sys.exit(main())
