"""`smpkit report`: a run as one HTML file, or two side by side."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import click

from smpkit.cli import _console
from smpkit.cli._console import write_file
from smpkit.cli.options import ACCESS, FILE, OF_A_JOB, BackendChoice, backend_options, refuse
from smpkit.observe.runs import Run, find_runs, open_run


@click.command()
@click.argument("name", metavar="[RUN]", required=False)
@click.argument("other", metavar="[RUN2]", required=False)
@click.option("-o", "--output", type=FILE, help="Where to write it. Default: report.html in the folder of the run.")
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

    With `--backend`, RUN is the name of a job there, and the report is written to the current folder. Where
    SMPKIT_BACKEND is set, so is a name of which there is no run here.
    """
    from smpkit.observe.report.data import content_of
    from smpkit.observe.report.view import page

    if as_json:
        refuse(("output", "opens"), "beside `--json`, which writes no file", "remove one of them")
    with contextlib.ExitStack() as stack:
        opened = [_open(run, chosen, stack) for run in ((name,) if other is None else (name, other))]
        contents = [content_of(run) for run, _ in opened]
    if as_json:
        _console.print_json(contents[0] if other is None else contents)
        return
    for content in contents:
        if "events" in content.missing:  # who sends a report should know before
            _console.warn(f"{content.folder}: {content.missing['events']}")
    path = output or opened[-1][1]
    write_file(path, page(contents), "report")
    click.echo(str(path))
    if opens:
        click.launch(path.absolute().as_uri())


def _open(name: str | None, chosen: BackendChoice, stack: contextlib.ExitStack) -> tuple[Run, Path]:
    """Return a run of this machine, or what a job of a back end has left; and where its report goes."""
    is_elsewhere = chosen.asked
    if name is None:
        refuse(ACCESS, *OF_A_JOB)
    if not is_elsewhere and chosen.name is not None and name is not None:
        is_elsewhere = "/" not in name and all(run.label != name for run in find_runs(Path.cwd()))
    if name is None or not is_elsewhere:
        run = open_run(name)
        return run, run.path / "report.html"
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smpkit-run-")))
    return replace(open_run(str(chosen.open().results(name, copy))), name=name), Path(f"report-{name}.html")
