"""`smpkit status`: what a managed job is doing, or why it failed."""

from __future__ import annotations

import json

import click

from smpkit.cli import _console
from smpkit.cli._cloud import CloudChoice, cloud_options

__all__ = ["status"]


@click.command()
@click.argument("job")
@click.option("-w", "--watch", is_flag=True, help="Show every phase as it comes, until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON; with --watch one line for each phase.")
@cloud_options
def status(job: str, watch: bool, as_json: bool, cloud: CloudChoice) -> int:
    """Show what a job is doing, or why it failed.

    Phase, time and billable time so far; after a failure the first failing rank's exception.
    """
    from smpkit.cli._show import echo_all, hint_of, status_json, status_lines
    from smpkit_container.failure import duration
    from smpkit_estimator.job import Job
    from smpkit_estimator.status import JobStatus

    handle = Job(job, cloud.open())

    def changed(state: JobStatus) -> None:
        if as_json:
            click.echo(json.dumps(status_json(state)))
        elif not state.over:
            _console.current().note(f"{duration(state.seconds):>9}  {state.phase}: {state.message}")

    if not watch:
        state = handle.status()
        if as_json:
            click.echo(json.dumps(status_json(state), indent=2))
            return 0
    else:
        try:
            state = handle.wait(on_change=changed)
        except KeyboardInterrupt:
            _console.current().note(f"\n`{job}` goes on; `smpkit stop {job}` stops it")
            return 130
        if as_json:
            return 0
    echo_all(status_lines(state))
    hint_of(state)
    return 0
