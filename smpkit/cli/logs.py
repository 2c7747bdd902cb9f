"""`smpkit logs`: what the ranks of a run on this machine, or of a managed job, printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli._backend import BackendChoice, backend_options, follow_job, print_lines
from smpkit.cli._local_logs import Choice, print_local
from smpkit.cli._run_completion import complete_run
from smpkit.cli._time import LENGTH
from smpkit.config.words import coloured
from smpkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from smpkit.observe.runs import Run
    from smpkit_estimator.backend import LogLine
    from smpkit_estimator.follow import Notice

__all__ = ["logs"]


@click.command()
@click.argument("job", metavar="[JOB|RUN]", required=False, shell_complete=complete_run)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over. Ctrl-C never stops the job.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Begin with the last N lines of each host.")
@click.option("--since", type=LENGTH, metavar="LENGTH", help="Only lines of the last `90s`, `10m`, `2h`, `1d`.")
@click.option("--rank", "ranks", type=click.IntRange(0), multiple=True, help="Only lines of this rank; repeatable.")
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="Only this host, as `algo-2`; repeatable.")
@click.option("--grep", metavar="PATTERN", help="Only lines that match this regular expression.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each line.")
@backend_options
def logs(
    job: str | None,
    follow: bool,
    tail: int | None,
    since: timedelta | None,
    ranks: tuple[int, ...],
    hosts: tuple[str, ...],
    grep: str | None,
    as_json: bool,
    chosen: BackendChoice,
) -> int:
    """Print the log of a run or a job, by rank or host if asked.

    Without an argument it is the last run below this folder; a name or folder of a run is looked for there, any other
    name is that of a managed job.

    Of a managed job, lines are merged by time, each after its host. Streams of later attempts (after a spot
    interruption) belong to it. What may be incomplete is said.
    """
    try:
        re.compile(grep or "")
    except re.error as error:
        raise UsageError(f"`--grep {grep}` is not a regular expression: {error}") from None
    run = _local_run(job)
    if run is not None or job is None:
        from smpkit.observe.runs import last_run

        if since is not None or hosts:
            raise UsageError("a run on this machine has a log without times and hosts", hint="use --tail or --rank")
        return print_local(run or last_run(Path.cwd()), Choice(ranks, grep, tail, follow, as_json))
    from smpkit_estimator.job import Job

    handle = Job(job, chosen.open())
    lines = handle.logs(follow=follow, tail=tail, since=since, ranks=ranks, hosts=hosts, grep=grep)
    show = _print_json if as_json else print_lines
    if follow:
        return follow_job(handle, lambda: show(lines))
    show(lines)
    return 0


def _local_run(name: str | None) -> Run | None:
    """Return the run of this name or folder, if there is one here; a job's name alone means the managed job."""
    from smpkit.observe.runs import find_runs, open_run

    if name is None:
        return None
    if "/" in name:
        return open_run(name)
    return next((run for run in find_runs(Path.cwd()) if run.label == name), None)


def _print_json(lines: Iterator[LogLine | Notice]) -> None:
    from smpkit.cli import _console
    from smpkit_estimator.follow import Notice

    for line in lines:
        if isinstance(line, Notice):
            _console.current().note(coloured(line.text))
            continue
        plain = {"time": line.time.isoformat(), "host": line.host, "rank": line.rank, "text": line.text}
        click.echo(json.dumps(plain))
