"""`smpkit report`: a run as one HTML file, or two side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._files import write_file
from smpkit.cli._run_completion import complete_run

if TYPE_CHECKING:
    from smpkit.observe.report.content import Content

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
def report(name: str | None, other: str | None, output: Path | None, opens: bool, as_json: bool) -> None:
    """Write a run as one HTML file, which needs no network to be read; or two runs side by side.

    It shows the summary, logged values, throughput, one step in detail (schedule as planned and as run, memory by kind,
    offloading), messages between ranks, and what the run was: configuration, environment, warnings. RUN is a run's
    name, its folder, a job's name for the last one of it, or any folder with events; without it, it is the last run
    below this folder. With RUN2 the differences come first.
    """
    from smpkit.observe.report.content import content_of, plain
    from smpkit.observe.report.folder import read_material
    from smpkit.observe.report.page import page
    from smpkit.observe.runs import open_run

    runs = [open_run(each) for each in ((name, other) if other is not None else (name,))]
    contents = [content_of(read_material(run)) for run in runs]
    if as_json:
        shown = [plain(each) for each in contents]
        click.echo(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
        return
    _warn(contents)
    path = output or runs[-1].path / "report.html"
    write_file(path, page(contents), "report")
    click.echo(str(path))
    if opens:
        click.launch(path.absolute().as_uri())


def _warn(contents: list[Content]) -> None:
    """Say what was not recorded: who sends a report should know before."""
    console = _console.current()
    for content in contents:
        if "events" in content.missing:
            console.warn(f"{content.folder}: {content.missing['events']}")
