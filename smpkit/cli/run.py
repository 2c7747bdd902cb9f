"""`smpkit run`: a job on this machine, through the launcher that the training image uses, or in that image."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from smpkit.cli.options import job_arguments, numbers, recipe_options, refuse

_FOR_DOCKER: Final = ("hosts", "interrupt_after", "gpus", "base_image", "torch", "wheels", "authority", "network")


@click.command()
@job_arguments
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="Start N ranks, on all hosts together.")
@click.option("--events", is_flag=True, help="Record every step for `smpkit timeline`. Default: a sample of them.")
@click.option(
    "--profile-steps",
    metavar="FIRST:LAST",
    help="Put torch's profiler around these steps, from 0, and leave one trace of it and the events for Perfetto.",
)
@click.option(
    "--pdb",
    "debugged",
    type=click.IntRange(0),
    metavar="RANK",
    help="Give this rank a debugger here, at `breakpoint()` and at errors; the other ranks wait for it.",
)
@click.option("--docker", is_flag=True, help="Run in the training image: the job's, or one that is built first.")
@click.option(
    "--hosts", type=click.IntRange(1, 16), help="With --docker: containers. Default: as many as the job asks."
)
@click.option(
    "--interrupt-after",
    type=numbers(1e-3, 10**6),
    metavar="SECONDS",
    help="With --docker: rehearse a spot interruption so long after the script's first output, then go on.",
)
@click.option("--gpus", is_flag=True, help="With --docker: give the containers this machine's GPUs.")
@recipe_options
def run(file: Path, **options: Any) -> int:
    """Run a job on this machine, with the launcher of the training image or in the image itself.

    FILE is a job file, or a script such as `train.py`, which needs none: `-p pipeline_parallel_degree=2` sets what a
    job file has as modelparallel parameters. There are as many ranks as GPUs, or as the degrees need.

    What the run leaves is in `runs/NAME-TIME` beside the job file: the job as it ran, its plan, events, logs by rank
    and a summary, and the results for which the job file names no other place. `smpkit runs` lists them.

    ARGUMENTS after `--` are passed to the script, after those made of hyperparameters. The exit code is 1 if the job
    failed, 130 after Ctrl-C; a second Ctrl-C kills the ranks at once.
    """
    if options["docker"]:
        refuse(("debugged",), "beside `--docker`", "debug the job on this machine, without a container")
    else:
        refuse(_FOR_DOCKER, "without `--docker`", "add `--docker`")
    from smpkit.cli._run import run_job

    return run_job(file, **options)
