"""`smpkit runs`: what ran here, how it ended, and how fast."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from smpkit.cli import _console
from smpkit.cli._console import table, width
from smpkit.cli.options import refuse
from smpkit.errors import UsageError
from smpkit.observe.runs import EVENTS, JOB, LOGS, SUMMARY, VALUES, Run, find_runs, is_held, open_run
from smpkit.observe.values import read_values
from smpkit.units import amount, count

if TYPE_CHECKING:
    from smpkit.observe.summary import RunSummary

_NOTHING: Final = "–"
_OTHER_COLUMNS: Final = 56
"""About how wide a row is without how the run ended."""


@click.command()
@click.argument("name", metavar="[RUN]", required=False)
@click.option("-n", "--last", type=click.IntRange(1), default=20, help="Show at most N, the newest (20).")
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as JSON.")
def runs(name: str | None, last: int, as_json: bool) -> None:
    """List the runs below this folder, or show how one ended.

    Without RUN it lists what is in `runs` here and up to two folders below, the newest last. RUN is a run's name, its
    folder, or a job's name for the last one of it: of that it prints the block that the run ended with. `smpkit report`
    compares two.
    """
    if name is not None:
        refuse(("last",), "beside the name of a run", "remove one of them")
        if not any((open_run(name).path / file).exists() for file in (JOB, EVENTS, LOGS, SUMMARY, VALUES)):
            raise UsageError(f"`{name}` is not the folder of a run", hint="`smpkit runs` lists them")
    chosen = find_runs(Path.cwd())[-last:] if name is None else (open_run(name),)
    entries = [(run, _summary(run), _last_values(run)) for run in chosen]
    if as_json:
        _console.print_json([_plain(*entry) for entry in entries])
    elif name is not None:
        click.echo("\n".join(_one(*entries[0])))
    elif entries:
        rows = [["run", "ended", "steps", "loss", "steps/s", "memory"], *(_row(*entry) for entry in entries)]
        click.echo("\n".join(table(rows, width())))
    else:
        _console.note("no runs here; `smpkit run JOB_FILE` makes one, in `runs` beside the job file")


def _summary(run: Run) -> RunSummary | None:
    """Read a summary; a run that goes on, or one that was killed with its command, has none."""
    from smpkit.observe.summary import SummaryError, read_summary

    if not (run.path / SUMMARY).is_file():
        return None
    try:
        return read_summary(run.path)
    except SummaryError as error:
        _console.warn(str(error))
        return None


def _last_values(run: Run) -> dict[str, float]:
    """Return the last value of each name that the run logged."""
    return {name: value for logged in read_values(run.path) for name, value in logged.values.items()}


def _plain(run: Run, summary: RunSummary | None, values: dict[str, float]) -> dict[str, object]:
    plain = {"run": run.label, "folder": run.path, "name": run.name, "started": run.started}
    return {**plain, "values": values, "summary": summary}


def _row(run: Run, summary: RunSummary | None, values: dict[str, float]) -> list[str]:
    loss = f"{values['loss']:.4g}" if "loss" in values else _NOTHING
    if summary is None:
        return [run.label, _state(run), _NOTHING, loss, _NOTHING, _NOTHING]
    # The class of an error tells more than the packages that it is in.
    end = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", summary.exit_reason)
    room = max(24, width() - _OTHER_COLUMNS)
    rate = _NOTHING if summary.steps_per_s is None else count(summary.steps_per_s)
    held = max((rank.most_bytes for rank in summary.ranks), default=0)
    shown = end if len(end) <= room else end[: room - 1] + "…"
    return [run.label, shown, f"{summary.steps:,}", loss, rate, amount(held) if held else _NOTHING]


def _state(run: Run) -> str:
    """Say what has become of a run without a summary: its command holds its folder for as long as it lives."""
    return {True: "running", False: "lost", None: "running or lost"}[is_held(run.path)]


def _one(run: Run, summary: RunSummary | None, values: dict[str, float]) -> Iterator[str]:
    from smpkit.observe.summary_text import block

    yield f"{run.label}: {_state(run) if summary is None else summary.exit_reason}"
    if summary is not None:
        yield from block(summary)
    if values and (summary is None or not summary.values):
        yield f"values  {', '.join(f'{name} {value:.4g}' for name, value in values.items())}"
