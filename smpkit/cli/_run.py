"""What `smpkit run` does: the launcher here or in containers, and the folder that a run leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from smpkit.cli import _console
from smpkit.cli._console import write_file
from smpkit.cli._machine import version_of
from smpkit.cli._plan import Planned, as_plain
from smpkit.cli._world import World
from smpkit.cli.options import read_job
from smpkit.config.confidential import hide_in_line, masked
from smpkit.config.documents import as_yaml
from smpkit.config.job import JobConfig
from smpkit.config.load import LoadedJob, Override, sizes_over_file
from smpkit.config.scheduled import STOPPED
from smpkit.config.words import coloured, duration
from smpkit.errors import SmpkitError, UnsupportedError, UsageError
from smpkit.observe.merge import read_run
from smpkit.observe.profiles import PROFILE, steps_of
from smpkit.observe.runs import ENVIRONMENT, EVENTS, JOB, PLAN, SUMMARY, TRACE, Run, held, make_run
from smpkit.observe.summary import RunSummary, read_summary, write_summary
from smpkit.observe.trace import chrome_trace, profiles_of
from smpkit.plan.decide import decide
from smpkit.units import things
from smpkit_container.__main__ import main
from smpkit_container.environment import count_gpus
from smpkit_container.mpi import find_mpirun
from smpkit_estimator.docker import Containers, check
from smpkit_estimator.image import Recipe, build_image
from smpkit_estimator.local import LocalPlan, LocalRun, collected, lay_out, plan_local_run

_Done = TypeVar("_Done", bound=LocalRun)

_COLOURS: Final = ("cyan", "yellow", "magenta", "green", "blue")
_PACKAGES: Final = ("smpkit", "torch", "numpy", "transformers", "accelerate")


def run_job(
    file: Path,
    *,
    overrides: Sequence[Override],
    arguments: Sequence[str],
    ranks: int | None,
    events: bool,
    profile_steps: str | None,
    debugged: int | None,
    docker: bool,
    hosts: int | None,
    interrupt_after: float | None,
    gpus: bool,
    **recipe: Any,
) -> int:
    """Run a job and return the exit code; arguments as of the command."""
    job = read_job(file, [*overrides, *sizes_over_file(hosts, ranks)], script=True)
    if profile_steps is not None:
        job = _profiled(job, profile_steps)
    if docker:
        return _run_in_docker(job, arguments, Recipe(**recipe), interrupt_after, gpus=gpus, events=events)
    _refuse_allocation(job.config)
    return _run_here(job, arguments, debugged, events=events)


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


def _profiled(job: LoadedJob, steps: str) -> LoadedJob:
    try:
        steps_of(steps)
    except ValueError as error:
        raise UsageError(f"--profile-steps: {error}") from None
    config = job.config.model_copy(update={"environment": {**job.config.environment, PROFILE: steps}})
    return replace(job, config=config)


# ---- on this machine -------------------------------------------------------------------------------------------------


def _run_here(job: LoadedJob, arguments: Sequence[str], debugged: int | None, *, events: bool) -> int:
    plan = plan_local_run(job.config, job.folder, count_gpus({**os.environ, **job.config.environment}))
    _check_launcher(plan)
    environ = {**os.environ, **_debugged(debugged, plan.ranks)}
    train = partial(run_local, plan, arguments=arguments, environ=environ, events=events)
    folder, done = _recorded(job, plan, "on this machine", train)
    if done.exit_code == 0 and not done.stopped:  # the launcher has said how it ended otherwise
        _console.note(f"{_console.style('Finished', 'green')} after {duration(done.seconds)}")
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
        environ: variables, on top of which the job's own go; default: this process's.
        events: let every rank record every step.
    """
    variables = lay_out(plan, folder, os.environ if environ is None else environ, events=events)
    began = time.monotonic()
    code = main(["train", "--", *arguments], variables, stopped_code=STOPPED)
    return collected(folder, code, time.monotonic() - began)


def _check_launcher(plan: LocalPlan) -> None:
    """Find what would stop the launcher before anything is started."""
    if plan.job.distribution.launcher == "mpirun":
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
    hosts = job.config.compute.instance_count
    # Containers get none of this shell's variables.
    num_gpus = count_gpus(job.config.environment) if gpus else 0
    plan = plan_local_run(job.config, job.folder, num_gpus, hosts)
    check()
    image = job.config.image or build_image(recipe)

    def train(folder: Path) -> LocalRun:
        containers = Containers(plan, image, folder, arguments, show=_show_line, gpus=gpus, events=events)
        return containers.run(interrupt_after)

    where = f"in {things(hosts, 'container')} of {image}"
    folder, done = _recorded(job, plan, where, train)
    if done.stopped:
        _console.note(f"{_console.style('Stopped', 'yellow')} after {duration(done.seconds)}")
    elif done.exit_code and done.failure is None:
        _console.print_failure(f"a container ended with exit code {done.exit_code} and left no reason")
    elif done.exit_code == 0:
        after = ", with an interruption" if done.rehearsed else ""
        _console.note(f"{_console.style('Finished', 'green')} after {duration(done.seconds)}{after}")
    if interrupt_after is not None and not done.rehearsed:
        _console.warn(f"the job ended before it could be interrupted after {interrupt_after:g} s")
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
    for note in plan.notes:
        _console.note(f"note: {note}")
    places = {plan.output: "output", plan.checkpoints: "checkpoints"}  # which may be one folder
    with ExitStack() as stack:
        for place, key in places.items():
            if place is not None:
                stack.enter_context(held(place, alone=key))
        folder = begin_run(job, plan.ranks, plan.hosts)
        _console.note(f"Running `{plan.job.name}` {where}: {_summary(plan)}")
        with held(folder.path):
            done = train(folder.path)
        try:
            _end_run(folder, plan.ranks, done.seconds, _end_of(done))
        except SmpkitError as error:  # such as of a full disk: the job has its own end
            _console.warn(error.message)
    return folder, done


