"""`smpkit run --docker`: the job in the training image, with one container for each host."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from smpkit.cli import _console
from smpkit.cli.run import hint_at_timeline, show_places, summary

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob
    from smpkit_estimator.docker.image import Recipe
    from smpkit_estimator.docker.run import DockerRun

__all__ = ["Wishes", "run_docker"]

_COLOURS = ("cyan", "yellow", "magenta", "green", "blue")


@dataclass(frozen=True)
class Wishes:
    """The options of `smpkit run` that matter in containers."""

    hosts: int | None
    interrupt_after: float | None
    gpus: bool
    keep: bool
    events: bool


def run_docker(job: LoadedJob, arguments: Sequence[str], recipe: Recipe, wishes: Wishes) -> int:
    """Build or take the image, run the containers, say how it ended; return the exit code."""
    from smpkit_container.environment import count_gpus
    from smpkit_estimator.docker.engine import check
    from smpkit_estimator.docker.image import build_image
    from smpkit_estimator.docker.run import run_in_docker
    from smpkit_estimator.local import plan_local_run

    hosts = wishes.hosts or job.config.compute.instance_count
    # Of this shell's variables the containers get none.
    num_gpus = count_gpus(job.config.environment) if wishes.gpus else 0
    plan = plan_local_run(job.config, job.folder, num_gpus, hosts)
    console = _console.current()
    check()
    image = job.config.image or build_image(recipe)
    for note in plan.notes:
        console.note(f"note: {note}")
    where = "1 container" if hosts == 1 else f"{hosts} containers"
    console.note(f"Running `{plan.job.name}` in {where} of {image}: {summary(plan)}")
    done = run_in_docker(
        plan,
        image,
        arguments,
        show=_show,
        gpus=wishes.gpus,
        interrupt_after=wishes.interrupt_after,
        events=wishes.events,
    )
    _conclude(console, done, wishes)
    return 130 if done.interrupted else 1 if done.exit_code else 0


def _show(host: str, stream: str, line: str) -> None:
    colour = _COLOURS[int(host.rpartition("-")[2]) % len(_COLOURS)]
    click.echo(f"{click.style(f'[{host}]', fg=colour)} {line}", file=sys.stderr if stream == "err" else sys.stdout)


def _conclude(console: _console.Console, done: DockerRun, wishes: Wishes) -> None:
    from smpkit_container.failure import duration

    if done.interrupted:
        console.note(f"{_console.style('Interrupted', 'yellow')} after {duration(done.seconds)}")
    elif done.exit_code == 0:
        after = ", with an interruption" if done.rehearsed else ""
        console.note(f"{_console.style('Finished', 'green')} after {duration(done.seconds)}{after}")
    if wishes.interrupt_after is not None and not done.rehearsed:
        console.warn(f"the job ended before it could be interrupted after {wishes.interrupt_after:g} s")
    for clash in done.clashes:
        console.warn(f"several hosts wrote different contents to {clash}; the first host's is kept")
    show_places(console, done.model, done.output_data, done.checkpoints)
    if wishes.events:
        hint_at_timeline(console, done.output_data)
    inside = [place for place in (done.model, done.output_data, done.checkpoints) if place is not None]
    if wishes.keep or any(place.is_relative_to(done.tree) for place in inside):
        console.note(f"kept: {done.tree}")
    else:
        shutil.rmtree(done.tree, ignore_errors=True)
