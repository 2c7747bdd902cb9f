"""The hyperparameters that a job of SDK v3 sends to the launcher. Needs no SDK, as the driver in the image uses it.

SDK v3's start script puts hyperparameters unquoted into a shell file. A value with an apostrophe, or a name that is not
a valid variable name, makes that file fail to load, and so the job. Those are combined into one hyperparameter, as JSON
in JSON without apostrophes, which our launcher unpacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from smpkit.config.job import JobConfig
from smpkit_estimator.arguments import job_from_arguments
from smpkit_estimator.hyperparameters import hyperparameters

__all__ = ["PACKED", "launcher_hyperparameters", "missing_hyperparameters", "packed"]

PACKED = "sagemaker_smpkit_packed"

_CODE = "/opt/ml/input/data/code"
_SAFE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
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


def packed(sent: Mapping[str, str]) -> dict[str, str]:
    """Return encoded hyperparameters, the unsafe ones combined into one."""
    unsafe = {name: json.loads(text) for name, text in sent.items() if not _is_safe(name, text)}
    safe = {name: text for name, text in sent.items() if name not in unsafe}
    if not unsafe:
        return safe
    inner = json.dumps(unsafe).replace("'", "\\u0027")
    return {**safe, PACKED: json.dumps(inner)}


def _is_safe(name: str, text: str) -> bool:
    return _SAFE_NAME.fullmatch(name) is not None and "'" not in text
