"""`smpkit run`: a job on this machine, through the launcher that the training image uses, or in that image."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from smpkit.cli import _console
from smpkit.cli._console import write_file
from smpkit.cli._run_folder import begin_run, end_run, held, saved_job_text, shown
from smpkit.cli.image import recipe_from, recipe_options
from smpkit.cli.options import job_arguments, read_job, seconds
from smpkit.config.words import coloured, duration
from smpkit.errors import SmpkitError, UnsupportedError, UsageError
from smpkit.observe.runs import EVENTS, TRACE, Run

if TYPE_CHECKING:
    from smpkit.config.job import JobConfig
    from smpkit.config.load import LoadedJob, Override
    from smpkit_estimator.docker import DockerRun
    from smpkit_estimator.image import Recipe
    from smpkit_estimator.local import LocalPlan, LocalRun

__all__ = ["run", "run_local"]

_Done = TypeVar("_Done", bound="LocalRun")

_COLOURS: Final = ("cyan", "yellow", "magenta", "green", "blue")
_FOR_DOCKER: Final = ("hosts", "interrupt_after", "gpus", "base_image", "torch", "wheels", "ca", "build_network")


@click.command()
@job_arguments
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="Start N ranks, on all hosts together.")
@click.option("--save-job", is_flag=True, help="For a script: also write the job file that does the same.")
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
    type=seconds,
    metavar="SECONDS",
    help="With --docker: rehearse a spot interruption so long after the script's first output, then go on.",
)
@click.option("--gpus", is_flag=True, help="With --docker: give the containers this machine's GPUs.")
@recipe_options
def run(
    file: Path,
    overrides: list[Override],
    arguments: tuple[str, ...],
    ranks: int | None,
    save_job: bool,
    events: bool,
    profile_steps: str | None,
    debugged: int | None,
    docker: bool,
    hosts: int | None,
    interrupt_after: float | None,
    gpus: bool,
    **recipe: Any,
) -> int:
    """Run a job on this machine, with the launcher of the training image or in the image itself.

    FILE is a job file, or a script such as `train.py`, which needs none: `-p pipeline_parallel_degree=2` sets what a
    job file has as modelparallel parameters. There are as many ranks as GPUs, or as the degrees need.

    What the run leaves is in `runs/NAME-TIME` beside the job file: the job as it ran, its plan, events, logs by rank
    and a summary, and the results for which the job file names no other place. `smpkit runs` lists them.

    ARGUMENTS after `--` are passed to the script, after those made of hyperparameters. The exit code is 1 if the job
    failed, 130 after Ctrl-C; a second Ctrl-C kills the ranks at once.
    """
    _refuse_what_does_not_go(debugged, docker=docker)
    if hosts is not None:
        overrides = [*overrides, ("--set", f"compute.instance_count={hosts}")]
    if ranks is not None:
        overrides = [*overrides, ("--ranks", str(ranks))]
    job = read_job(file, overrides, script=True)
    if save_job:
        _save_job(job, arguments)
    if profile_steps is not None:
        job = _profiled(job, profile_steps)
    if docker:
        return _run_in_docker(job, arguments, recipe_from(recipe), interrupt_after, gpus=gpus, events=events)
    _refuse_allocation(job.config)
    return _run_here(job, arguments, debugged, events=events)


def _refuse_what_does_not_go(debugged: int | None, *, docker: bool) -> None:
    """Refuse options that would have no effect."""
    if docker and debugged is not None:
        raise UsageError("`--pdb` does not go with --docker", hint="debug the job on this machine, without a container")
    source = click.get_current_context().get_parameter_source
    names = [name for name in _FOR_DOCKER if source(name) is ParameterSource.COMMANDLINE]
    if names and not docker:
        flags = " and ".join(f"`--{name.replace('_', '-')}`" for name in names)
        raise UsageError(f"{flags} without `--docker`", hint="add `--docker`")


def _refuse_allocation(job: JobConfig) -> None:
    """Refuse to use one node where Slurm has given several; inside a step of `srun`, ranks are many already."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 0)
    if nodes < 2 or not os.environ.get("SLURM_JOB_ID"):
        return
    ranks = job.distribution.processes_per_host or 1
    hint = (
        f"`MASTER_ADDR=$(scontrol show hostnames | head -n 1) srun --ntasks-per-node={ranks} python {job.entry_point}`"
        " uses them, and so does `smpkit submit --backend slurm`"
    )
    raise UsageError(f"`smpkit run` uses one machine, and this is an allocation of {nodes} nodes", hint=hint)


