"""`smpkit run`: a job on this machine, through the launcher that the training image uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli._job import job_arguments, read_job

if TYPE_CHECKING:
    from smpkit_estimator.local import LocalPlan, LocalRun

__all__ = ["run"]


@click.command()
@job_arguments
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--keep", is_flag=True, help="Keep the temporary tree that stands for /opt/ml, also if nothing is in it.")
@click.option("--events", is_flag=True, help="Record what every rank does, for `smpkit timeline`.")
def run(file: Path, overrides: tuple[str, ...], arguments: tuple[str, ...], keep: bool, events: bool) -> int:
    """Run the job on this machine: the same launcher and ranks, without Docker or a cloud account.

    ARGUMENTS after `--` are passed to the script, after those made of hyperparameters. The exit code is 1 if the job
    failed, 130 after Ctrl-C; a second Ctrl-C kills the ranks at once.
    """
    from smpkit_container.environment import count_gpus
    from smpkit_estimator.local import plan_local_run, run_local

    job = read_job(file, overrides)
    plan = plan_local_run(job.config, job.folder, count_gpus())
    _check_launcher(plan)
    console = _console.current()
    for note in plan.notes:
        console.note(f"note: {note}")
    console.note(f"Running `{plan.job.name}` on this machine: {_summary(plan)}")
    done = run_local(plan, arguments, keep=keep, events=events)
    _conclude(console, done, events)
    return 0 if done.exit_code == 0 else 130 if done.interrupted else 1


def _check_launcher(plan: LocalPlan) -> None:
    """Find what would stop mpirun before anything is started, so that exit code 2 always means the configuration."""
    if plan.job.distribution.launcher == "mpirun":
        from smpkit_container.command import find_mpirun
        from smpkit_container.mpi_options import parse_custom_options

        parse_custom_options(plan.job.distribution.custom_mpi_options)
        find_mpirun(plan.job.environment.get("PATH"))


def _summary(plan: LocalPlan) -> str:
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks != 1)} with {plan.job.distribution.launcher}"
    parameters = plan.job.distribution.model_parallel
    if parameters is None:
        return f"{ranks}, no model parallelism"
    pipeline, tensor = parameters.pipeline_parallel_degree, parameters.tensor_parallel_degree
    return f"{ranks}, pipeline {pipeline} × tensor {tensor} × data {plan.ranks // (pipeline * tensor)}"


def _conclude(console: _console.Console, done: LocalRun, events: bool) -> None:
    """Say how it ended, unless the launcher has done so, and where everything is."""
    from smpkit_container.failure import duration
    from smpkit_estimator.local import EVENTS

    if done.exit_code == 0:
        console.note(f"{_console.style('Finished', 'green')} after {duration(done.seconds)}")
    elif done.interrupted:
        console.note(f"{_console.style('Interrupted', 'yellow')} after {duration(done.seconds)}")
    places = {"model": done.model, "other results": done.output_data, "checkpoints": done.checkpoints}
    for name, place in places.items():
        if place is not None:
            console.note(f"{name}: {place}")
    if done.tree is not None:
        console.note(f"kept: {done.tree}")
    if events and done.output_data is not None and (done.output_data / EVENTS).is_dir():
        console.hint(f"`smpkit timeline {done.output_data / EVENTS}` shows what the ranks did")
