"""`smpkit submit`: a job file becomes a managed job; `--dry-run` prints the very request instead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._backend import BackendChoice, backend_options, follow_job, tell_if_interrupted, wait_for_job
from smpkit.cli._job import job_arguments, read_job
from smpkit.errors import ConfigError

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob
    from smpkit_estimator.backend import Backend, Plan

__all__ = ["submit"]


@click.command()
@job_arguments
@click.option("--dry-run", is_flag=True, help="Print the request that would be sent, and send nothing.")
@click.option("-f", "--follow", is_flag=True, help="Show the log until the job is over; the exit code is its fate.")
@click.option("--wait", is_flag=True, help="Wait until the job is over, without its log; the exit code is its fate.")
@click.option("--name", metavar="NAME", help="Name of the job. Default: `name` of the job file and the time.")
@click.option("--json", "as_json", is_flag=True, help="Print the result (or the request) as JSON.")
@backend_options
def submit(
    file: Path,
    overrides: tuple[str, ...],
    dry_run: bool,
    follow: bool,
    wait: bool,
    name: str | None,
    as_json: bool,
    chosen: BackendChoice,
) -> int:
    """Start a managed job, on SageMaker or a cluster, and print its name.

    Everything is checked against the service's own limits before anything is sent. Sources are uploaded once for each
    content. Ctrl-C while following never stops the job.
    """
    from smpkit_estimator.job import Job

    loaded = read_job(file, overrides)
    backend = chosen.open(loaded.config)
    plan = _planned(loaded, backend, name, dry=dry_run)
    console = _console.current()
    for note in plan.notes:
        console.note(f"note: {note}")
    if dry_run:
        click.echo(json.dumps(plan.shown, indent=2) + "\n" if as_json else plan.text(), nl=False)
        return 0
    _announce(loaded, backend, plan)
    job = Job(plan.name, backend)
    with tell_if_interrupted(job):
        result = backend.submit(plan)
    click.echo(json.dumps(result, indent=2) if as_json else job.name)
    if follow:
        return follow_job(job)
    if wait:
        return wait_for_job(job)
    console.note(f"Follow with `smpkit logs -f {job.name}`, stop with `smpkit stop {job.name}`")
    return 0


def _planned(loaded: LoadedJob, backend: Backend, name: str | None, *, dry: bool) -> Plan:
    """Plan, and give each problem the file and line that its value came from."""
    try:
        return backend.plan(loaded.config, loaded.folder, name=name, dry=dry)
    except ConfigError as error:
        problems = [
            replace(problem, source="--name") if name and problem.path[:1] == ("name",) else loaded.located(problem)
            for problem in error.problems
        ]
        raise ConfigError(problems, subject=error.subject) from None


def _announce(loaded: LoadedJob, backend: Backend, plan: Plan) -> None:
    from smpkit.config.words import duration

    longest = "" if plan.max_seconds is None else f", at most {duration(plan.max_seconds)}"
    _console.current().note(f"Submitting `{loaded.config.name}` to {backend.title} ({plan.machines}{longest})")
