"""What jobs on Slurm, Kubernetes and AWS Batch have in common: what they cannot have, and what their hosts are told.

The launcher finds there what it finds on SageMaker: `hyperparameters.json` and `inputdataconfig.json` below
`input/config`. Variables (`smpkit.config.scheduled`) tell the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from smpkit.config import scheduled as names
from smpkit.config.fields import wrong_job_name
from smpkit.config.job import JobConfig
from smpkit.config.section import KeyPath, validated
from smpkit.errors import Problem, UnsupportedError
from smpkit_estimator.backend import run_below
from smpkit_estimator.hyperparameters import shown_hyperparameters
from smpkit_estimator.status import JobStatus, Phase

_OF_AWS = ("role", "network", "encryption", "experiment", "tags", "metrics", "code_location", "input_mode")
"""Settings of the job file that mean nothing elsewhere."""
_OF_AWS_COMPUTE = ("instance_type", "volume_gb", "spot", "max_wait_seconds", "keep_alive_seconds", "retries")


# ---- what such a job cannot have -------------------------------------------------------------------------------------


def not_for_schedulers(job: JobConfig, name: str | None = None) -> Iterator[Problem]:
    """Yield the settings that only SageMaker can follow, a name that is none, and degrees that fit no hosts."""
    if name is not None and (wrong := wrong_job_name(name)) is not None:
        yield Problem(("name",), *wrong)
    for channel, source in job.inputs.items():
        if source.mode == "Pipe" or source.sharded:
            what = "mode" if source.mode == "Pipe" else "sharded"
            yield Problem(("inputs", channel, what), "is SageMaker's: hosts read folders as they are", "remove it")
    per_host = job.distribution.processes_per_host
    if per_host is not None and not job.is_shell_script:
        for problem in job.distribution.world_problems(job.compute.instance_count * per_host):
            yield problem.below("distribution")


def place_problems(job: JobConfig, mounts: Sequence[str], where: str) -> Iterator[Problem]:
    """Yield the folders of the job file that lie in no volume of its containers.

    Args:
        where: the key of the job file that has the volumes.
    """
    places: dict[KeyPath, str | None] = {("inputs", name): source.uri for name, source in job.inputs.items()}
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


def limit_of(job: JobConfig) -> int | None:
    """Return the seconds that the job file itself allows a job; None if it does not say."""
    return job.compute.max_run_seconds if "max_run_seconds" in job.compute.model_fields_set else None


def notes(job: JobConfig, where: str, instead_of_mpirun: str, *used: str) -> Iterator[str]:
    """Yield notes on settings of AWS that the job file has and that mean nothing here, and on a job for mpirun.

    Args:
        instead_of_mpirun: why ranks are started with torchrun.
        used: settings of AWS that mean something here.
    """
    written = [*job.model_fields_set, *(f"compute.{name}" for name in job.compute.model_fields_set)]
    of_aws = [*_OF_AWS, *(f"compute.{name}" for name in _OF_AWS_COMPUTE)]
    unused = [name for name in of_aws if name in written and name not in used]
    if unused:
        yield f"not used on {where}: {', '.join(f'`{name}`' for name in unused)}"
    if job.distribution.launcher == "mpirun":
        yield f"the ranks are started with torchrun, not mpirun: {instead_of_mpirun}"


# ---- what hosts are told ---------------------------------------------------------------------------------------------


def config_files(job: JobConfig, sent: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Return the contents of `hyperparameters.json`, which are `sent`, and of `inputdataconfig.json`."""
    channels = {
        channel: {
            "TrainingInputMode": source.mode or job.input_mode,
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
            **({"ContentType": source.content_type} if source.content_type else {}),
        }
        for channel, source in job.inputs.items()
    }
    return {"hyperparameters": sent, "inputdataconfig": channels}


