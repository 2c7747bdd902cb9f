"""From a job file to what `sbatch` gets: the script and what each run's folder holds, decided and checked first."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit.config.backend import Slurm
from smpkit.config.fields import JOB_NAME
from smpkit.config.job import JobConfig
from smpkit.config.section import KeyPath
from smpkit.config.wire import TOKEN_FILE
from smpkit.config.words import quoted
from smpkit.errors import ConfigError, Problem, UsageError
from smpkit.modules import module_command
from smpkit_estimator.described import (
    first_of_each,
    not_for_schedulers,
    sent_hyperparameters,
    shown_spec,
    unused_settings,
    world_problems,
)
from smpkit_estimator.local import local_inputs, local_secrets
from smpkit_estimator.slurm.folder import runs_folder
from smpkit_estimator.slurm.script import Batch, batch_script, container_words
from smpkit_estimator.sources import Sources, job_sources, pack, packing_notes

__all__ = ["Run", "SlurmPlan", "container_runtime", "plan_runs", "resumed_run"]

_MAX_GRACE_SECONDS = 110  # as on SageMaker
_MARGIN_SECONDS = 5
_SHORT_GRACE_SECONDS = 60


@dataclass(frozen=True)
class Run:
    """One run: its folder, and what every node of it reads there."""

    name: str
    folder: Path
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class SlurmPlan:
    """All that will be sent, decided and checked; nothing was written or started."""

    name: str
    runs: tuple[Run, ...]
    batch: Batch
    script: str
    sources: Sources | None
    """What is shipped; None for a run that takes the sources of another one."""
    code: Path | None = None
    """The sources of that other run."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether the runs are the tasks of an array."""
        return self.batch.runs > 0

    @property
    def job_names(self) -> tuple[str, ...]:
        """The jobs that it starts."""
        return tuple(run.name for run in self.runs)

    @property
    def machines(self) -> str:
        """On what, in words."""
        where = f" of {self.batch.options.partition}" if self.batch.options.partition else ""
        nodes = f"{self.batch.nodes} node{'s' * (self.batch.nodes != 1)}{where}"
        return f"{len(self.runs)} runs, {nodes} each" if self.is_array else nodes

    @property
    def max_seconds(self) -> int | None:
        """How long the job may run; None where the partition decides."""
        return None if self.batch.options.time else self.batch.seconds

    def shown(self) -> dict[str, Any]:
        """What is written and sent, without secrets."""
        specs = {run.name: shown_spec(run.spec) for run in self.runs}
        return {"script": self.script, "folder": str(self.runs[0].folder.parent), "runs": specs}

    def text(self) -> str:
        """The script, and what the nodes read, as comments behind it."""
        lines = [self.script]
        for name, spec in self.shown()["runs"].items():
            text = json.dumps(spec, indent=2, ensure_ascii=False)
            lines += [f"# {name}/spec.json", *(f"# {line}" for line in text.splitlines()), ""]
        return "\n".join(lines)


