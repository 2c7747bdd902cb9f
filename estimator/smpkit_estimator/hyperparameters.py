"""Write a job's hyperparameters as SageMaker's SDK v2 sends them: the wire format between laptop and launcher."""

from __future__ import annotations

import json
from typing import Any

from smpkit.config.job import JobConfig

__all__ = [
    "INSTANCE_GROUPS",
    "PARAMETERS_FILE",
    "PROCESSES_PER_HOST",
    "distribution_hyperparameters",
    "hyperparameters",
]

PROCESSES_PER_HOST = {
    "mpirun": "sagemaker_mpi_num_of_processes_per_host",
    "torchrun": "sagemaker_smpkit_processes_per_host",
}
"""Ranks per host, by launcher. The second is ours: the SDK has no such hyperparameter for torchrun."""

INSTANCE_GROUPS = "sagemaker_distribution_instance_groups"
"""Names the groups whose hosts run ranks, in a job with different machines."""

PARAMETERS_FILE = "sagemaker_smpkit_parameters_file"
"""Names the file in the sources with `mp_parameters` that are too long to be sent themselves. Ours."""


def hyperparameters(
    job: JobConfig, *, submit_directory: str, job_name: str, region: str, parameters_file: str | None = None
) -> dict[str, str]:
    """Return every hyperparameter of the job, JSON-encoded, the user's own first.

    Args:
        submit_directory: where the launcher finds the sources: an S3 URI of an archive, or a folder of its machine.
        job_name: the unique name of this run.
        region: the cloud region; empty for a local run.
        parameters_file: send this name of a file in the sources instead of the `mp_parameters` themselves.
    """
    values: dict[str, Any] = {
        **job.hyperparameters,
        "sagemaker_submit_directory": submit_directory,
        "sagemaker_program": job.entry_point,
        "sagemaker_container_log_level": job.container.log_level,
        "sagemaker_job_name": job_name,
        "sagemaker_region": region,
    }
    own = {name: json.dumps(value) for name, value in values.items()}
    return {**own, **distribution_hyperparameters(job, parameters_file)}


def distribution_hyperparameters(job: JobConfig, parameters_file: str | None = None) -> dict[str, str]:
    """Return what the job's `distribution` becomes, JSON-encoded; for SDK v2, which makes the other ones itself."""
    values = {**_launcher(job), **_groups(job), **_model_parallel(job, parameters_file)}
    return {name: json.dumps(value) for name, value in values.items()}


def _launcher(job: JobConfig) -> dict[str, Any]:
    distribution, per_host = job.distribution, job.distribution.processes_per_host
    if distribution.launcher == "mpirun":
        return {
            "sagemaker_mpi_enabled": True,
            **({PROCESSES_PER_HOST["mpirun"]: per_host} if per_host else {}),
            "sagemaker_mpi_custom_mpi_options": distribution.custom_mpi_options,
        }
    asked = distribution.torch_distributed is not None and distribution.torch_distributed.enabled
    instance_type = _instance_type(job)
    return {
        **({"sagemaker_torch_distributed_enabled": True, "sagemaker_instance_type": instance_type} if asked else {}),
        **({PROCESSES_PER_HOST["torchrun"]: per_host} if per_host else {}),
    }


def _instance_type(job: JobConfig) -> str | None:
    """Return the type of all hosts; None for a job with groups, as the SDK has it."""
    return None if job.compute.instance_groups else job.compute.instance_type


def _groups(job: JobConfig) -> dict[str, Any]:
    named = job.distribution.instance_groups
    return {INSTANCE_GROUPS: list(named)} if named else {}


def _model_parallel(job: JobConfig, parameters_file: str | None) -> dict[str, Any]:
    """Return the model-parallel block with the user's own keys: Hugging Face looks for the very key `partitions`."""
    if job.distribution.smdistributed is None:
        return {}
    parameters: dict[str, Any] = {}
    if job.distribution.model_parallel is not None:
        parameters = {"mp_parameters": job.distribution.parameters_as_written}
        if parameters_file is not None:
            parameters = {PARAMETERS_FILE: parameters_file}
    return {
        **parameters,
        "sagemaker_distributed_dataparallel_enabled": False,
        "sagemaker_instance_type": _instance_type(job),
    }