def shown_files(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the contents of such files without secrets."""
    return {**files, "hyperparameters": shown_hyperparameters(files["hyperparameters"])}


def host_variables(
    job: JobConfig,
    name: str,
    *,
    base: str,
    machine: str,
    places: Mapping[str, str],
    grace_seconds: int,
    port: int | None = None,
    interface: str | None = None,
) -> dict[str, str]:
    """Return the variables of every launcher and its ranks that are the same on all hosts, without secrets.

    Args:
        base: the folder that stands for `/opt/ml`.
        machine: what stands for the instance type.
        places: folders below it that lie elsewhere.
        grace_seconds: how long ranks may save after SIGTERM.
    """
    variables = {
        "SMPKIT_BASE_DIR": base,
        "SMPKIT_GRACE_SECONDS": str(grace_seconds),
        "PYTHONUNBUFFERED": "1",
        "TRAINING_JOB_NAME": name,
        names.MACHINE: machine,
        names.PLACES: json.dumps(places),
        names.PORT: str(port or ""),
        names.INTERFACE: interface or "",
    }
    return {**{key: value for key, value in variables.items() if value}, **job.variables}


def without_none(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request without what is None in it: what the job file does not set."""

    def pruned(value: Any) -> Any:
        if isinstance(value, dict):
            return without_none(value)
        return [pruned(item) for item in value] if isinstance(value, list) else value

    return {key: pruned(item) for key, item in request.items() if item is not None}


def places_in_volumes(job: JobConfig, name: str) -> dict[str, str]:
    """Return where a job's folders below `/opt/ml` lie in its volumes."""
    inputs = {f"input/data/{channel}": str(source.uri) for channel, source in job.inputs.items()}
    output = f"{job.output.rstrip('/')}/{name}" if job.output is not None else None
    return inputs | result_places(output, job.checkpoints.uri if job.checkpoints is not None else None)


def result_places(output: str | None, checkpoints: str | None) -> dict[str, str]:
    """Return where results lie that do not stay in the run's own folder, by their names below `/opt/ml`."""
    places = {"model": f"{output}/model", "output/data": f"{output}/data"} if output is not None else {}
    return places | ({"checkpoints": checkpoints} if checkpoints is not None else {})


# ---- what is found again ---------------------------------------------------------------------------------------------


def job_to_keep(job: JobConfig) -> dict[str, Any]:
    """Return the job file as JSON has it, to plan the job again when it is resumed."""
    kept: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return kept


def job_again(kept: Mapping[str, Any], changes: Mapping[str, Any] | None, *, machine: str | None = None) -> JobConfig:
    """Return a job like one that was kept, with the `changes` of `Backend.resumed`.

    Args:
        machine: the key of the job file that chooses machines where hosts have no instance types.
    """
    if machine is not None and changes and "InstanceType" in changes:
        where = machine.split(".")[1].capitalize()
        hint = f"submit the job file with another `{machine}`, and the same `checkpoints`"
        raise UnsupportedError(f"`--instance-type` is not for {where}, whose hosts have no types", hint=hint)
    changed, changes = json.loads(json.dumps(kept)), changes or {}
    keys = {"InstanceCount": "instance_count", "MaxRuntimeInSeconds": "max_run_seconds"}
    for key in keys.keys() & changes.keys():
        changed.setdefault("compute", {})[keys[key]] = changes[key]
    return validated(JobConfig, changed, subject="job")


def run_in_volume(job: JobConfig, name: str, what: str) -> Path:
    """Return the measurements of a job whose results lie in a volume, if this machine mounts it.

    Args:
        what: the volume in words, such as `a volume of the cluster`.
    """
    if job.output is None:
        hint = "name a folder in a volume with `output`"
        raise UnsupportedError(f"the results of job `{name}` went with its containers", hint=hint)
    if not Path(job.output).is_dir():
        raise UnsupportedError(f"{job.output} is in {what}, which this machine does not see")
    return run_below(Path(places_in_volumes(job, name)["output/data"]), name)


def status_with_phases(
    status: JobStatus, *, interrupted: Sequence[Phase] = (), waiting: str = "", working: str = ""
) -> JobStatus:
    """Add the phases and lengths that follow from a status's times.

    Args:
        interrupted: attempts that another one followed.
        waiting: what the job waits for, or waited for, until its hosts began.
        working: where it works, or worked.
    """
    created, started, ended = status.created, status.training_started, status.ended
    phases = list(interrupted)
    if started is None:
        phases.append(Phase(status.phase, status.message or waiting, created, ended))
    else:
        now = "Training" if ended else status.phase
        phases.append(Phase("Pending", "", created, started))
        phases.append(Phase(now, (not ended and status.message) or working, started, ended))
        if ended:
            phases.append(Phase(status.phase, status.message, ended, ended))
    status = replace(status, message=phases[-1].message, phases=tuple(phases))
    if not status.over:
        return status
    seconds = max(0, round((ended - started).total_seconds())) if started and ended else 0
    before = round(sum(attempt.seconds(status.seen) for attempt in interrupted))
    return replace(status, training_seconds=seconds, billable_seconds=seconds + before)