def _summary(plan: LocalPlan) -> str:
    if plan.job.is_shell_script:
        return f"`{plan.job.entry_point}`, once on each of {plan.hosts} hosts" if plan.hosts > 1 else "a shell script"
    # The launcher starts the ranks itself, unless MPI does.
    by = " with mpirun" if plan.job.distribution.launcher == "mpirun" else ""
    return f"{things(plan.ranks, 'rank')}{by}, {plan.job.distribution.degrees(plan.ranks)}"


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
    folder = run.path.resolve()
    places = {"model": done.model, "other results": done.output_data, "checkpoints": done.checkpoints}
    inside = []
    for name, place in places.items():
        if place is not None and place.is_relative_to(folder):
            inside.append(str(place.relative_to(folder)))
        elif place is not None:
            _console.note(f"{name}: {place}")
    listed = " and ".join(filter(None, [", ".join(inside[:-1]), *inside[-1:]]))
    _console.note(f"run: {_shown(run.path)}{f', with {listed}' if inside else ''}")
    _leave_trace(run)


def _leave_trace(run: Run) -> None:
    try:
        profiles = profiles_of(run.path / EVENTS)
        if not profiles:
            return
        write_file(run.path / TRACE, chrome_trace(read_run(run.path), profiles=profiles), "trace")
    except SmpkitError as error:  # of a run that failed, which has been said
        _console.warn(f"no trace of the profiled steps: {error.message}")
        return
    _console.note(f"trace: {_shown(run.path / TRACE)}; open it at https://ui.perfetto.dev")


# ---- the folder of a run --------------------------------------------------------------------------------------------


def begin_run(job: LoadedJob, ranks: int, hosts: int) -> Run:
    """Make the folder of a run, with the job as it runs, its plan and its environment."""
    now = datetime.now().astimezone()
    run = make_run(job.folder, job.config.name, now)
    place = os.path.relpath(job.folder.absolute(), run.path.absolute())
    content = masked("", job.config.model_dump(mode="json", by_alias=True, exclude_unset=True))
    write_file(run.path / JOB, f"# Paths are relative to {place}.\n{as_yaml(content)}", "job of the run")
    # Of the file its name only: who gets a report of this need not know the folders here.
    settings = [
        (".".join(map(str, path)), value, origin.replace(str(job.path), job.path.name))
        for path, value, origin in job.settings()
    ]
    environment = {**_environment(now, ranks, hosts), "settings": settings}
    write_file(run.path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n", "environment of the run")
    plan = _plan(job, ranks, hosts)
    if plan is not None:
        write_file(run.path / PLAN, json.dumps(plan, indent=2) + "\n", "plan of the run")
    return run


def _end_run(run: Run, ranks: int, seconds: float, exit_reason: str) -> None:
    """Note how a run ended, in the summary that rank 0 or the launcher wrote, or where none did, in a new one."""
    if (run.path / SUMMARY).is_file():
        summary = replace(read_summary(run.path), name=run.name, exit_reason=exit_reason)
    else:
        note = "the ranks left no figures: none of them trained a step that smpkit measures"
        began = run.started.timestamp()
        summary = RunSummary(run.name, began, seconds, 0, exit_reason, world_size=ranks, data=ranks, notes=(note,))
    write_summary(run.path, summary)


def _shown(path: Path) -> str:
    """Return a path as short as it can be given on the command line here."""
    whole, here = path.absolute(), Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else path)


def _plan(job: LoadedJob, ranks: int, hosts: int) -> dict[str, Any] | None:
    """Return what `smpkit plan --json` prints of this job; None if it is no job that can be planned."""
    parameters = job.config.distribution.model_parallel
    if parameters is None:
        return None
    try:
        return as_plain(Planned(World(parameters, job.config.name, hosts), decide(parameters, ranks)))
    except SmpkitError:
        return None  # the ranks will refuse the same, with the reason


def _environment(now: datetime, ranks: int, hosts: int) -> dict[str, Any]:
    return {
        "started": now.astimezone(timezone.utc).isoformat(timespec="seconds"),
        "command": hide_in_line(shlex.join(["smpkit", *sys.argv[1:]])),
        "host": socket.gethostname(),
        "hosts": hosts,
        "ranks": ranks,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
    }
