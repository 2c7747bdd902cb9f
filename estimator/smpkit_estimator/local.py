"""Run a job on this machine: the folder of the run is laid out as `/opt/ml` is, for the launcher of the training image.

What the job writes goes to the folders that the job file names, or else into the folder of the run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.config.scheduled import OF_THE_LAUNCHER, STOPPED
from smpkit.config.wire import HOMOGENEOUS
from smpkit.errors import ConfigError, Problem
from smpkit.observe.runs import CHECKPOINTS, EVENTS, RUN_DIR
from smpkit_estimator.hyperparameters import hyperparameters
from smpkit_estimator.scheduled import config_files, result_places

_HOST = "algo-1"
_MAX_LOCAL_RANKS = 4096  # as the launcher has it
_INTERRUPTED = 128 + signal.SIGINT
_RESULTS = ("model", "output/data", CHECKPOINTS)


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
    """Files and folders from elsewhere that are put into the folder with the sources."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for the script whose values are shown nowhere."""
    notes: tuple[str, ...] = ()

    def places(self, folder: Path) -> dict[str, Path]:
        """Return where results go, by their names below `/opt/ml`: as the job file says, or into the run's folder."""
        output, checkpoints = (str(place) if place else None for place in (self.output, self.checkpoints))
        named = result_places(output, checkpoints)
        return {part: Path(named.get(part, folder / part)) for part in _RESULTS}


@dataclass(frozen=True)
class LocalRun:
    """How a local run ended, and what it left."""

    exit_code: int
    """Of the script; 0 if it was asked to stop and all ranks ended well, 130 after Ctrl-C."""
    seconds: float
    failure: str | None
    """The text of the failure file; None if the job succeeded."""
    model: Path | None
    """Where the script's `SM_MODEL_DIR` was, if anything was written there; so for the next two."""
    output_data: Path | None
    checkpoints: Path | None
    stopped: bool = False
    """Whether a signal asked the run to stop; the launcher has said how that went."""
    rehearsed: bool = False
    """Whether it was interrupted on request and went on, in containers."""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.exit_code == _INTERRUPTED


def plan_local_run(job: JobConfig, folder: Path, num_gpus: int = 0, hosts: int | None = None) -> LocalPlan:
    """Decide how `job` runs here; relative paths in it start at `folder`.

    Without `hosts`, several hosts become one with all their ranks; else each is a container. If the job does not say
    how many ranks a host has, there is one per GPU, or without GPUs as many as the degrees need. Results meant for S3
    stay in a local folder, which a note says. Secrets are taken from this process's environment.

    Raises:
        ConfigError: with all problems.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    source = _local_source(job, folder, problems)
    inputs = dict(local_inputs(job, folder, problems))
    dependencies = tuple(_local_dependencies(job, folder, problems))
    secrets = dict(local_secrets(job, problems))
    ranks = _num_ranks(job, num_gpus, hosts)
    problems += [problem.below("distribution") for problem in job.distribution.world_problems(ranks)]
    if ranks > _MAX_LOCAL_RANKS * (hosts or 1):
        message = f"makes {ranks:,} ranks on one machine, which takes at most {_MAX_LOCAL_RANKS:,}"
        problems.append(Problem(("compute", "instance_count"), message, "`--set compute.instance_count=1`"))
    if problems:
        raise ConfigError(problems, subject="job for a local run")
    if hosts is None and job.compute.instance_count > 1:
        notes.append(f"the job's {job.compute.instance_count} hosts run as one on this machine, with {ranks} ranks")
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


# ---- planning ------------------------------------------------------------------------------------------------------


def _num_ranks(job: JobConfig, num_gpus: int, hosts: int | None) -> int:
    """Return the ranks on all hosts together; without `hosts`, on one that stands for all of the job's."""
    count = hosts or 1
    if job.is_shell_script:
        return count
    if job.distribution.processes_per_host is not None:
        return (hosts or job.compute.instance_count) * job.distribution.processes_per_host
    parameters = job.distribution.model_parallel
    needed = parameters.pipeline_parallel_degree * parameters.tensor_parallel_degree if parameters else 1
    return count * (num_gpus or math.ceil(needed / count))


def _local_source(job: JobConfig, folder: Path, problems: list[Problem]) -> Path:
    path = folder / job.source_dir
    if "://" in job.source_dir:
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
        if "://" in name or not path.exists():
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
        if "://" in channel.uri:
            problems.append(Problem(("inputs", name), f"is not on this machine: `{channel.uri}`", hint))
        elif not path.exists():
            problems.append(Problem(("inputs", name), f"there is no file or folder `{path}`", hint))
        else:
            yield name, path.absolute()


