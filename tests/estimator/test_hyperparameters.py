from __future__ import annotations

import json
from typing import Any

import pytest

from smpkit.config.job import JobConfig
from smpkit_estimator.hyperparameters import hyperparameters

NAME = "smpkit-2026-11-20-18-18-11-237"
ARCHIVE = f"s3://smpkit-demo/{NAME}/source/sourcedir.tar.gz"

GOLDEN = {
    "epochs": "3",
    "lr": "0.001",
    "name": '"a b"',
    "sagemaker_submit_directory": f'"{ARCHIVE}"',
    "sagemaker_program": '"train.py"',
    "sagemaker_container_log_level": "20",
    "sagemaker_job_name": f'"{NAME}"',
    "sagemaker_region": '"us-west-2"',
    "sagemaker_mpi_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "8",
    "sagemaker_mpi_custom_mpi_options": '"-verbose --mca orte_base_help_aggregate 0"',
    "mp_parameters": (
        '{"partitions": 2, "microbatches": 4, "pipeline": "interleaved", "ddp": true, "optimize": "speed", '
        '"placement_strategy": "cluster"}'
    ),
    "sagemaker_distributed_dataparallel_enabled": "false",
    "sagemaker_instance_type": '"ml.p4d.24xlarge"',
}
"""Captured from a request of SageMaker's SDK 2.257.7."""

TORCH = {"sagemaker_torch_distributed_enabled": "true", "sagemaker_instance_type": '"local"'}


def job(distribution: dict[str, Any], **settings: Any) -> JobConfig:
    return JobConfig.model_validate({"entry_point": "train.py", "distribution": distribution, **settings})


def sent(config: JobConfig) -> dict[str, str]:
    return hyperparameters(config, submit_directory=ARCHIVE, job_name=NAME, region="us-west-2")


def test_the_sdks_own_request_comes_out() -> None:
    config = job(
        {
            "smdistributed": {
                "modelparallel": {
                    "enabled": True,
                    "parameters": {
                        "partitions": 2,
                        "microbatches": 4,
                        "pipeline": "interleaved",
                        "ddp": True,
                        "optimize": "speed",
                        "placement_strategy": "cluster",
                    },
                }
            },
            "mpi": {
                "enabled": True,
                "processes_per_host": 8,
                "custom_mpi_options": "-verbose --mca orte_base_help_aggregate 0",
            },
        },
        hyperparameters={"epochs": 3, "lr": 0.001, "name": "a b"},
        compute={"instance_type": "ml.p4d.24xlarge", "instance_count": 2},
    )
    assert sent(config) == GOLDEN


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        ({}, {}),
        (
            {"torch_distributed": {"enabled": True, "processes_per_host": 2}},
            {**TORCH, "sagemaker_smpkit_processes_per_host": "2"},
        ),
        ({"torch_distributed": {"enabled": True}}, TORCH),
        ({"mpi": {"enabled": True}}, {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_custom_mpi_options": '""'}),
        ({"mpi": {"enabled": False}}, {}),
    ],
    ids=["none", "torchrun", "torchrun, machine decides", "mpi", "mpi off"],
)
def test_launchers_on_the_wire(distribution: dict[str, Any], expected: dict[str, str]) -> None:
    common = {key: value for key, value in GOLDEN.items() if key in COMMON}
    assert sent(job(distribution)) == common | expected


COMMON = (
    "sagemaker_submit_directory",
    "sagemaker_program",
    "sagemaker_container_log_level",
    "sagemaker_job_name",
    "sagemaker_region",
)


def test_parameters_keep_the_users_own_keys() -> None:
    """Hugging Face looks for `partitions`, and it is the user's word for it that must arrive."""
    for key in ("partitions", "pipeline_parallel_degree"):
        config = job({"enabled": True, "parameters": {key: 2}, "mpi": {"enabled": True, "processes_per_host": 2}})
        assert json.loads(sent(config)["mp_parameters"]) == {key: 2}
