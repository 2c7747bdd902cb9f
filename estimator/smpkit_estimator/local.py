"""Run a job on this machine: an `/opt/ml`-like tree, and the launcher that the training image runs.

The tree is temporary and holds links: what the job writes goes to the folders that the job file names, or else into the
folder of the run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.config.words import printable
from smpkit.errors import ConfigError, Problem
from smpkit.modules import module_command
from smpkit.observe.runs import CHECKPOINTS, EVENTS, RUN_DIR
from smpkit_estimator.platform_files import config_files

__all__ = [
    "LocalPlan",
    "LocalRun",
    "local_inputs",
    "local_secrets",
    "plan_local_run",
    "run_local",
]

_HOST = "algo-1"
_PLACES: Mapping[str, str] = {
    "model": "model",
    "output/data": "output",
    "output/intermediate": "intermediate",
    "checkpoints": CHECKPOINTS,
}
"""Where the script may write, and where that is in the folder of the run if the job file names no other place."""
_INTERRUPTED = 128 + signal.SIGINT
_MAX_LOCAL_RANKS = 4096  # as the launcher has it


@dataclass(frozen=True)
class LocalPlan:
    """What a local run will do, decided and checked before anything is made or started."""

    job: JobConfig
    source: Path
    inputs: Mapping[str, Path]
    output: Path | None
    """Folder for the results that the job file names; None: that of the run."""
    checkpoints: Path | None
    ranks: int
    """Over all hosts."""
    hosts: int = 1
    dependencies: tuple[Path, ...] = ()
    """Files and folders from elsewhere that are put beside the script."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for the script whose values are shown nowhere."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalRun:
    """How a local run ended, and what it left."""

    exit_code: int
    seconds: float
    failure: str | None
    """The text of the failure file; None if the job succeeded."""
    model: Path | None
    """Where the script's `SM_MODEL_DIR` was, if anything was written there; so for the next two."""
    output_data: Path | None
    checkpoints: Path | None
    stopped: bool = False
    """Whether a signal asked the run to stop; the launcher has said how that went."""
    launcher_killed: bool = False
    """Whether the launcher itself was killed, and could say nothing."""

    @property
    def interrupted(self) -> bool:
        return self.exit_code == _INTERRUPTED


