"""`smpkit submit`: a job file becomes a managed job; `--dry-run` prints the very request instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._cloud import CloudChoice, cloud_options, follow_job, tell_if_interrupted
from smpkit.cli._job import job_arguments, read_job
from smpkit.cli._show import machines_text
from smpkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob
    from smpkit.config.section import KeyPath
    from smpkit_estimator.cloud import Cloud
    from smpkit_estimator.submission import Submission

__all__ = ["submit"]


@click.command()
@job_arguments
@click.option("--dry-run", is_flag=True, help="Print the request that would be sent, and send nothing.")
@click.option("-f", "--follow", is_flag=True, help="Show the log until the job is over; the exit code is its fate.")
@click.option("--wait", is_flag=True, help="Wait until the job is over, without its log; the exit code is its fate.")
@click.option("--name", metavar="NAME", help="Name of the job. Default: `name` of the job file and the time.")
@click.option("--json", "as_json", is_flag=True, help="Print the result (or the request) as JSON.")
@cloud_options
def submit(
    file: Path,
    overrides: tuple[str, ...],
    dry_run: bool,
    follow: bool,
    wait: bool,
    name: str | None,
    as_json: bool,
    cloud: CloudChoice,
) -> int:
    """Start a managed job on SageMaker and print its name.

    Everything is checked against the service's own limits before anything is sent. Sources are uploaded once for each
    content. Ctrl-C while following never stops the job.
    """
    from smpkit_estimator.cloud import DryCloud
    from smpkit_estimator.job import Job
    from smpkit_estimator.submission import send

    opened = cloud.open()
    dry = DryCloud(opened) if dry_run else None
    loaded = read_job(file, overrides)
    submission = _planned(loaded, dry or opened, name)
    console = _console.current()
    for note in (*submission.notes, *(dry.notes if dry is not None else ())):
        console.note(f"note: {note}")
    if dry_run:
        click.echo(_printed(submission, as_json), nl=False)
        return 0
    _announce(loaded, opened)
    job = Job(submission.request.job_name, opened)
    with tell_if_interrupted(job):
        arn = send(submission, opened)
    result = {"name": job.name, "arn": arn, "region": opened.region, "source": submission.archive_uri}
    click.echo(json.dumps(result, indent=2) if as_json else job.name)
    if follow:
        return follow_job(job)
    if wait:
        from smpkit.cli.wait import wait_for

        return wait_for(job)
    console.note(f"Follow with `smpkit logs -f {job.name}`, stop with `smpkit stop {job.name}`")
    return 0


def _planned(loaded: LoadedJob, cloud: Cloud, name: str | None) -> Submission:
    """Plan, and give each problem the file and line that its value came from."""
    from smpkit_estimator.submission import plan_submission

    try:
        return plan_submission(loaded.config, loaded.folder, cloud, job_name=name)
    except ConfigError as error:
        origins = {**loaded.origins, ("name",): "--name"} if name is not None else loaded.origins
        raise ConfigError([_located(problem, origins) for problem in error.problems], subject=error.subject) from None


def _located(problem: Problem, origins: Mapping[KeyPath, object]) -> Problem:
    for length in range(len(problem.path), 0, -1):
        origin = origins.get(problem.path[:length])
        if origin not in (None, "default"):
            from smpkit.config.explain import LocatedProblem

            return LocatedProblem(problem.path, problem.message, problem.hint, source=str(origin))
    return replace(problem)


def _printed(submission: Submission, as_json: bool) -> str:
    if as_json:
        return json.dumps(submission.request.shown(), indent=2) + "\n"
    import yaml

    text: str = yaml.safe_dump(submission.request.shown(), sort_keys=False, allow_unicode=True, width=120)
    return text


def _announce(loaded: LoadedJob, cloud: Cloud) -> None:
    from smpkit_container.failure import duration

    compute = loaded.config.compute
    machines = f"{machines_text(compute.machines)}{', spot' if compute.spot else ''}"
    longest = duration(compute.max_run_seconds)
    text = f"Submitting `{loaded.config.name}` to SageMaker in {cloud.region} ({machines}, at most {longest})"
    _console.current().note(text)