def plan_runs(
    job: JobConfig,
    folder: Path,
    name: str,
    now: datetime,
    settings: Mapping[str, str],
    *,
    script_only: bool = False,
    nodes: int | None = None,
) -> SlurmPlan:
    """Decide everything about a job on Slurm; relative paths start at `folder`.

    Args:
        settings: the cluster's configuration.
        nodes: of the allocation in which the job runs, if there is one already.

    Raises:
        ConfigError: the job cannot be sent as it is; lists all problems.
    """
    options = job.backend.slurm
    problems = list(_not_for_slurm(job, name))
    sources = job_sources(job, folder, problems, script_only=script_only)
    inputs = {channel: str(path) for channel, path in local_inputs(job, folder, problems)}
    secrets = dict(local_secrets(job, os.environ, problems))
    count = nodes or job.compute.num_hosts
    problems += world_problems(job, count)
    runtime = container_runtime(options, job.image, problems)
    if problems:
        raise ConfigError(first_of_each(problems), subject="job for Slurm")
    root = (folder / options.folder).absolute() if options.folder else runs_folder()
    sets: list[Mapping[str, Any] | None] = list(options.array) or [None]
    names = [name if each is None else f"{name}-{index}" for index, each in enumerate(sets)]
    specs = [
        _spec(job, folder, root / each, count, inputs, settings, now, index, more)
        for index, (each, more) in enumerate(zip(names, sets, strict=True))
    ]
    places = [str(folder / path) for path in (job.output, job.checkpoints.uri if job.checkpoints else None) if path]
    mounts = [str(root), *inputs.values(), *map(os.path.abspath, places), *options.mounts]
    wants_gpus = options.gpus_per_node is not None or options.gres is not None
    around, before = container_words(runtime, job.image, mounts, gpus=wants_gpus)
    python = ["python3", "-m", "smpkit_container"] if around or before else module_command("smpkit_container")
    written = "max_run_seconds" in job.compute.model_fields_set
    batch = Batch(
        name=name,
        run=str(root / name),
        nodes=count,
        cpus=options.cpus_per_node or job.distribution.processes_per_host or 1,
        command=(*before, *python, "slurm"),
        options=options,
        seconds=job.compute.max_run_seconds if written else None,
        runs=len(options.array),
        container=around,
    )
    for spec in specs:
        spec["batch"] = {
            **asdict(replace(batch, runs=0)),
            "options": options.model_dump(mode="json", exclude={"array"}),
        }
    made = tuple(Run(each, root / each, spec) for each, spec in zip(names, specs, strict=True))
    packed = pack(sources) if sources is not None else None
    notes = [*_notes(job, runtime, settings)]
    if sources is not None and packed is not None:
        notes += packing_notes(sources, packed)
    return SlurmPlan(name, made, batch, batch_script(batch), sources, None, secrets, tuple(notes))


def resumed_run(run: Path, old: Mapping[str, Any], name: str, now: datetime, changes: Mapping[str, Any]) -> SlurmPlan:
    """Plan a run like another one that goes on from its checkpoints: the same sources, data and settings.

    Raises:
        UsageError: the name cannot be one.
    """
    if re.fullmatch(JOB_NAME, name) is None:
        raise UsageError(f"{quoted(name)} cannot be the name of a job", hint="letters, digits and hyphens, at most 63")
    root = run.parent
    stored = dict(old["batch"])
    options = Slurm.model_validate(stored["options"])
    seconds = changes.get("MaxRuntimeInSeconds")
    if seconds is not None:
        options = options.model_copy(update={"time": None})
    count = changes.get("InstanceCount") or stored["nodes"]
    batch = Batch(
        **{
            **stored,
            "name": name,
            "run": str(root / name),
            "nodes": count,
            "options": options,
            "command": tuple(stored["command"]),
            "container": tuple(stored["container"]),
            "seconds": seconds or stored["seconds"],
        }
    )
    places = {part: place.replace(str(run), str(root / name), 1) for part, place in old["places"].items()}
    sent = {
        **old["hyperparameters"],
        "sagemaker_submit_directory": json.dumps(str(root / name / "code")),
        "sagemaker_job_name": json.dumps(name),
        TOKEN_FILE: json.dumps(str(root / name / "token")),
    }
    spec = {
        **old,
        "name": name,
        "created": now.isoformat(),
        "hyperparameters": sent,
        "places": {**places, "checkpoints": old["places"]["checkpoints"]},
        "nodes": count,
        "resumed_from": old["name"],
        "batch": {**asdict(batch), "options": batch.options.model_dump(mode="json", exclude={"array"})},
    }
    secrets = json.loads((run / "secrets.json").read_bytes()) if (run / "secrets.json").is_file() else {}
    made = (Run(name, root / name, spec),)
    return SlurmPlan(name, made, batch, batch_script(batch), None, run / "code", secrets)