def local_secrets(job: JobConfig, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    for name, secret in job.secrets.items():
        variable = secret.variable or name
        if variable in os.environ:
            yield name, os.environ[variable]
        else:
            message = f"the variable {variable} is not set on this machine"
            hint = f"`read -rs {variable} && export {variable}`; nothing is asked of AWS for a local run"
            problems.append(Problem(("secrets", name), message, hint))


def local_place(what: str, location: str | None, folder: Path, notes: list[str]) -> Path | None:
    if location is None:
        return None
    if "://" in location:
        notes.append(f"`{what}` goes to a local folder, not to {location}")
        return None
    return (folder / location).absolute()


# ---- the folder of the run -------------------------------------------------------------------------------------------


def lay_out(plan: LocalPlan, folder: Path, environ: Mapping[str, str], *, events: bool = False) -> dict[str, str]:
    """Make what the launcher reads in the folder of the run, and return its variables: `environ` and the job's own.

    Args:
        events: let every rank record every step; without it some of them, as far as that costs next to nothing.
    """
    folder = folder.absolute()
    code = folder / "code" if plan.dependencies else plan.source
    if plan.dependencies:
        for path in (*plan.source.iterdir(), *plan.dependencies):
            _link(folder / "code" / path.name, path)
    checkpoints = str(folder / CHECKPOINTS)
    files = platform_files(plan, folder.name, [_HOST], _HOST, code=str(code), checkpoints=checkpoints, interface="lo")
    make_tree(folder, plan.places(folder), plan.inputs, files)
    # A shell in the pod or on the node of a managed job has what tells that job's launcher its hosts.
    inherited = {name: value for name, value in environ.items() if name not in OF_THE_LAUNCHER}
    variables = {**inherited, **plan.job.variables, **plan.secrets}
    own = {"SMPKIT_BASE_DIR": str(folder), RUN_DIR: str(folder), "TRAINING_JOB_NAME": folder.name}
    return {**variables, **own, **({"SMPKIT_EVENTS_DIR": str(folder / EVENTS)} if events else {})}


def make_tree(
    folder: Path, results: Mapping[str, Path], inputs: Mapping[str, Path], files: Mapping[str, Mapping[str, Any]]
) -> None:
    """Make what stands for `/opt/ml`: folders, or links to where they are, and the files of `input/config`.

    Args:
        results: where results go, by their names below the folder; these are made.
    """
    for part, place in results.items():
        place.mkdir(parents=True, exist_ok=True)
        if place != folder / part:
            _link(folder / part, place)
    for name, path in inputs.items():
        _link(folder / "input" / "data" / name, path)
    write_files(folder / "input" / "config", files)


def platform_files(
    plan: LocalPlan, name: str, hosts: Sequence[str], host: str, *, code: str, checkpoints: str, interface: str
) -> dict[str, Any]:
    """Return the contents of the files that one of the hosts sees below `input/config`, by name without `.json`.

    Args:
        code: the path of the sources as the host sees it; likewise `checkpoints`.
    """
    ranks = plan.ranks // len(hosts)
    sent = hyperparameters(plan.job, submit_directory=code, job_name=name, ranks_per_host=ranks)
    group = {"instance_group_name": HOMOGENEOUS, "instance_type": "local", "hosts": list(hosts)}
    return {
        **config_files(plan.job, sent),
        "resourceconfig": {
            "current_host": host,
            "current_instance_type": "local",
            "current_group_name": HOMOGENEOUS,
            "hosts": list(hosts),
            "instance_groups": [group],
            "network_interface_name": interface,
        },
        "checkpointconfig": {"LocalPath": checkpoints},
    }


def write_files(config: Path, files: Mapping[str, Any]) -> None:
    config.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (config / f"{name}.json").write_text(json.dumps(value, indent=2), encoding="utf-8")


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target.absolute(), target_is_directory=target.is_dir())


def collected(folder: Path, exit_code: int, seconds: float) -> LocalRun:
    """Sum up, and remove from the folder of the run what was only for the launcher, and places that stayed empty.

    The launcher's exit code is `STOPPED` if all ranks ended well because they were asked to.
    """
    places = {part: (folder / part).resolve() for part in _RESULTS}
    written = {part: place if _has_files(place) else None for part, place in places.items()}
    failure = folder / "output" / "failure"
    text = failure.read_text(encoding="utf-8", errors="replace") if failure.is_file() else None
    for part in ("code", "input", "output/intermediate", *_RESULTS):
        if (folder / part).is_symlink():
            (folder / part).unlink()
        elif part in ("code", "input") or not _has_files(folder / part):
            shutil.rmtree(folder / part, ignore_errors=True)  # links in it are deleted as links
    failure.unlink(missing_ok=True)  # the summary of the run has it
    if (folder / "output").is_dir() and not any((folder / "output").iterdir()):
        (folder / "output").rmdir()
    saved = exit_code == STOPPED and text is None
    stopped = saved or exit_code == _INTERRUPTED or (text or "").startswith("stopped by SIG")
    model, output, checkpoints = (written[part] for part in _RESULTS)
    return LocalRun(0 if saved else exit_code, seconds, text, model, output, checkpoints, stopped)


def _has_files(folder: Path) -> bool:
    return any(not path.is_dir() for path in folder.rglob("*"))
