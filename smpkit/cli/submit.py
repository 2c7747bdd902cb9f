"""`smpkit submit`: a job file becomes a managed job; `--dry-run` prints the very request instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli._start import start, start_options
from smpkit.cli.options import BackendChoice, backend_options, job_arguments, read_job
from smpkit.config.words import duration
from smpkit.errors import ConfigError

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob, Override
    from smpkit_estimator.backend import Backend, Plan


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