def container_runtime(options: Slurm, image: str | None, problems: list[Problem]) -> str:
    """Return what starts the image: `pyxis`, `apptainer`, or `none` where the job names no image."""
    if image is None or options.container == "none":
        return "none"
    if options.container != "auto":
        return options.container
    if _has_pyxis():
        return "pyxis"
    if shutil.which("apptainer"):
        return "apptainer"
    hint = "name one with `backend.slurm.container`, or set it to `none` to run in the environment that submits"
    message = "is a container image, and neither pyxis nor Apptainer was found here to start it"
    problems.append(Problem(("image",), message, hint))
    return "none"


def _has_pyxis() -> bool:
    try:
        done = subprocess.run(["srun", "--help"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return "--container-image" in done.stdout


def _spec(
    job: JobConfig,
    folder: Path,
    run: Path,
    nodes: int,
    inputs: Mapping[str, str],
    settings: Mapping[str, str],
    now: datetime,
    index: int,
    more: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what the nodes of one run read."""
    options = job.backend.slurm
    task = () if more is None else (str(index),)
    output = (folder / job.output).absolute().joinpath(*task) if job.output else run
    kept = (folder / job.checkpoints.uri).absolute().joinpath(*task) if job.checkpoints else run / "checkpoints"
    each = job.model_copy(update={"hyperparameters": {**job.hyperparameters, **(more or {})}})
    sent, channels = sent_hyperparameters(each, str(run / "code"), run.name)
    sent[TOKEN_FILE] = json.dumps(str(run / "token"))
    grace = options.grace_seconds or _grace(settings)
    return {
        "name": run.name,
        "cluster": settings.get("ClusterName", ""),
        "created": now.isoformat(),
        "hyperparameters": sent,
        "environment": {"SMPKIT_GRACE_SECONDS": str(grace), **job.variables},
        "inputs": dict(inputs),
        "channels": channels,
        "places": {
            "model": str(output / "model"),
            "output/data": str(output / "data"),
            "output/intermediate": str(output / "intermediate"),
            "checkpoints": str(kept),
        },
        "instance_type": options.partition or "slurm",
        "interface": options.interface,
        "nodes": nodes,
    }


def _grace(settings: Mapping[str, str]) -> int:
    """Return how long ranks may save: Slurm sends SIGKILL `KillWait` seconds after SIGTERM."""
    found = re.match(r"\d+", settings.get("KillWait", ""))
    return max(1, min(_MAX_GRACE_SECONDS, int(found[0]) - _MARGIN_SECONDS)) if found else 25


def _not_for_slurm(job: JobConfig, name: str) -> Iterator[Problem]:
    """Yield the settings that Slurm cannot follow."""
    count = len(job.backend.slurm.array)
    longest = f"{name}-{count - 1}" if count else name
    if re.fullmatch(JOB_NAME, longest) is None:
        message = f"makes the name {quoted(longest)}, and a name has 1 to 63 letters, digits and hyphens"
        yield Problem(("name",), message, "give a shorter one")
    yield from not_for_schedulers(job, "Slurm")
    places: dict[KeyPath, str] = {}
    if job.output is not None:
        places["output",] = job.output
    if job.checkpoints is not None:
        places["checkpoints", "uri"] = job.checkpoints.uri
    for path, uri in places.items():
        if "://" in uri:
            yield Problem(path, f"is not a folder that the nodes see: `{uri}`", "name a folder on a shared file system")


def _notes(job: JobConfig, runtime: str, settings: Mapping[str, str]) -> Iterator[str]:
    unused = unused_settings(job)
    if unused:
        yield f"not used on Slurm: {', '.join(f'`{name}`' for name in unused)}"
    if job.distribution.launcher == "mpirun":
        yield "the ranks are started with torchrun, not mpirun: on Slurm, mpirun would start its processes with srun"
    if job.image is not None and runtime == "none":
        yield f"the image {job.image} is not used: `backend.slurm.container` is `none`"
    if "" in settings:
        yield f"{settings['']}: `KillWait` and the cluster's name are stand-ins"
    grace = job.backend.slurm.grace_seconds or _grace(settings)
    if grace < _SHORT_GRACE_SECONDS and "SMPKIT_GRACE_SECONDS" not in job.environment:
        yield f"when the job is stopped or preempted, ranks have {grace} s to save (the cluster's `KillWait`)"