def plan_local_run(
    job: JobConfig,
    folder: Path,
    num_gpus: int = 0,
    hosts: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> LocalPlan:
    """Decide how `job` runs here; relative paths in it start at `folder`.

    Without `hosts`, several hosts become one with all their ranks; else each is a container. If the job does not say
    how many ranks a host has, there is one per GPU, or without GPUs as many as the degrees need. Results meant for S3
    stay in a local folder, which a note says. Secrets are taken from `environ`; default: this process's.

    Raises:
        ConfigError: sources, inputs or secrets are not on this machine, or the degrees do not fit; lists all problems.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    source = _local_source(job, folder, problems)
    inputs = dict(local_inputs(job, folder, problems))
    dependencies = tuple(_local_dependencies(job, folder, problems))
    secrets = dict(local_secrets(job, os.environ if environ is None else environ, problems))
    ranks = _num_ranks(job, num_gpus) if hosts is None else hosts * _ranks_per_host(job, num_gpus, hosts)
    problems += [Problem(("distribution", *p.path), p.message, p.hint) for p in job.distribution.world_problems(ranks)]
    if ranks > _MAX_LOCAL_RANKS * (hosts or 1):
        message = f"makes {ranks:,} ranks on one machine, which takes at most {_MAX_LOCAL_RANKS:,}"
        problems.append(Problem(("compute", "instance_count"), message, "`--set compute.instance_count=1`"))
    if problems:
        raise ConfigError(problems, subject="job for a local run")
    alone = job.compute.num_hosts - job.num_rank_hosts
    if alone:
        notes.append(f"only the hosts with ranks run here: those of {_names(job)}; {alone} more run on SageMaker alone")
    if hosts is None and job.num_rank_hosts > 1:
        notes.append(f"the job's {job.num_rank_hosts} hosts run as one on this machine, with {ranks} ranks")
    return LocalPlan(
        job=job,
        source=source,
        inputs=inputs,
        output=local_place("output", job.output, folder, notes),
        checkpoints=local_place("checkpoints", job.checkpoints.uri if job.checkpoints else None, folder, notes),
        ranks=ranks,
        hosts=hosts or 1,
        dependencies=dependencies,
        secrets=secrets,
        notes=tuple(notes),
    )


def run_local(
    plan: LocalPlan,
    folder: Path,
    arguments: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    events: bool = False,
) -> LocalRun:
    """Run the job and wait for it; its output goes to this process's stdout and stderr.

    Ctrl-C, SIGTERM and SIGHUP are passed on to the launcher, which stops the ranks. Must be called in the main thread.

    Args:
        folder: that of the run, which exists.
        arguments: more arguments for the script, after those made of hyperparameters.
        environ: the environment of the launcher, on top of which the job's own goes; default: this process's.
        events: let every rank record every step; without it some of them, as far as that costs next to nothing.
    """
    tree = Path(tempfile.mkdtemp(prefix=f"smpkit-{plan.job.name}-"))
    try:
        _build(tree, plan, folder)
        command = [*module_command("smpkit_container"), "train", *(["--", *arguments] if arguments else [])]
        began = time.monotonic()
        variables = _environment(plan, tree, folder, os.environ if environ is None else environ)
        if events:
            variables["SMPKIT_EVENTS_DIR"] = str(folder / EVENTS)
        status, signals = _wait_for(command, variables)
        killed = status < 0 and -status not in signals
        if killed:
            _leave_reason(tree, -status)
        exit_code = status if status >= 0 else 128 - status
        done = _collect(tree, folder, exit_code, time.monotonic() - began)
    finally:
        shutil.rmtree(tree, ignore_errors=True)  # links in it are deleted as links, never what they point to
    return replace(done, stopped=bool(signals), launcher_killed=killed)


# ---- planning ------------------------------------------------------------------------------------------------------


def _num_ranks(job: JobConfig, num_gpus: int) -> int:
    if job.is_shell_script:
        return 1
    if job.distribution.processes_per_host is None:
        return num_gpus or _needed_ranks(job)
    return job.num_processes(job.distribution.processes_per_host)


def _ranks_per_host(job: JobConfig, num_gpus: int, hosts: int) -> int:
    if job.is_shell_script:
        return 1
    return job.distribution.processes_per_host or num_gpus or math.ceil(_needed_ranks(job) / hosts)


def _needed_ranks(job: JobConfig) -> int:
    parameters = job.distribution.model_parallel
    return parameters.pipeline_parallel_degree * parameters.tensor_parallel_degree if parameters else 1


def _names(job: JobConfig) -> str:
    return ", ".join(printable(group.name) for group in job.rank_groups)


def _is_remote(location: str) -> bool:
    return "://" in location


def _local_source(job: JobConfig, folder: Path, problems: list[Problem]) -> Path:
    path = folder / job.source_dir
    if _is_remote(job.source_dir):
        message = f"is not on this machine: `{job.source_dir}`"
        problems.append(Problem(("source_dir",), message, "name a local folder with `--set source_dir=./src`"))
    elif not path.is_dir():
        problems.append(Problem(("source_dir",), f"there is no folder `{path}`"))
    elif not (path / job.entry_point).is_file():
        problems.append(Problem(("entry_point",), f"there is no file `{job.entry_point}` in `{path}`"))
    return path.absolute()


def _local_dependencies(job: JobConfig, folder: Path, problems: list[Problem]) -> Iterator[Path]:
    taken = {path.name for path in (folder / job.source_dir).glob("*")}
    for name in job.dependencies:
        path = (folder / name).resolve()
        if _is_remote(name) or not path.exists():
            problems.append(Problem(("dependencies",), f"there is no file or folder `{name}` on this machine"))
        elif path.name in taken:
            problems.append(Problem(("dependencies",), f"`{path.name}` is in source_dir too", "rename one of them"))
        else:
            taken.add(path.name)
            yield path


def local_inputs(job: JobConfig, folder: Path, problems: list[Problem]) -> Iterator[tuple[str, Path]]:
    for name, channel in job.inputs.items():
        hint = f"name a local one with `--set inputs.{name}=./data`"
        if channel.uri is None:
            problems.append(Problem(("inputs", name), "is a file system of AWS, not on this machine", hint))
            continue
        path = folder / channel.uri
        if _is_remote(channel.uri):
            problems.append(Problem(("inputs", name), f"is not on this machine: `{channel.uri}`", hint))
        elif not path.exists():
            problems.append(Problem(("inputs", name), f"there is no file or folder `{path}`", hint))
        else:
            yield name, path.absolute()


def local_secrets(job: JobConfig, environ: Mapping[str, str], problems: list[Problem]) -> Iterator[tuple[str, str]]:
    for name, secret in job.secrets.items():
        variable = secret.variable or name
        if variable in environ:
            yield name, environ[variable]
        else:
            message = f"the variable {variable} is not set on this machine"
            hint = f"`read -rs {variable} && export {variable}`; nothing is asked of AWS for a local run"
            problems.append(Problem(("secrets", name), message, hint))


def local_place(what: str, location: str | None, folder: Path, notes: list[str]) -> Path | None:
    if location is None:
        return None
    if _is_remote(location):
        notes.append(f"`{what}` goes to a local folder, not to {location}")
        return None
    return (folder / location).absolute()


# ---- the tree ------------------------------------------------------------------------------------------------------


def _build(tree: Path, plan: LocalPlan, folder: Path) -> None:
    """Lay out the tree; places for results are links, so the script writes to them directly."""
    config = tree / "input" / "config"
    config.mkdir(parents=True)
    (tree / "input" / "data").mkdir()
    (tree / "output").mkdir()
    _place_code(tree / "code", plan)
    for name, path in plan.inputs.items():
        (tree / "input" / "data" / name).symlink_to(path)
    named = {"checkpoints": plan.checkpoints}
    if plan.output is not None:
        named |= {"model": plan.output / "model", "output/data": plan.output / "data"}
    for name, place in _PLACES.items():
        _place(tree / name, named.get(name) or folder / place)
    for name, value in _config_files(tree, plan, folder.name).items():
        (config / f"{name}.json").write_text(json.dumps(value, indent=2), encoding="utf-8")


def _place_code(code: Path, plan: LocalPlan) -> None:
    """Link the sources: their folder, or, with dependencies, each of its entries and each dependency."""
    if not plan.dependencies:
        code.symlink_to(plan.source, target_is_directory=True)
        return
    code.mkdir()
    for path in (*plan.source.iterdir(), *plan.dependencies):
        (code / path.name).symlink_to(path)


def _place(link: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target.absolute(), target_is_directory=True)


def _config_files(tree: Path, plan: LocalPlan, name: str) -> dict[str, Any]:
    return config_files(
        plan.job,
        hosts=[_HOST],
        host=_HOST,
        submit_directory=str(tree / "code"),
        job_name=name,
        ranks_per_host=plan.ranks,  # this machine has the ranks of all hosts
        interface="lo",
        checkpoints=str(tree / "checkpoints"),
    )


# ---- the process ---------------------------------------------------------------------------------------------------


def _environment(plan: LocalPlan, tree: Path, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    variables = {**environ, **plan.job.environment, **plan.secrets}
    if plan.dependencies:
        # Python resolves the link to the script and puts only the folder behind it on its path.
        found = [str(tree / "code"), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(found)
    return {
        **variables,
        "SMPKIT_BASE_DIR": str(tree),
        "SMPKIT_DIE_WITH_PARENT": "1",
        "TRAINING_JOB_NAME": folder.name,
        "PET_LOG_DIR": str(tree / "torchrun"),  # else torchrun leaves a folder behind
        RUN_DIR: str(folder.absolute()),
    }


def _wait_for(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, list[int]]:
    """Run the launcher until it exits; signals do not end this process first.

    Returns:
        How the launcher ended, minus the signal's number if one killed it, and the signals that asked it to stop.
    """
    with _relayed() as relay:
        # In a session of its own: a signal to this process and one to its group both reach the launcher once.
        relay.process = subprocess.Popen(command, env=environ, start_new_session=True)
        relay.flush()
        return relay.process.wait(), relay.received


class _Relay:
    """The launcher, and the signals that asked it to stop."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []
        self._pending: deque[int] = deque()

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received.append(number)
        self._pending.append(number)
        self.flush()

    def flush(self) -> None:
        """Send each signal once, though this may be interrupted by itself; those of the start are sent after it."""
        while self.process is not None:
            try:
                number = self._pending.popleft()
            except IndexError:
                return
            self.process.send_signal(number)  # does nothing if it has ended


@contextmanager
def _relayed() -> Iterator[_Relay]:
    """Pass SIGINT, SIGTERM and SIGHUP on to the launcher."""
    relay = _Relay()

    # What is ignored stays so: SIGHUP under nohup, SIGINT of a background job.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, relay.handle) for number in numbers}
    try:
        yield relay
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# ---- afterwards ----------------------------------------------------------------------------------------------------


def _leave_reason(tree: Path, number: int) -> None:
    """Write why the job failed, for a launcher that was killed and could not."""
    why = " (the machine may be out of memory)" if number == signal.SIGKILL else ""
    failure = tree / "output" / "failure"
    if not failure.exists():
        failure.write_text(f"the launcher was killed by {signal.Signals(number).name}{why}", encoding="utf-8")


def _collect(tree: Path, folder: Path, exit_code: int, seconds: float) -> LocalRun:
    """Sum up, and remove the places in the folder of the run to which nothing was written."""
    written = {name: (tree / name).resolve() if _has_files(tree / name) else None for name in _PLACES}
    failure = tree / "output" / "failure"
    text = failure.read_text(encoding="utf-8", errors="replace") if failure.is_file() else None
    for place in _PLACES.values():
        if (folder / place).is_dir() and not _has_files(folder / place):
            shutil.rmtree(folder / place, ignore_errors=True)
    return LocalRun(
        exit_code=exit_code,
        seconds=seconds,
        failure=text,
        model=written["model"],
        output_data=written["output/data"],
        checkpoints=written["checkpoints"],
    )


def _has_files(folder: Path) -> bool:
    return any(not path.is_dir() for path in folder.resolve().rglob("*"))