def _save_job(job: LoadedJob, arguments: Sequence[str]) -> None:
    """Write the job file of a script beside it.

    Raises:
        UsageError: there is a job file, or the arguments of the script do not fit into one.
    """
    from smpkit.config.load import is_script

    place = job.folder / "job.yaml"
    if not is_script(job.path):
        raise UsageError("`--save-job` is for a script, and this is a job file")
    if arguments:
        raise UsageError(
            "`--save-job` does not take arguments after `--`: a job file has hyperparameters instead",
            hint="give each as `-H name=value`, which the script gets as `--name value`",
        )
    if place.exists():
        raise UsageError(f"`{shown(place)}` is there already", hint="run without `--save-job`, or move it")
    write_file(place, saved_job_text(job), "job file")
    _console.current().note(f"wrote {shown(place)}")


def _profiled(job: LoadedJob, steps: str) -> LoadedJob:
    """Tell the ranks which steps to profile."""
    from smpkit.observe.profiles import PROFILE, steps_of

    try:
        steps_of(steps)
    except ValueError as error:
        raise UsageError(f"--profile-steps: {error}") from None
    config = job.config.model_copy(update={"environment": {**job.config.environment, PROFILE: steps}})
    return replace(job, config=config)


# ---- on this machine -------------------------------------------------------------------------------------------------


def _run_here(job: LoadedJob, arguments: Sequence[str], debugged: int | None, *, events: bool) -> int:
    from smpkit_container.environment import count_gpus
    from smpkit_estimator.local import plan_local_run

    plan = plan_local_run(job.config, job.folder, count_gpus({**os.environ, **job.config.environment}))
    _check_launcher(plan)
    environ = {**os.environ, **_debugged(debugged, plan.ranks)}

    def train(folder: Path) -> LocalRun:
        return run_local(plan, folder, arguments, environ, events=events)

    folder, done = _recorded(job, plan, "on this machine", train)
    if done.exit_code == 0 and not done.stopped:  # the launcher has said how it ended otherwise
        _console.current().note(f"{_console.style('Finished', 'green')} after {duration(done.seconds)}")
    _conclude(folder, done)
    if done.exit_code == 0:
        return 0
    return 130 if done.interrupted else 1


def run_local(
    plan: LocalPlan,
    folder: Path,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    events: bool = False,
) -> LocalRun:
    """Let the launcher run the job in this process, and wait for it; what ranks print goes to stdout and stderr.

    Ctrl-C, SIGTERM and SIGHUP stop the ranks. Must be called in the main thread.

    Args:
        folder: that of the run, which exists.
        arguments: more arguments for the script, after those made of hyperparameters.
        environ: variables, on top of which the job's own go; default: this process's.
        events: let every rank record every step.
    """
    from smpkit.config.scheduled import STOPPED
    from smpkit_container.__main__ import main
    from smpkit_estimator.local import collected, lay_out

    variables = lay_out(plan, folder, os.environ if environ is None else environ, events=events)
    began = time.monotonic()
    code = main(["train", "--", *arguments], variables, stopped_code=STOPPED)
    return collected(folder, code, time.monotonic() - began)


def _check_launcher(plan: LocalPlan) -> None:
    """Find what would stop the launcher before anything is started."""
    if plan.job.distribution.launcher == "mpirun":
        from smpkit_container.mpi import find_mpirun

        find_mpirun(plan.job.environment.get("PATH"))
    elif not plan.job.is_shell_script and importlib.util.find_spec("torch") is None:
        hint = "`pip install 'smpkit[torch]'` (`smpkit doctor` names the small build for the CPU), or use `--docker`"
        raise UnsupportedError("torch is not installed beside smpkit, and the ranks need it", hint=hint)


def _debugged(rank: int | None, num_ranks: int) -> dict[str, str]:
    """Return the variable that gives a rank this terminal."""
    if rank is None:
        return {}
    if rank >= num_ranks:
        raise UsageError(f"`--pdb {rank}`: the job has the ranks 0 to {num_ranks - 1}")
    try:
        return {"SMPKIT_PDB": f"{rank}:{os.ttyname(sys.stdin.fileno())}"}
    except (OSError, ValueError):
        raise UsageError("`--pdb` needs a terminal, and the input of this command is none") from None


# ---- in the training image, with one container for each host ---------------------------------------------------------


