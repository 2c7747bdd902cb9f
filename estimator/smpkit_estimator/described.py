"""What all schedulers of one's own have in common: `spec.json`, which hosts read, and what such a job cannot have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from smpkit.config.confidential import masked
from smpkit.config.job import JobConfig
from smpkit.config.section import KeyPath
from smpkit.config.wire import PROCESSES_PER_HOST
from smpkit.errors import Problem
from smpkit_estimator.platform_files import config_files

__all__ = [
    "described_job",
    "first_of_each",
    "job_to_keep",
    "not_for_schedulers",
    "place_problems",
    "sent_hyperparameters",
    "shown_spec",
    "unused_settings",
    "world_problems",
]

_OF_AWS = ("role", "network", "encryption", "experiment", "tags", "metrics", "code_location", "input_mode")
"""Settings of the job file that mean nothing elsewhere."""
_OF_AWS_COMPUTE = ("instance_type", "volume_gb", "spot", "max_wait_seconds", "keep_alive_seconds", "retries")


def sent_hyperparameters(job: JobConfig, submit_directory: str, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the hyperparameters, JSON-encoded, and the channels, as hosts read them. torchrun starts the ranks."""
    per_host = job.distribution.processes_per_host
    files = config_files(
        job,
        hosts=[],
        host="",
        submit_directory=submit_directory,
        job_name=name,
        ranks_per_host=per_host or 1,
        interface="",
        checkpoints="",
    )
    sent = {name: text for name, text in files["hyperparameters"].items() if not name.startswith("sagemaker_mpi_")}
    sent.pop(PROCESSES_PER_HOST["torchrun"], None)
    if per_host:  # else one for each GPU of the host
        sent[PROCESSES_PER_HOST["torchrun"]] = json.dumps(per_host)
    return sent, files["inputdataconfig"]


def described_job(
    job: JobConfig,
    name: str,
    now: datetime,
    submit_directory: str,
    *,
    kind: str,
    prefix: str,
    port: int | None,
    interface: str | None = None,
    grace_seconds: int | None = None,
) -> dict[str, Any]:
    """Return `spec.json` of a job whose folders lie in volumes that all hosts mount.

    Args:
        submit_directory: where hosts find the sources.
        kind: what stands for the type of the machines.
        prefix: of the hosts' names, before their numbers.
        port: where ranks meet, and at the next one the launchers; None = the launcher's default.
        grace_seconds: how long ranks may save after SIGTERM; None = the launcher's default.
    """
    sent, channels = sent_hyperparameters(job, submit_directory, name)
    places = {}
    if job.output is not None:
        output = job.output.rstrip("/")
        parts = ("model", "output/data", "output/intermediate")
        places = {part: f"{output}/{name}/{part.rpartition('/')[2]}" for part in parts}
    if job.checkpoints is not None:
        places["checkpoints"] = job.checkpoints.uri
    grace = {} if grace_seconds is None else {"SMPKIT_GRACE_SECONDS": str(grace_seconds)}
    return {
        "name": name,
        "created": now.isoformat(),
        "hyperparameters": sent,
        "environment": {**grace, **job.variables},
        "inputs": {channel: each.uri for channel, each in job.inputs.items()},
        "channels": channels,
        "places": places,
        "instance_type": kind,
        "interface": interface,
        "nodes": job.compute.num_hosts,
        "host_prefix": prefix,
        "port": port,
    }


def shown_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description without secrets."""
    sent = {name: _masked(name, text) for name, text in spec["hyperparameters"].items()}
    return {**spec, "environment": masked("", spec["environment"]), "hyperparameters": sent}


def _masked(name: str, text: str) -> str:
    value = json.loads(text)
    hidden = masked(name, value)
    return text if hidden == value else json.dumps(hidden)


def job_to_keep(job: JobConfig) -> dict[str, Any]:
    """Return the job file as JSON has it, to plan the job again when it is resumed."""
    kept: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return kept


def unused_settings(job: JobConfig, *used: str) -> list[str]:
    """Return the settings of AWS that the job file has and that mean nothing here."""
    unused = [name for name in _OF_AWS if name in job.model_fields_set and name not in used]
    inner = (f"compute.{name}" for name in _OF_AWS_COMPUTE if name in job.compute.model_fields_set)
    return unused + [name for name in inner if name not in used]


def world_problems(job: JobConfig, hosts: int) -> Iterator[Problem]:
    """Yield what is wrong between the degrees and the number of ranks, where that is known."""
    per_host = job.distribution.processes_per_host
    if per_host is None or job.is_shell_script:
        return
    for problem in job.distribution.world_problems(hosts * per_host):
        yield Problem(("distribution", *problem.path), problem.message, problem.hint)


def not_for_schedulers(job: JobConfig, where: str) -> Iterator[Problem]:
    """Yield the settings that only SageMaker can follow.

    Args:
        where: the scheduler's name.
    """
    if job.compute.instance_groups:
        message = f"are SageMaker's: on {where} all hosts of a job are alike"
        yield Problem(("compute", "instance_groups"), message, "submit a job for each group")
    for channel, each in job.inputs.items():
        if each.mode == "Pipe" or each.sharded:
            what = "mode" if each.mode == "Pipe" else "sharded"
            yield Problem(("inputs", channel, what), "is SageMaker's: hosts read folders as they are", "remove it")


def place_problems(job: JobConfig, mounts: Sequence[str], where: str) -> Iterator[Problem]:
    """Yield the folders of the job file that lie in no volume of its containers.

    Args:
        mounts: where the containers see the volumes.
        where: the key of the job file that has the volumes.
    """
    places: dict[KeyPath, str | None] = {("inputs", name): each.uri for name, each in job.inputs.items()}
    if job.output is not None:
        places["output",] = job.output
    if job.checkpoints is not None:
        places["checkpoints", "uri"] = job.checkpoints.uri
    known = ", ".join(mounts) or "there are none"
    for path, uri in places.items():
        if uri is None:
            yield Problem(path, "is a file system of AWS", f"mount it with `{where}`, and name the folder")
        elif "://" in uri:
            yield Problem(path, f"is no folder that containers see: `{uri}`", f"name one in `{where}` ({known})")
        elif not any(PurePosixPath(uri).is_relative_to(mount) for mount in mounts):
            yield Problem(path, f"lies in no volume of the containers: `{uri}`", f"name one in `{where}` ({known})")


def first_of_each(problems: Sequence[Problem]) -> list[Problem]:
    """Keep the first problem of each key."""
    first: dict[KeyPath, Problem] = {}
    for problem in problems:
        first.setdefault(problem.path, problem)
    return list(first.values())
