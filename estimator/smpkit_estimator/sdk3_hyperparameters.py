"""The hyperparameters that a job of SDK v3 sends to the launcher. Needs no SDK, as the driver in the image uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smpkit.config.job import JobConfig
from smpkit_estimator.arguments import job_from_arguments
from smpkit_estimator.hyperparameters import hyperparameters
from smpkit_estimator.packing import packed

__all__ = ["launcher_hyperparameters", "missing_hyperparameters"]

_CODE = "/opt/ml/input/data/code"
_UNKNOWN = frozenset({"sagemaker_job_name", "sagemaker_region", "sagemaker_instance_type"})
"""Not known before the trainer submits; an empty or wrong one would hide what the platform says."""


def launcher_hyperparameters(job: JobConfig) -> dict[str, str]:
    """Return the hyperparameters of a job, as SDK v3 can carry them."""
    everything = hyperparameters(job, submit_directory=_CODE, job_name="", region="")
    return packed({name: value for name, value in everything.items() if name not in _UNKNOWN})


def missing_hyperparameters(
    sent: Mapping[str, Any], source: Mapping[str, Any], distributed: Mapping[str, Any]
) -> dict[str, str]:
    """Return the launcher's hyperparameters of a job that was submitted without those of `Smpkit.hyperparameters`.

    The trainer sends the script's name and the options along anyway.

    Args:
        sent: the hyperparameters of the job.
        source: SDK v3's `sourcecode.json`.
        distributed: SDK v3's `distributed.json`, which holds the fields of `Smpkit`.

    Returns:
        nothing if none are missing, or the trainer does not know the script either.

    Raises:
        ConfigError: the options are not valid.
    """
    script = source.get("entry_script")
    if "sagemaker_program" in sent or not script:
        return {}
    options = (distributed.get("smp_options"), distributed.get("mpi_options"))
    return launcher_hyperparameters(job_from_arguments({"entry_point": script}, *options))
