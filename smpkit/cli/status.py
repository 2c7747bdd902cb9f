"""`smpkit status`: what a managed job is doing, or why it failed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._cloud import CloudChoice, cloud_options
from smpkit.config.words import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smpkit_estimator.clock import Clock
    from smpkit_estimator.job import Job
    from smpkit_estimator.status import JobStatus

__all__ = ["status"]


@click.command()
@click.argument("job")
@click.option("-w", "--watch", is_flag=True, help="Keep the state up to date until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON; with --watch one line for each phase.")
@cloud_options
def status(job: str, watch: bool, as_json: bool, cloud: CloudChoice) -> int:
    """Show what a job is doing, or why it failed.

    Phase, time and billable time so far; after a failure the first failing rank's exception.

    --watch repaints it in place on a terminal; elsewhere each phase is a line.
    """
    from smpkit.cli._show import echo_all, hint_of, status_json, status_lines
    from smpkit_estimator.job import Job

    opened = cloud.open()
    handle = Job(job, opened)
    try:
        state = _watched(handle, opened.clock, as_json) if watch else handle.status()
    except KeyboardInterrupt:
        _console.current().note(f"\n`{job}` goes on; `smpkit stop {job}` stops it")
        return 130
    if as_json:
        if not watch:
            click.echo(json.dumps(status_json(state), indent=2))
        return 0
    echo_all(status_lines(state))
    hint_of(state)
    return 0


def _watched(job: Job, clock: Clock, as_json: bool) -> JobStatus:
    """Show the state until the job is over, and return how it ended."""
    from smpkit.cli._live import can_repaint

    if as_json:
        return job.wait(on_change=_print_json)
    return _repainted(job, clock) if can_repaint() else job.wait(on_change=_say_phase)


def _print_json(state: JobStatus) -> None:
    from smpkit.cli._show import status_json

    click.echo(json.dumps(status_json(state)))


def _say_phase(state: JobStatus) -> None:
    from smpkit_container.failure import duration

    if not state.over:
        _console.current().note(f"{duration(state.seconds):>9}  {state.phase}: {state.message}")


def _repainted(job: Job, clock: Clock) -> JobStatus:
    """Repaint the state in place; between two requests its elapsed times are counted on here."""
    from smpkit.cli._live import live
    from smpkit.cli._show import status_lines

    latest = job.status()

    def changed(state: JobStatus) -> None:
        nonlocal latest
        latest = state

    def lines() -> Iterator[str]:
        yield from status_lines(replace(latest, seen=clock.now()))
        if latest.message and not latest.over:
            yield f"now         {printable(latest.message)}"

    with live(lines):
        return job.wait(on_change=changed)
