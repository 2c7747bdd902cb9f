"""`smpkit resume`: a new job that goes on from the checkpoints of an old one, on the same back end or another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._backend import BackendChoice, backend_options, follow_job, tell_if_interrupted
from smpkit.cli._job import override_options
from smpkit.errors import CheckpointError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from smpkit_estimator.backend import Backend, Plan
    from smpkit_estimator.checkpoints import Transfer
    from smpkit_estimator.job import Job

__all__ = ["resume"]


@click.command()
@click.argument("job")
@click.option("--name", metavar="NAME", help="Name of the new job. Default: that of JOB with another time.")
@click.option("--instance-count", type=click.IntRange(1), help="So many hosts instead.")
@click.option("--instance-type", metavar="TYPE", help="Another kind of machine.")
@click.option("--max-run-seconds", type=click.IntRange(1), help="Another limit for the running time.")
@click.option("--with", "file", type=click.Path(path_type=Path), help="Start this job file, with JOB's checkpoints.")
@click.option("--to", metavar="NAME", help="With --with: the back end. Default: the job file's.")
@override_options
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
    file: Path | None,
    to: str | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    follow: bool,
    as_json: bool,
    chosen: BackendChoice,
) -> int:
    """Start a job that goes on from another's checkpoints.

    It has the same image, sources, data and settings as JOB.

    To go on elsewhere, give the job file for there: `smpkit resume JOB --backend slurm --with job.yaml --to
    kubernetes`. `--backend` says where JOB is. If that file has `checkpoints` at another place, in S3 or in a folder,
    this machine copies the newest checkpoint there first; else both must see them at the same place.
    """
    from smpkit.cli._show import newest_checkpoint
    from smpkit_estimator.job import Job

    backend = chosen.open()
    old = Job(job, backend)
    transfer: Transfer | None = None
    given = {
        "InstanceCount": instance_count,
        "InstanceType": instance_type,
        "MaxRuntimeInSeconds": max_run_seconds,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    if file is not None:
        if changes:
            raise UsageError(
                "`--with` takes hosts and limits from its job file", hint="`--set` changes a setting there"
            )
        backend, plan, transfer = _elsewhere(old, backend, file, overrides, to, name, dry=dry_run)
    elif to is not None or overrides:
        raise UsageError("`--to` and `--set` need `--with`", hint="give the job file for the other back end")
    else:
        plan = old.resumed(name, changes)
    console = _console.current()
    for note in plan.notes:
        console.note(f"note: {note}")
    if dry_run:
        if transfer is not None:
            console.note(f"note: copies first the {transfer}")
        click.echo(json.dumps(plan.shown, indent=2))
        return 0
    if transfer is not None:
        console.note(f"Copying the {transfer}")
        transfer.run()
    else:
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


def _elsewhere(
    old: Job, source: Backend, file: Path, overrides: tuple[str, ...], to: str | None, name: str | None, *, dry: bool
) -> tuple[Backend, Plan, Transfer | None]:
    """Plan a job file with the checkpoints of a job, wherever that ran; and the copy of the newest, if it takes one.

    Raises:
        CheckpointError: there are none, or the other place has another one of its name.
        ConfigError: the other back end cannot reach them, or cannot run the job file.
        UnsupportedError: they are to be copied, and this machine cannot reach one of the places.
    """
    from smpkit.cli._job import read_job
    from smpkit.config.job import Checkpoints
    from smpkit_estimator.checkpoints import latest_checkpoint, plan_transfer

    place = old.checkpoints
    loaded = read_job(file, overrides)
    kept = loaded.config.checkpoints
    there = place if kept is None else _absolute(kept.uri, loaded.folder)
    moved = Checkpoints(**{**({} if kept is None else kept.model_dump()), "uri": there})
    config = loaded.config.model_copy(update={"checkpoints": moved})
    target = BackendChoice(name=to).open(config)
    # Commands that messages name are about the new job.
    chosen = to or config.backend.chosen
    options = f" --backend {chosen}" if chosen is not None else ""
    click.get_current_context().obj = replace(_console.current(), options=options)
    plan = target.plan(config, loaded.folder, name=name, dry=dry)
    if there.rstrip("/") != place.rstrip("/"):
        transfer = plan_transfer(source.files(place), target.files(there))
        if transfer is None:
            raise CheckpointError(f"there is no checkpoint of `{old.name}` at {place} yet")
        return target, plan, transfer
    try:
        newest = latest_checkpoint(target.files(place))
    except UnsupportedError:
        return target, plan, None  # nobody here can look; `plan` has said whether the place can be reached
    if newest is None:
        message = f"there is no checkpoint of `{old.name}` at {place}, as {target.title} sees it"
        hint = "name another place there in the job file's `checkpoints`, to copy them; or mount the same file system"
        raise CheckpointError(message, hint=hint)
    return target, plan, None


def _absolute(place: str, folder: Path) -> str:
    return place if "://" in place else str((folder / place).absolute())
