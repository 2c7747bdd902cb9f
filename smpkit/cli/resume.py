"""`smpkit resume`: a new job that goes on from the checkpoints of an old one."""

from __future__ import annotations

import json

import click

from smpkit.cli import _console
from smpkit.cli._backend import BackendChoice, backend_options, follow_job, tell_if_interrupted
from smpkit.errors import UsageError

__all__ = ["resume"]


def _refuse_elsewhere(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value is not None:
        message = "a job goes on with other settings, or elsewhere, from a job file"
        raise UsageError(message, hint="`smpkit submit job.yaml --set checkpoints=PLACE`, the place that both see")


@click.command()
@click.argument("job")
@click.option("--name", metavar="NAME", help="Name of the new job. Default: that of JOB with another time.")
@click.option("--instance-count", type=click.IntRange(1), help="So many hosts instead.")
@click.option("--instance-type", metavar="TYPE", help="Another kind of machine.")
@click.option("--max-run-seconds", type=click.IntRange(1), help="Another limit for the running time.")
@click.option("--with", "--to", "--set", hidden=True, expose_value=False, callback=_refuse_elsewhere)
@click.option("--dry-run", is_flag=True, help="Print the request that would be sent, and send nothing.")
@click.option("-f", "--follow", is_flag=True, help="Show the log until the job is over; the exit code is its fate.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@backend_options
def resume(
    job: str,
    name: str | None,
    instance_count: int | None,
    instance_type: str | None,
    max_run_seconds: int | None,
    dry_run: bool,
    follow: bool,
    as_json: bool,
    chosen: BackendChoice,
) -> int:
    """Start a job that goes on from another's checkpoints.

    It has the same image, sources, data and settings as JOB. To go on with others, or on another back end, submit a job
    file whose `checkpoints` are those of JOB.
    """
    from smpkit.cli._show import newest_checkpoint
    from smpkit_estimator.job import Job

    backend = chosen.open()
    old = Job(job, backend)
    given = {
        "InstanceCount": instance_count,
        "InstanceType": instance_type,
        "MaxRuntimeInSeconds": max_run_seconds,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    plan = old.resumed(name, changes)
    console = _console.current()
    for note in plan.notes:
        console.note(f"note: {note}")
    if dry_run:
        click.echo(json.dumps(plan.shown, indent=2))
        return 0
    none = "No checkpoint there yet: starting from the beginning"
    console.note(newest_checkpoint(old, found="Resuming from ", none=none))
    started = Job(plan.name, backend)
    with tell_if_interrupted(started):
        result = backend.submit(plan)
    shown = {"name": started.name, "arn": result["arn"], "resumed_from": job}
    click.echo(json.dumps(shown) if as_json else started.name)
    if follow:
        return follow_job(started)
    console.note(f"Follow with `smpkit logs -f {started.name}`, stop with `smpkit stop {started.name}`")
    return 0
