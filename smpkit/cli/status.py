"""`smpkit status`: what a managed job is doing, or why it failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli.options import BackendChoice, backend_options
from smpkit.config.words import duration, printable
from smpkit.errors import UnsupportedError
from smpkit.units import things

if TYPE_CHECKING:
    from smpkit_estimator.job import Job
    from smpkit_estimator.status import JobStatus


@click.command()
@click.argument("job")
@click.option("-w", "--watch", is_flag=True, help="Show each phase until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON; with --watch one line for each phase.")
@backend_options
def status(job: str, watch: bool, as_json: bool, chosen: BackendChoice) -> int:
    """Show what a job is doing, or why it failed.

    Phase, time and billable time so far; after a failure the first failing rank's exception.

    With --watch each phase is a line until the job is over, and then the exit code is 0 if the job completed, and 1 if
    it failed or was stopped.
    """
    from smpkit_estimator.job import Job

    handle = Job(job, chosen.open())
    try:
        state = handle.wait(on_change=_print_json if as_json else _say_phase) if watch else handle.status()
    except KeyboardInterrupt:
        _console.note(f"\n`{job}` goes on; `smpkit stop {job}` stops it")
        return 130
    if not as_json:
        click.echo("\n".join(_lines(state)))
        _hint(state)
    elif not watch:
        _print_json(state, indent=2)
    return 1 if watch and not state.succeeded else 0


def newest_checkpoint(job: Job, *, before: str, none: str) -> str:
    """Say which checkpoint of a job is the newest: `before` and its place, `none`, or why nobody here can tell."""
    try:
        newest = job.latest_checkpoint
    except UnsupportedError as error:
        return error.message
    return f"{before}{newest}" if newest else none


def wait_for_job(job: Job) -> int:
    """Wait for a job, saying each phase, and show its end; return the exit code. Ctrl-C ends only the waiting."""
    try:
        return show_end(job.wait(on_change=_say_phase))
    except KeyboardInterrupt:
        _console.note(f"\n`{job.name}` goes on; `smpkit stop {job.name}` stops it")
        return 130


def _say_phase(state: JobStatus) -> None:
    if not state.over:
        _console.note(f"{duration(state.seconds):>9}  {state.phase}: {printable(state.message)}")


def show_end(state: JobStatus) -> int:
    """Say how a job ended and what to do next; return the exit code."""
    _console.note(_headline(state))
    if state.failure is not None:
        _console.note("\n".join(("", *_reason(state), "")))
        _hint(state)
    elif state.succeeded:
        _console.note(f"{duration(state.billable_so_far)} billable for each of {state.instance_count} instances")
    return 0 if state.succeeded else 1


# ---- a state in words, and as JSON -----------------------------------------------------------------------------------


def _lines(state: JobStatus) -> Iterator[str]:
    """Yield the state of a job, the most important first."""
    yield _headline(state)
    if state.failure is not None:
        yield from ("", *_reason(state), "")
    machines = " + ".join(f"{hosts.instance_count} × {hosts.instance_type}" for hosts in state.machines)
    machines += " (spot)" if state.spot else ""
    yield f"machines    {machines}, {'' if state.over else 'so far '}{duration(state.billable_so_far)} billable each"
    if state.interruptions:
        yield f"interrupted {things(state.interruptions, 'time')}"
    shown = [phase for phase in state.phases if phase.end is None or phase.end > phase.start]
    phases = [f"{phase.name} {duration(phase.seconds(state.seen))}" for phase in shown]
    yield from _console.fold("phases      ", phases, _console.width(), " · ")
    if state.succeeded and state.model_data:
        yield f"model       {state.model_data}"
    if state.checkpoints:
        yield f"checkpoints {state.checkpoints}"
    for name, value in state.metrics.items():
        yield f"metric      {name} = {value:g}"


def _headline(state: JobStatus) -> str:
    length = duration(state.seconds)
    if state.succeeded:
        return f"{_console.style('Completed', 'green')} after {length}"
    if state.status == "Failed":
        failure = state.failure
        ranked = failure is not None and failure.rank is not None
        place = f" (rank {failure.rank} on {failure.host}, exit {failure.exit_code})" if failure and ranked else ""
        return f"{_console.style('Failed', 'red')} after {length}{place}"
    if state.over:
        why = "" if state.phase == state.status else f" ({state.phase})"
        return f"{_console.style(state.status, 'yellow')} after {length}{why}"
    in_phase = duration(state.phases[-1].seconds(state.seen)) if state.phases else length
    return f"{_console.style(state.phase, 'cyan')} for {in_phase}, {length} since it was created"


def _reason(state: JobStatus) -> Iterator[str]:
    assert state.failure is not None
    for line in (*state.failure.headline.splitlines(), *state.failure.details):
        yield f"    {printable(line)}"


def _hint(state: JobStatus) -> None:
    """Say the one thing to do about a failed job."""
    failure = state.failure
    if failure is None:
        return
    rank = "" if failure.rank is None else f" --rank {failure.rank}"
    _console.hint(printable(failure.hint) if failure.hint else f"`smpkit logs {state.name}{rank} --tail 50`")


def _print_json(state: JobStatus, indent: int | None = None) -> None:
    """Print all of a state: times in UTC, lengths in seconds."""
    kinds = {machines.instance_type for machines in state.machines}
    plain = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "raw"} | {
        "instance_type": kinds.pop() if len(kinds) == 1 else None,
        "instance_count": state.instance_count,
        "over": state.over,
        "seconds": state.seconds,
        "interruptions": state.interruptions,
    }
    _console.print_json(plain, indent=indent)
