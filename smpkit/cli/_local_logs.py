"""`smpkit logs` of a run on this machine: from the files in its folder."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from smpkit.config.words import coloured
from smpkit.errors import SmpkitError

if TYPE_CHECKING:
    from smpkit.observe.runs import Run

__all__ = ["Choice", "print_local"]

_MERGED: Final = "launcher.log"
"""All that the run printed, in its order, each line of a rank after `[rank 3] `."""
_OF_RANK: Final = re.compile(r"\[rank (\d+)\] (.*)", re.DOTALL)
_POLL_SECONDS: Final = 0.3


@dataclass(frozen=True)
class Choice:
    """Which lines are wanted."""

    ranks: tuple[int, ...] = ()
    grep: str | None = None
    tail: int | None = None
    follow: bool = False
    as_json: bool = False


def print_local(run: Run, choice: Choice) -> int:
    """Print the log of a run.

    Raises:
        SmpkitError: it has none, or none of a rank.
    """
    folder = run.path / "logs"
    merged = folder / _MERGED
    if not merged.is_file():
        raise SmpkitError(f"`{run.label}` has no log", hint="the ranks of that run were not started")
    for rank in choice.ranks:
        if not (folder / f"rank-{rank}.log").is_file():
            known = sorted(int(path.stem.removeprefix("rank-")) for path in folder.glob("rank-*.log"))
            raise SmpkitError(
                f"`{run.label}` has no log of rank {rank}",
                hint=f"it has logs of ranks {', '.join(map(str, known))}" if known else "its ranks printed nothing",
            )
    with merged.open(encoding="utf-8", errors="replace") as file:
        lines: Iterable[str] = (line for line in file if _wanted(line, choice))
        if choice.tail is not None:
            lines = deque(lines, maxlen=choice.tail)
        for line in lines:
            _print(line, choice)
        if choice.follow:
            for line in _coming(run, file):
                if _wanted(line, choice):
                    _print(line, choice)
    return 0


def _coming(run: Run, file: Iterable[str]) -> Iterator[str]:
    """Yield lines as they are written, until the run is over."""
    while True:
        over = _is_over(run.path)  # asked first: what was written before the end is still read
        yield from file
        if over:
            return
        time.sleep(_POLL_SECONDS)


def _is_over(folder: Path) -> bool:
    from smpkit.observe.summary import SummaryError, read_summary

    try:
        return read_summary(folder).exit_reason != "running"
    except SummaryError:
        return False


def _wanted(line: str, choice: Choice) -> bool:
    match = _OF_RANK.match(line)
    if choice.ranks and (match is None or int(match[1]) not in choice.ranks):
        return False
    return choice.grep is None or re.search(choice.grep, match[2] if match else line) is not None


def _print(line: str, choice: Choice) -> None:
    text = line.rstrip("\n")
    if choice.as_json:
        match = _OF_RANK.fullmatch(text)
        text = json.dumps({"rank": int(match[1]) if match else None, "text": match[2] if match else text})
        click.echo(text)
    else:
        click.echo(coloured(text))
