"""Write a job's hyperparameters as SageMaker's SDK v2 sends them: the wire format between laptop and launcher."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from smpkit.config import wire
from smpkit.config.confidential import masked
from smpkit.config.job import JobConfig
from smpkit.errors import Problem

_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TRAINER_CODE = f"{wire.CHANNELS}/code"
_NOT_OF_TRAINERS = (wire.JOB_NAME, wire.REGION, wire.INSTANCE_TYPE)
"""Not known before a `ModelTrainer` submits; an empty or wrong one would hide what the platform says."""


def hyperparameters(
    job: JobConfig,
    *,
    submit_directory: str,
    job_name: str,
    region: str = "",
    launcher: str | None = None,
    ranks_per_host: int | None = None,
    token_file: str | None = None,
    secret_entries: bool = False,
) -> dict[str, str]:
    """Return every hyperparameter of the job, JSON-encoded, the user's own first.

    Args:
        submit_directory: where the launcher finds the sources: an S3 URI of an archive, or a folder of its machine.
        region: of AWS; empty elsewhere.
        launcher: in place of the job's own.
        ranks_per_host: likewise; where the job says nothing either, there will be one for each GPU of the host.
        token_file: where the launchers find the token by which they know each other (`wire.TOKEN_FILE`).
        secret_entries: let the launcher read the job's secrets from AWS Secrets Manager; elsewhere they are variables.
    """
    values: dict[str, Any] = {
        **job.hyperparameters,
        wire.SUBMIT_DIRECTORY: submit_directory,
        wire.PROGRAM: job.entry_point,
        wire.LOG_LEVEL: job.container.log_level,
        wire.JOB_NAME: job_name,
        wire.REGION: region,
    }
    if token_file is not None:
        values[wire.TOKEN_FILE] = token_file
    if secret_entries and job.secrets:  # where the launcher finds them; their values are not known here
        values[wire.SECRETS] = {
            name: secret.model_dump(include={"entry", "key"}) for name, secret in job.secrets.items()
        }
    own = {name: json.dumps(value) for name, value in values.items()}
    return {**own, **distribution_hyperparameters(job, launcher, ranks_per_host)}


def shown_hyperparameters(sent: Mapping[str, str]) -> dict[str, str]:
    """Return hyperparameters as they may be shown: what is probably a secret is hidden."""
    return {name: _masked(name, text) for name, text in sent.items()}


def _masked(name: str, text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:  # somebody else sent it
        value = text
    hidden = masked(name, value)
    return text if hidden == value else json.dumps(hidden)


def for_trainer(job: JobConfig) -> dict[str, str]:
    """Return the hyperparameters that a job of SDK v3's `ModelTrainer` sends to the launcher, JSON-encoded."""
    sent = hyperparameters(job, submit_directory=_TRAINER_CODE, job_name="")
    return {name: text for name, text in sent.items() if name not in _NOT_OF_TRAINERS}


def not_for_shell_files(sent: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what SDK v3 cannot carry: its start script puts hyperparameters unquoted into a shell file."""
    for name, text in sent.items():
        if _SHELL_NAME.fullmatch(name) is None:
            message = "cannot be the name of a hyperparameter with SDK v3, which makes it a shell variable"
            yield Problem(("hyperparameters", name), message, "use letters, digits, `_` and `-`")
        elif "'" in text:
            message = "has an apostrophe, which SDK v3 cannot carry"
            yield Problem(("hyperparameters", name), message, "put it in a file in source_dir")


def distribution_hyperparameters(
    job: JobConfig, launcher: str | None = None, ranks_per_host: int | None = None
) -> dict[str, str]:
    """Return what the job's `distribution` becomes, JSON-encoded; for SDK v2, which makes the other ones itself."""
    distribution = job.distribution
    launcher = launcher or distribution.launcher
    ranks_per_host = ranks_per_host or distribution.processes_per_host
    values: dict[str, Any] = {}
    if launcher == "mpirun":
        values |= {wire.MPI_ENABLED: True, wire.MPI_OPTIONS: distribution.custom_mpi_options}
    elif distribution.torch_distributed is not None and distribution.torch_distributed.enabled:
        values |= {wire.TORCHRUN_ENABLED: True, wire.INSTANCE_TYPE: job.compute.instance_type}
    if ranks_per_host:
        values[wire.PROCESSES_PER_HOST[launcher]] = ranks_per_host
    if distribution.model_parallel is not None:
        # With the user's own keys: Hugging Face looks for the very key `partitions`.
        values[wire.MP_PARAMETERS] = distribution.parameters_as_written
    if distribution.smdistributed is not None:
        values |= {wire.DATA_PARALLEL_ENABLED: False, wire.INSTANCE_TYPE: job.compute.instance_type}
    return {name: json.dumps(value) for name, value in values.items()}