def _run_in_docker(
    job: LoadedJob,
    arguments: Sequence[str],
    recipe: Recipe,
    interrupt_after: float | None,
    *,
    gpus: bool,
    events: bool,
) -> int:
    from smpkit_container.environment import count_gpus
    from smpkit_estimator.docker import check, run_in_docker
    from smpkit_estimator.image import build_image
    from smpkit_estimator.local import plan_local_run

    hosts = job.config.compute.instance_count
    # Containers get none of this shell's variables.
    num_gpus = count_gpus(job.config.environment) if gpus else 0
    plan = plan_local_run(job.config, job.folder, num_gpus, hosts)
    check()
    image = job.config.image or build_image(recipe)

    def train(folder: Path) -> DockerRun:
        return run_in_docker(
            plan,
            image,
            folder,
            arguments,
            show=_show_line,
            gpus=gpus,
            interrupt_after=interrupt_after,
            events=events,
        )

    where = f"in {hosts} container{'s' * (hosts != 1)} of {image}"
    folder, done = _recorded(job, plan, where, train)
    console = _console.current()
    if done.stopped:
        console.note(f"{_console.style('Stopped', 'yellow')} after {duration(done.seconds)}")
    elif done.exit_code and done.failure is None:
        _console.print_failure(f"a container ended with exit code {done.exit_code} and left no reason")
    elif done.exit_code == 0:
        after = ", with an interruption" if done.rehearsed else ""
        console.note(f"{_console.style('Finished', 'green')} after {duration(done.seconds)}{after}")
    if interrupt_after is not None and not done.rehearsed:
        console.warn(f"the job ended before it could be interrupted after {interrupt_after:g} s")
    _conclude(folder, done)
    if done.stopped:
        return 130
    return 1 if done.exit_code else 0


def _show_line(host: str, stream: str, line: str) -> None:
    colour = _COLOURS[int(host.rpartition("-")[2]) % len(_COLOURS)]
    text = f"{click.style(f'[{host}]', fg=colour)} {coloured(line)}"
    click.echo(text, file=sys.stderr if stream == "err" else sys.stdout)


# ---- what both do ----------------------------------------------------------------------------------------------------


def _recorded(job: LoadedJob, plan: LocalPlan, where: str, train: Callable[[Path], _Done]) -> tuple[Run, _Done]:
    """Make the folder of a run, train, and note there how it ended."""
    console = _console.current()
    for note in plan.notes:
        console.note(f"note: {note}")
    folder = begin_run(job, plan.ranks, plan.hosts)
    console.note(f"Running `{plan.job.name}` {where}: {_summary(plan)}")
    with held(folder):
        done = train(folder.path)
        end_run(folder, done.seconds, _end_of(done))
    return folder, done


def _summary(plan: LocalPlan) -> str:
    if plan.job.is_shell_script:
        return f"`{plan.job.entry_point}`, once on each of {plan.hosts} hosts" if plan.hosts > 1 else "a shell script"
    # The launcher starts the ranks itself, unless MPI does.
    by = " with mpirun" if plan.job.distribution.launcher == "mpirun" else ""
    return f"{plan.ranks} rank{'s' * (plan.ranks != 1)}{by}, {plan.job.distribution.degrees(plan.ranks)}"


def _end_of(done: LocalRun) -> str:
    """Say how a run ended, for its summary."""
    if done.stopped:
        return "stopped"
    if done.exit_code == 0:
        return "finished"
    lines = (done.failure or "").strip().splitlines()
    return f"failed: {lines[0] if lines else f'exit code {done.exit_code}'}"


def _conclude(run: Run, done: LocalRun) -> None:
    """Say where everything is that the job left, and put what was profiled and the events into one trace."""
    console, folder = _console.current(), run.path.resolve()
    places = {"model": done.model, "other results": done.output_data, "checkpoints": done.checkpoints}
    inside = []
    for name, place in places.items():
        if place is not None and place.is_relative_to(folder):
            inside.append(str(place.relative_to(folder)))
        elif place is not None:
            console.note(f"{name}: {place}")
    listed = " and ".join(filter(None, [", ".join(inside[:-1]), *inside[-1:]]))
    console.note(f"run: {shown(run.path)}{f', with {listed}' if inside else ''}")
    _leave_trace(run)


def _leave_trace(run: Run) -> None:
    from smpkit.observe.merge import read_run
    from smpkit.observe.trace import chrome_trace, profiles_of

    console = _console.current()
    try:
        profiles = profiles_of(run.path / EVENTS)
        if not profiles:
            return
        write_file(run.path / TRACE, chrome_trace(read_run(run.path), profiles=profiles), "trace")
    except SmpkitError as error:  # of a run that failed, which has been said
        console.warn(f"no trace of the profiled steps: {error.message}")
        return
    console.note(f"trace: {shown(run.path / TRACE)}; open it at https://ui.perfetto.dev")
