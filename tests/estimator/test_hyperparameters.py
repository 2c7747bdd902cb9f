"""What a job's `distribution` is on the wire; whole requests are in `test_request.py`, beside the real SDK's."""

from __future__ import annotations

import json
from typing import Any

from smpkit.config.job import JobConfig
from smpkit_estimator.hyperparameters import distribution_hyperparameters


def sent(distribution: dict[str, Any]) -> dict[str, str]:
    job = JobConfig.model_validate({"entry_point": "train.py", "distribution": distribution})
    return distribution_hyperparameters(job)


def test_launchers_on_the_wire() -> None:
    assert sent({"torch_distributed": {"enabled": True, "processes_per_host": 2}}) == {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_instance_type": '"local"',
        "sagemaker_smpkit_processes_per_host": "2",
    }
    assert sent({"mpi": {"enabled": False}}) == {}


def test_parameters_keep_the_users_own_keys() -> None:
    """Hugging Face looks for `partitions`, and it is the user's word for it that must arrive."""
    for key in ("partitions", "pipeline_parallel_degree"):
        found = sent({"enabled": True, "parameters": {key: 2}, "mpi": {"enabled": True, "processes_per_host": 2}})
        assert json.loads(found["mp_parameters"]) == {key: 2}
