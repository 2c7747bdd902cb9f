"""`smpkit submit`: a job file becomes a managed job; `--dry-run` prints the very request instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli.logs import follow_job
from smpkit.cli.options import BackendChoice, backend_options, job_arguments, read_job, refuse
from smpkit.cli.status import wait_for_job
from smpkit.config.words import duration
from smpkit.errors import ConfigError

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob, Override
    from smpkit_estimator.backend import Backend, Plan


def start_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of how a job is started, which `start` takes."""

    @click.option("--dry-run", is_flag=True, help="Print the request that would be sent, and send nothing.")
    @click.option("-f", "--follow", is_flag=True, help="Show the log to the job's end; fail if the job fails.")
    @click.option("--wait", is_flag=True, help="Wait for the job's end, without its log; fail if the job fails.")
    @click.option("--json", "as_json", is_flag=True, help="Print the result (or the request) as JSON.")
    @functools.wraps(function)
    def command(*args: Any, dry_run: bool, follow: bool, **options: Any) -> Any:
        if dry_run:
            refuse(("follow", "wait"), "beside `--dry-run`, which starts no job", "remove it")
        if follow:
            refuse(("wait",), "beside `--follow`, which waits too", "remove one of them")
        return function(*args, dry_run=dry_run, follow=follow, **options)

    return command


@click.command()
@job_arguments
@click.option("--name", metavar="NAME", help="Name of the job. Default: `name` of the job file and the time.")
@start_options
@backend_options
def submit(
    file: Path, overrides: list[Override], name: str | None, chosen: BackendChoice, dry_run: bool, **options: bool
) -> int:
    """Start a managed job, on SageMaker or a cluster, and print its name.

    Everything is checked against the service's own limits before anything is sent. Sources are uploaded once for each
    content. Ctrl-C while following never stops the job.
    """
    loaded = read_job(file, overrides)
    backend = chosen.open(loaded.config)
    plan = _planned(loaded, backend, name, dry=dry_run)

    def announcement() -> str:
        longest = "" if plan.max_seconds is None else f", at most {duration(plan.max_seconds)}"
        return f"Submitting `{loaded.config.name}` to {backend.title} ({plan.machines}{longest})"

    return start(backend, plan, announcement, dry_run=dry_run, **options)


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


# ---- what `smpkit resume` does, too ----------------------------------------------------------------------------------


def start(
    backend: Backend,
    plan: Plan,
    announcement: Callable[[], str],
    *,
    dry_run: bool,
    follow: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Start a job that was planned, print its name, and follow it if asked; or print what would be sent."""
    from smpkit_estimator.backend import NotStartedInterrupt
    from smpkit_estimator.job import Job

    for note in plan.notes:
        _console.note(f"note: {note}")
    if dry_run:
        _console.print_json(plan.shown) if as_json else click.echo(plan.text(), nl=False)
        return 0
    _console.note(announcement())
    job = Job(plan.name, backend)
    try:
        result = backend.submit(plan)
    except NotStartedInterrupt:
        _console.note(f"\n`{job.name}` was not started")
        raise
    except KeyboardInterrupt:  # its name was not printed yet
        _console.note(f"\n`{job.name}` was being started, and may have been")
        _console.hint(f"`smpkit status {job.name}` tells, `smpkit stop {job.name}` stops it")
        raise
    _console.print_json(result) if as_json else click.echo(job.name)
    if follow:
        return follow_job(job, job.logs(follow=True))
    if wait:
        return wait_for_job(job)
    _console.note(f"Follow with `smpkit logs -f {job.name}`, stop with `smpkit stop {job.name}`")
    return 0
