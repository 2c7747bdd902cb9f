"""How a managed job is shown: its state in a sentence, its end with the reason, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli._layout import fold, width
from smpkit.config.words import printable
from smpkit.errors import UnsupportedError

if TYPE_CHECKING:
    from smpkit_estimator.job import Job
    from smpkit_estimator.status import JobStatus

__all__ = [
    "local_time",
    "newest_checkpoint",
    "show_end",
    "status_json",
    "status_lines",
]


def status_lines(status: JobStatus) -> Iterator[str]:
    """Yield the state of a job, the most important first."""
    from smpkit.config.words import duration

    yield _headline(status)
    if status.failure is not None:
        yield from ("", *_reason(status), "")
    machines = " + ".join(f"{hosts.instance_count} × {hosts.instance_type}" for hosts in status.machines)
    machines += " (spot)" if status.spot else ""
    billable = duration(status.billable_so_far)
    yield f"machines    {machines}, {'' if status.over else 'so far '}{billable} billable each"
    if status.interruptions:
        yield f"interrupted {status.interruptions} time{'s' * (status.interruptions != 1)}"
    shown = [phase for phase in status.phases if phase.end is None or phase.end > phase.start]
    phases = [f"{phase.name} {duration(phase.seconds(status.seen))}" for phase in shown]
    yield from fold("phases      ", phases, width(), " · ")
    if status.succeeded and status.model_data:
        yield f"model       {status.model_data}"
    if status.checkpoints:
        yield f"checkpoints {status.checkpoints}"
    for name, value in status.metrics.items():
        yield f"metric      {name} = {value:g}"


def _headline(status: JobStatus) -> str:
    from smpkit.config.words import duration

    length = duration(status.seconds)
    if status.succeeded:
        return f"{_console.style('Completed', 'green')} after {length}"
    if status.status == "Failed":
        failure = status.failure
        ranked = failure is not None and failure.rank is not None
        place = f" (rank {failure.rank} on {failure.host}, exit {failure.exit_code})" if failure and ranked else ""
        return f"{_console.style('Failed', 'red')} after {length}{place}"
    if status.over:
        why = "" if status.phase == status.status else f" ({status.phase})"
        return f"{_console.style(status.status, 'yellow')} after {length}{why}"
    return (
        f"{_console.style(status.phase, 'cyan')} for {duration(_phase_seconds(status))}, {length} since it was created"
    )


def _phase_seconds(status: JobStatus) -> float:
    return status.phases[-1].seconds(status.seen) if status.phases else status.seconds


def _reason(status: JobStatus) -> Iterator[str]:
    assert status.failure is not None
    for line in (*status.failure.headline.splitlines(), *status.failure.details):
        yield f"    {printable(line)}"


def show_end(status: JobStatus) -> int:
    """Say how a job ended and what to do next; return the exit code."""
    from smpkit.config.words import duration

    console = _console.current()
    console.note(_headline(status))
    if status.failure is not None:
        console.note("\n".join(("", *_reason(status), "")))
        hint_of(status)
        return 1
    if status.succeeded:
        console.note(f"{duration(status.billable_so_far)} billable for each of {status.instance_count} instances")
        return 0
    return 1


def newest_checkpoint(job: Job, *, found: str, none: str) -> str:
    """Say which checkpoint of a job is the newest: `found` and its place, `none`, or why nobody here can tell."""
    try:
        newest = job.latest_checkpoint
    except UnsupportedError as error:
        return error.message
    return f"{found}{newest}" if newest else none


def hint_of(status: JobStatus) -> None:
    """Say the one thing to do about a failed job."""
    if status.failure is None:
        return
    if status.failure.hint:
        _console.current().hint(printable(status.failure.hint))
    elif status.failure.rank is not None:
        _console.current().hint(f"`smpkit logs {status.name} --rank {status.failure.rank} --tail 50`")
    else:
        _console.current().hint(f"`smpkit logs {status.name} --tail 50`")


def status_json(status: JobStatus) -> dict[str, Any]:
    """Return all of a status as JSON has it: times in UTC, lengths in seconds."""
    plain: dict[str, Any] = _plain(asdict(replace(status, raw={})))
    del plain["raw"]
    kinds = {machines.instance_type for machines in status.machines}
    plain |= {"instance_type": kinds.pop() if len(kinds) == 1 else None, "instance_count": status.instance_count}
    return plain | {"over": status.over, "seconds": status.seconds, "interruptions": status.interruptions}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value


def local_time(time: datetime) -> str:
    """Show a time in the local time zone."""
    return time.astimezone().strftime("%Y-%m-%d %H:%M")


def echo_all(lines: Iterator[str]) -> None:
    """Print lines to stdout."""
    for line in lines:
        click.echo(line)
