"""`smpkit run`: a job on this machine, through the launcher that the training image uses, or in that image."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smpkit.cli import _console
from smpkit.cli._job import job_arguments, read_job
from smpkit.cli._time import SECONDS
from smpkit.cli.image import recipe_from, recipe_options
from smpkit.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob
    from smpkit_estimator.local import LocalPlan, LocalRun

__all__ = ["hint_at_timeline", "run", "show_places", "summary"]


@click.command()
@job_arguments
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--keep", is_flag=True, help="Keep the temporary tree that stands for /opt/ml, also if nothing is in it.")
@click.option("--events", is_flag=True, help="Record what every rank does, for `smpkit timeline`.")
@click.option("--docker", is_flag=True, help="Run in the training image: the job's, or one that is built first.")
@click.option(
    "--hosts", type=click.IntRange(1, 16), help="With --docker: containers. Default: as many as the job asks."
)
@click.option(
    "--interrupt-after",
    type=SECONDS,
    metavar="SECONDS",
    help="With --docker: rehearse a spot interruption so long after the first output, then go on from the checkpoints.",
)
@click.option("--gpus", is_flag=True, help="With --docker: give the containers this machine's GPUs.")
@recipe_options
def run(
    file: Path,
    overrides: tuple[str, ...],
    arguments: tuple[str, ...],
    keep: bool,
    events: bool,
    docker: bool,
    hosts: int | None,
    interrupt_after: float | None,
    gpus: bool,
    **recipe: Any,
) -> int:
    """Run the job on this machine, with the launcher of the training image or in the image itself.

    ARGUMENTS after `--` are passed to the script, after those made of hyperparameters. The exit code is 1 if the job
    failed, 130 after Ctrl-C; a second Ctrl-C kills the ranks at once.
    """
    job = read_job(file, overrides)
    if docker:
        from smpkit.cli._run_docker import Wishes, run_docker

        return run_docker(job, arguments, recipe_from(recipe), Wishes(hosts, interrupt_after, gpus, keep, events))
    _refuse_without_docker(hosts=hosts, interrupt_after=interrupt_after, gpus=gpus)
    return _run_here(job, arguments, keep, events)


def _refuse_without_docker(**options: object) -> None:
    given = [f"`--{name.replace('_', '-')}`" for name, value in options.items() if value]
    if given:
        raise UsageError(f"{' and '.join(given)} without `--docker`", hint="add `--docker`")


def _run_here(job: LoadedJob, arguments: tuple[str, ...], keep: bool, events: bool) -> int:
    from smpkit_container.environment import count_gpus
    from smpkit_estimator.local import plan_local_run, run_local

    plan = plan_local_run(job.config, job.folder, count_gpus({**os.environ, **job.config.environment}))
    _check_launcher(plan)
    console = _console.current()
    for note in plan.notes:
        console.note(f"note: {note}")
    console.note(f"Running `{plan.job.name}` on this machine: {summary(plan)}")
    done = run_local(plan, arguments, keep=keep, events=events)
    _conclude(console, done, events)
    return 0 if done.exit_code == 0 else 130 if done.interrupted else 1


def _check_launcher(plan: LocalPlan) -> None:
    """Find what would stop the launcher before anything is started."""
    if plan.job.distribution.launcher == "mpirun":
        from smpkit_container.command import find_mpirun

        find_mpirun(plan.job.environment.get("PATH"))
    elif importlib.util.find_spec("torch") is None:
        hint = "`pip install 'smpkit[torch]'` (`smpkit doctor` names the small build for the CPU), or use `--docker`"
        raise UnsupportedError("torch is not installed beside smpkit, so torchrun cannot start the ranks", hint=hint)


def summary(plan: LocalPlan) -> str:
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks != 1)} with {plan.job.distribution.launcher}"
    parameters = plan.job.distribution.model_parallel
    if parameters is None:
        return f"{ranks}, no model parallelism"
    pipeline, tensor = parameters.pipeline_parallel_degree, parameters.tensor_parallel_degree
    return f"{ranks}, pipeline {pipeline} × tensor {tensor} × data {plan.ranks // (pipeline * tensor)}"


def _conclude(console: _console.Console, done: LocalRun, events: bool) -> None:
    """Say how it ended, unless the launcher has done so, and where everything is."""
    from smpkit_container.failure import duration

    if done.exit_code == 0:
        console.note(f"{_console.style('Finished', 'green')} after {duration(done.seconds)}")
    elif done.interrupted:
        console.note(f"{_console.style('Interrupted', 'yellow')} after {duration(done.seconds)}")
    show_places(console, done.model, done.output_data, done.checkpoints)
    if done.tree is not None:
        console.note(f"kept: {done.tree}")
    if events:
        hint_at_timeline(console, done.output_data)


def show_places(
    console: _console.Console, model: Path | None, output_data: Path | None, checkpoints: Path | None
) -> None:
    """Say where everything is that the job left."""
    for name, place in {"model": model, "other results": output_data, "checkpoints": checkpoints}.items():
        if place is not None:
            console.note(f"{name}: {place}")


def hint_at_timeline(console: _console.Console, output_data: Path | None) -> None:
    """Say what can be done with recorded events."""
    from smpkit_estimator.local import EVENTS

    if output_data is not None and (output_data / EVENTS).is_dir():
        console.hint(f"`smpkit timeline {output_data / EVENTS}` shows what the ranks did")
