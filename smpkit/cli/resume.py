"""`smpkit resume`: a new job that goes on from the checkpoints of an old one."""

from __future__ import annotations

import click

from smpkit.cli.options import HOSTS, BackendChoice, backend_options
from smpkit.cli.status import newest_checkpoint
from smpkit.cli.submit import start, start_options


@click.command()
@click.argument("job")
@click.option("--name", metavar="NAME", help="Name of the new job. Default: that of JOB with another time.")
@click.option("--instance-count", type=HOSTS, help="Use this many hosts instead.")
@click.option("--instance-type", metavar="TYPE", help="Another kind of machine.")
@click.option("--max-run-seconds", type=click.IntRange(1), help="Another limit for the running time.")
@start_options
@backend_options
def resume(
    job: str,
    name: str | None,
    instance_count: int | None,
    instance_type: str | None,
    max_run_seconds: int | None,
    chosen: BackendChoice,
    **options: bool,
) -> int:
    """Start a job that goes on from another's checkpoints.

    It has the same image, sources, data and settings as JOB. To go on with others, or on another back end, submit a job
    file whose `checkpoints` are those of JOB.
    """
    from smpkit_estimator.job import Job

    backend = chosen.open()
    old = Job(job, backend)
    changes = {"InstanceCount": instance_count, "InstanceType": instance_type, "MaxRuntimeInSeconds": max_run_seconds}
    plan = old.resumed(name, {key: value for key, value in changes.items() if value is not None})

    def announcement() -> str:
        none = "No checkpoint there yet: starting from the beginning"
        return newest_checkpoint(old, before="Resuming from ", none=none)

    return start(backend, plan, announcement, **options)
