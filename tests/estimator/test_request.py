"""The request is SDK v2's own, field by field: golden files, and the real SDK where it is installed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from smpkit.config.job import JobConfig
from smpkit_estimator.arguments import TrainingInput, channels, job_from_arguments
from smpkit_estimator.aws import request_shape
from smpkit_estimator.hyperparameters import distribution_hyperparameters
from smpkit_estimator.limits import preflight
from smpkit_estimator.request import TrainingPlan, build_request
from tests.estimator.conftest import with_sdk2
from tests.estimator.golden import recorded
from tests.estimator.golden.cases import CASES, INPUTS, JOB_NAME, REGION, ROLE

RECORDED = recorded()
SHAPE = request_shape("sagemaker", "CreateTrainingJob")

CONTEXT = {
    "name": JOB_NAME,
    "region": REGION,
    "role": ROLE,
    "output": "s3://smpkit-demo/",
    "source": f"s3://smpkit-demo/{JOB_NAME}/source/sourcedir.tar.gz",
}


def ours(arguments: dict[str, Any], inputs: Any) -> TrainingPlan:
    given = {"entry_point": "train.py", **arguments}
    job = job_from_arguments(given, given.pop("distribution", None))
    return TrainingPlan(build_request(job.model_copy(update={"inputs": channels(inputs)}), **CONTEXT))


def all_of_ours() -> dict[str, TrainingPlan]:
    made = {name: ours(*case) for name, case in CASES.items()}
    made["training-input"] = ours(CASES["no-distribution"][0], {"train": TrainingInput(**INPUTS)})
    return made


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_request_equals_the_sdks_field_by_field(name: str) -> None:
    assert all_of_ours()[name].body == RECORDED[name]
    assert preflight(RECORDED[name], SHAPE) == []


def test_there_is_a_golden_file_for_every_case() -> None:
    assert set(RECORDED) == set(all_of_ours())


@with_sdk2
def test_the_real_sdk_sends_what_the_golden_files_say() -> None:
    from tests.estimator.golden.real_sdk2 import requests_of_the_sdk

    assert requests_of_the_sdk() == RECORDED


def test_spot_always_says_how_long_it_waits() -> None:
    """The service refuses a spot job without a limit for waiting, which the SDK leaves out."""
    request = ours({**CASES["no-distribution"][0], "use_spot_instances": True, "max_run": 100}, None)
    assert request.body["StoppingCondition"] == {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": 100}


def test_no_sdk_comes_along_unasked() -> None:
    """Tools that need one SDK cannot be installed beside those that need the other."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith("sagemaker")]
    extras = project["optional-dependencies"]
    assert {extra for extra, names in extras.items() if any("sagemaker" in name for name in names)} == {"sdk2", "sdk3"}


@pytest.mark.parametrize("isolation", [False, True])
def test_several_hosts_are_told_where_their_token_is(isolation: bool) -> None:
    uri = "s3://bucket/sources/tokens/job-1/token"
    arguments = {**CASES["no-distribution"][0], "enable_network_isolation": isolation}
    job = job_from_arguments({"entry_point": "train.py", **arguments}, None)
    body = build_request(job, **CONTEXT, token=uri)
    channels = {each["ChannelName"]: each["DataSource"] for each in body.get("InputDataConfig", [])}
    place = json.loads(body["HyperParameters"]["sagemaker_smpkit_token_file"])
    assert place == ("/opt/ml/input/data/smpkit_token/token" if isolation else uri)
    brought = [source["S3DataSource"]["S3Uri"] for name, source in channels.items() if name == "smpkit_token"]
    assert brought == ([uri] if isolation else [])
    assert "smpkit_token" not in str(build_request(job, **CONTEXT))


def test_a_distribution_on_the_wire() -> None:
    def sent(distribution: dict[str, Any]) -> dict[str, str]:
        job = JobConfig.model_validate({"entry_point": "train.py", "distribution": distribution})
        return distribution_hyperparameters(job)

    assert sent({"torch_distributed": {"enabled": True, "processes_per_host": 2}}) == {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_instance_type": '"local"',
        "sagemaker_smpkit_processes_per_host": "2",
    }
    assert sent({"mpi": {"enabled": False}}) == {}
