"""`smpkit logs`: what the ranks of a run on this machine, or of a managed job, printed."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from smpkit.cli import _console
from smpkit.cli.options import ACCESS, OF_A_JOB, BackendChoice, backend_options, length, refuse
from smpkit.cli.status import show_end
from smpkit.config.words import coloured
from smpkit.errors import SmpkitError, UsageError
from smpkit.observe.runs import LOGS, SUMMARY, Run, find_runs, is_held, last_run, open_run

if TYPE_CHECKING:
    from smpkit_estimator.backend import LogLine
    from smpkit_estimator.follow import Notice
    from smpkit_estimator.job import Job

_HOST_COLORS: Final = ("cyan", "green", "yellow", "magenta", "blue", "red")
_MERGED: Final = "launcher.log"
"""All that a run printed, in its order, each line of a rank after `[rank 3] `."""
_OF_RANK: Final = re.compile(r"\[rank (\d+)\] (.*)", re.DOTALL)
_POLL_SECONDS: Final = 0.3


@click.command()
@click.argument("job", metavar="[JOB|RUN]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over. Ctrl-C never stops the job.")
@click.option("--tail", type=click.IntRange(0, 10**9), metavar="N", help="Begin with the last N lines of each host.")
@click.option("--since", type=length, metavar="LENGTH", help="Only lines of the last `90s`, `10m`, `2h`, `1d`.")
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
    name, and any beside `--backend`, is that of a managed job.

    Of a managed job, lines are merged by time, each after its host. Streams of later attempts (after a spot
    interruption) belong to it. It warns if the log may be incomplete.
    """
    try:
        re.compile(grep or "")
    except re.error as error:
        raise UsageError(f"`--grep {grep}` is not a regular expression: {error}") from None
    if job is None:
        refuse(ACCESS, *OF_A_JOB)
    run = None if chosen.asked else _run_here(job)
    if run is not None:
        why = "for a run on this machine, whose log is without times and hosts"
        refuse(("since", "hosts"), why, "use --tail or --rank")
        for line in _lines_of_run(run, ranks, grep, tail, follow=follow):
            _print_json(line) if as_json else click.echo(coloured(line))
        return 0
    from smpkit_estimator.job import Job

    handle = Job(str(job), chosen.open())
    lines = handle.logs(follow=follow, tail=tail, since=since, ranks=ranks, hosts=hosts, grep=grep)
    if follow:
        return follow_job(handle, lines, as_json=as_json)
    _print(lines, as_json=as_json)
    return 0


# ---- of a managed job ------------------------------------------------------------------------------------------------


def follow_job(job: Job, lines: Iterable[LogLine | Notice], *, as_json: bool = False) -> int:
    """Show a job's lines until it is over, and its end; return the exit code. Ctrl-C ends the showing, not the job."""
    try:
        _print(lines, as_json=as_json)
    except KeyboardInterrupt:
        _console.note(f"\n`{job.name}` goes on; this only stopped following it")
        _console.hint(f"`smpkit logs -f {job.name}` follows it again, `smpkit stop {job.name}` stops it")
        return 130
    return show_end(job.status())


def _print(lines: Iterable[LogLine | Notice], *, as_json: bool) -> None:
    """Print lines to stdout, each with its host, and notices to stderr; without control characters."""
    from smpkit_estimator.follow import Notice

    colors: dict[str, str] = {}
    for line in lines:
        if isinstance(line, Notice):
            (_console.warn if line.warning else _console.note)(coloured(line.text))
        elif as_json:
            plain = {"time": line.time, "host": line.host, "rank": line.rank, "text": line.text}
            _console.print_json(plain, indent=None)
        else:
            color = colors.setdefault(line.host, _HOST_COLORS[len(colors) % len(_HOST_COLORS)])
            click.echo(f"{click.style(line.host, fg=color)} {coloured(line.text)}")


# ---- of a run on this machine ----------------------------------------------------------------------------------------


def _run_here(name: str | None) -> Run | None:
    """Return the run of this name or folder, if there is one here; a job's name alone means the managed job."""
    if name is None:
        return last_run(Path.cwd())
    if "/" in name:
        return open_run(name)
    return next((run for run in find_runs(Path.cwd()) if run.label == name), None)


def _lines_of_run(
    run: Run, ranks: tuple[int, ...], grep: str | None, tail: int | None, *, follow: bool
) -> Iterator[str]:
    """Yield lines of a run's log, without their ends."""
    folder = run.path / LOGS
    if not (folder / _MERGED).is_file():
        raise SmpkitError(f"`{run.label}` has no log", hint="the ranks of that run were not started")
    known = sorted(int(path.stem.removeprefix("rank-")) for path in folder.glob("rank-*.log"))
    for rank in ranks:
        if rank not in known:
            hint = f"it has logs of ranks {', '.join(map(str, known))}" if known else "its ranks printed nothing"
            raise SmpkitError(f"`{run.label}` has no log of rank {rank}", hint=hint)

    def wanted(line: str) -> bool:
        rank, text = _rank_and_text(line)
        return (not ranks or rank in ranks) and (grep is None or re.search(grep, text) is not None)

    with (folder / _MERGED).open("rb") as file:
        lines = filter(wanted, _read(file, unfinished=not follow))
        yield from lines if tail is None else deque(lines, maxlen=tail)
        while follow:
            over = _is_over(run.path)  # asked first: what was written before the end is still read
            yield from filter(wanted, _read(file, unfinished=over))
            if over:
                return
            time.sleep(_POLL_SECONDS)


def _read(file: BinaryIO, *, unfinished: bool) -> Iterator[str]:
    """Yield what is new in a file, line by line; with `unfinished` also a last line that has no end yet."""
    while line := file.readline():
        if not (unfinished or line.endswith(b"\n")):
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line.decode(errors="replace").rstrip("\n")


def _is_over(folder: Path) -> bool:
    """Tell whether a run has ended: its command outlives rank 0, and may be killed before there is a summary."""
    held = is_held(folder)
    return (folder / SUMMARY).is_file() if held is None else not held


def _print_json(line: str) -> None:
    rank, text = _rank_and_text(line)
    _console.print_json({"rank": rank, "text": text}, indent=None)


def _rank_and_text(line: str) -> tuple[int | None, str]:
    match = _OF_RANK.fullmatch(line)
    return (int(match[1]), match[2]) if match else (None, line)
