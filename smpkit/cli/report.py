"""`smpkit report`: a run as one HTML file, or two side by side."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._backend import BackendChoice, backend_options
from smpkit.cli._files import write_file
from smpkit.cli._run_completion import complete_run

if TYPE_CHECKING:
    from smpkit.observe.report.data import Content
    from smpkit.observe.runs import Run

__all__ = ["report"]


@click.command()
@click.argument("name", metavar="[RUN]", required=False, shell_complete=complete_run)
@click.argument("other", metavar="[RUN2]", required=False, shell_complete=complete_run)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write it. Default: report.html in the folder of the run.",
)
@click.option("--open", "opens", is_flag=True, help="Show it in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print what it shows as JSON, and write no file.")
@backend_options
def report(
    name: str | None, other: str | None, output: Path | None, opens: bool, as_json: bool, chosen: BackendChoice
) -> None:
    """Write a run as one HTML file, or two side by side.

    It shows the summary, logged values, throughput, one step in detail (schedule as planned and as run, memory by kind,
    offloading), messages between ranks, and what the run was: configuration, environment, warnings. RUN is a run's
    name, its folder, a job's name for the last one of it, or any folder with events; without it, it is the last run
    below this folder. With RUN2 the differences come first.

    With `--backend`, RUN is the name of a job there, and the report is written to the current folder.
    """
    from smpkit.observe.report.data import content_of
    from smpkit.observe.report.view import page

    wanted = (name, other) if other is not None else (name,)
    with contextlib.ExitStack() as stack:
        runs = [_run(each, chosen, stack) for each in wanted]
        contents = [content_of(run) for run in runs]
    if as_json:
        shown = [asdict(each) for each in contents]
        click.echo(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
        return
    _warn(contents)
    elsewhere = chosen.name is not None and name is not None
    path = output or (Path(f"report-{runs[-1].name}.html") if elsewhere else runs[-1].path / "report.html")
    write_file(path, page(contents), "report")
    click.echo(str(path))
    if opens:
        click.launch(path.absolute().as_uri())


def _run(name: str | None, chosen: BackendChoice, stack: contextlib.ExitStack) -> Run:
    """Open a run of this machine, or the folder that a job of a back end has left, of which a copy may be made."""
    from smpkit.observe.runs import open_run

    if chosen.name is None or name is None:
        return open_run(name)
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smpkit-run-")))
    return replace(open_run(str(chosen.open().results(name, copy))), name=name)


def _warn(contents: list[Content]) -> None:
    """Say what was not recorded: who sends a report should know before."""
    console = _console.current()
    for content in contents:
        if "events" in content.missing:
            console.warn(f"{content.folder}: {content.missing['events']}")
