"""`smpkit wait`: wait for a managed job; the exit code is its fate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._backend import BackendChoice, backend_options
from smpkit.cli._time import LENGTH

if TYPE_CHECKING:
    from datetime import timedelta

    from smpkit_estimator.job import Job

__all__ = ["wait", "wait_for"]


@click.command()
@click.argument("job")
@click.option("--timeout", type=LENGTH, metavar="LENGTH", help="Give up after `30m`, `12h`; the job goes on.")
@click.option("--json", "as_json", is_flag=True, help="Print how it ended as JSON.")
@backend_options
def wait(job: str, timeout: timedelta | None, as_json: bool, chosen: BackendChoice) -> int:
    """Wait for a job; the exit code is its fate.

    It is 0 if JOB completed, 1 if it failed or was stopped.
    """
    from smpkit_estimator.job import Job

    return wait_for(Job(job, chosen.open()), timeout, as_json=as_json)


def wait_for(job: Job, timeout: timedelta | None = None, *, as_json: bool = False) -> int:
    """Wait, saying every phase, and return the exit code."""
    from smpkit.cli._show import show_end, status_json

    console = _console.current()
    seconds = timeout.total_seconds() if timeout is not None else None
    try:
        status = job.wait(
            seconds, lambda state: None if state.over else console.note(f"{state.phase}: {state.message}")
        )
    except KeyboardInterrupt:
        console.note(f"\n`{job.name}` goes on; `smpkit stop {job.name}` stops it")
        return 130
    if as_json:
        click.echo(json.dumps(status_json(status), indent=2))
    return show_end(status)
