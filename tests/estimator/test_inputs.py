"""What an input of SDK v2 carries is sent as the SDK sends it, or refused by name; never lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.validate import ParamValidator

from smpkit import FileSystemInput, TrainingInput
from smpkit.config.job import JobConfig
from smpkit.config.section import validated
from smpkit.errors import ConfigError
from smpkit_estimator.arguments import channels
from smpkit_estimator.aws import request_shape
from smpkit_estimator.limits import preflight
from smpkit_estimator.local import plan_local_run
from tests.aws import Aws
from tests.estimator.conftest import MakeEstimator, with_sdk2

SHAPE = request_shape("sagemaker", "CreateTrainingJob")
VPC: dict[str, Any] = {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]}
HUB = "arn:aws:sagemaker:us-west-2:123456789012:hub-content/private/Model/llama/1.0.0"
LAMBDA = "arn:aws:lambda:us-west-2:123456789012:function:credentials"
FILE_SYSTEM: dict[str, Any] = {
    "file_system_id": "fs-0123456789abcdef0",
    "file_system_type": "FSxLustre",
    "directory_path": "/fsx/tokens",
    "file_system_access_mode": "rw",
    "content_type": "text/plain",
}
MODEL: dict[str, Any] = {
    "s3_data": "s3://bucket/model",
    "hub_access_config": {"HubContentArn": HUB},
    "model_access_config": {"AcceptEula": True},
}


def sent(make: MakeEstimator, inputs: Any, **arguments: Any) -> dict[str, Any]:
    body = make(**arguments).plan(inputs).body
    assert not ParamValidator().validate(body, SHAPE).has_errors()
    assert preflight(body, SHAPE) == []
    return dict(body)


def test_a_file_system_is_mounted(make: MakeEstimator) -> None:
    (channel,) = sent(make, {"train": FileSystemInput(**FILE_SYSTEM)}, **VPC)["InputDataConfig"]
    mounted = {"FileSystemId": "fs-0123456789abcdef0", "FileSystemType": "FSxLustre", "DirectoryPath": "/fsx/tokens"}
    source = {"FileSystemDataSource": {**mounted, "FileSystemAccessMode": "rw"}}
    assert channel == {"ChannelName": "train", "DataSource": source, "ContentType": "text/plain"}


def test_licences_and_hubs_are_sent(make: MakeEstimator) -> None:
    (channel,) = sent(make, {"model": TrainingInput(**MODEL)})["InputDataConfig"]
    source = channel["DataSource"]["S3DataSource"]
    assert source["ModelAccessConfig"] == {"AcceptEula": True}
    assert source["HubAccessConfig"] == {"HubContentArn": HUB}


@with_sdk2
@pytest.mark.parametrize("kind", ["FileSystemInput", "TrainingInput"])
def test_the_sdks_own_inputs_are_sent_as_they_are(make: MakeEstimator, kind: str) -> None:
    import sagemaker.inputs

    arguments = FILE_SYSTEM if kind == "FileSystemInput" else MODEL
    made = getattr(sagemaker.inputs, kind)(**arguments)
    (channel,) = sent(make, {"train": made}, **VPC)["InputDataConfig"]
    assert channel == {"ChannelName": "train", **made.config}


def test_instance_groups_are_refused_by_name(make: MakeEstimator) -> None:
    with pytest.raises(ConfigError, match=r"instance_groups: would mix machines of several kinds"):
        make(instance_groups=[SimpleNamespace(instance_group_name="train", instance_type="x", instance_count=2)])
    with pytest.raises(ConfigError, match=r"InstanceGroupNames: cannot be sent"):
        TrainingInput("s3://bucket/x", instance_groups=["train"])


@pytest.mark.parametrize("config", [SimpleNamespace(seed=7), {"Seed": 7}, 7], ids=["SDK", "mapping", "number"])
def test_shuffling_is_called_as_in_the_sdk(make: MakeEstimator, config: Any) -> None:
    made = TrainingInput("s3://bucket/x", shuffle_config=config)
    assert sent(make, {"train": made})["InputDataConfig"][0]["ShuffleConfig"] == {"Seed": 7}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"TargetAttributeName": "label"}, "TargetAttributeName"),
        ({"DataSource": {"S3DataSource": {"S3Uri": "s3://bucket/x", "New": "y"}}}, "New"),
        ({"DataSource": {"DatasetSource": {"DatasetArn": "arn"}}}, "DatasetArn"),
        ({"DataSource": {"S3DataSource": {"S3Uri": "s3://bucket/x", "S3DataDistributionType": "Odd"}}}, "S3DataDist"),
    ],
)
def test_what_has_no_place_is_refused_by_name(config: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"train.{name}.*: cannot be sent"):
        channels({"train": SimpleNamespace(config=config)})


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        ({}, "inputs.a.uri: is required"),
        ({"uri": "s3://bucket", "file_system": {"id": "fs-1", "type": "EFS", "path": "/"}}, "is given together with"),
        ({"file_system": {"id": "fs-1", "type": "NFS", "path": "/"}}, "inputs.a.file_system.type: "),
        ({"file_system": {"id": "fs-1", "type": "EFS", "path": "x"}}, "must be an absolute path"),
        ({"file_system": {"id": "fs-1", "type": "EFS", "path": "/"}, "mode": "Pipe"}, "inputs.a.mode: is for objects"),
    ],
)
def test_a_channel_has_one_place(channel: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(JobConfig, {"entry_point": "a.py", "inputs": {"a": channel}}, subject="job")


def test_a_file_system_needs_a_vpc_and_an_id_within_limits(make: MakeEstimator) -> None:
    estimator = make(training_repository_access_mode="Vpc")
    with pytest.raises(ConfigError) as caught:
        estimator.plan({"train": FileSystemInput("fs-0123456789abcdef0", "EFS", "/data")})
    places = [problem.where for problem in caught.value.problems]
    assert places == ["inputs.train.file_system", "training_repository_access_mode"]
    with pytest.raises(ConfigError, match=r"inputs.train.file_system.id: .* does not fit"):
        make(**VPC).plan({"train": FileSystemInput("volume-12345", "EFS", "/data")})


def test_a_local_run_wants_data_of_this_machine(make: MakeEstimator) -> None:
    estimator = make()
    job = estimator.config.model_copy(update={"inputs": {"train": FileSystemInput("fs-01234567", "EFS", "/data")}})
    with pytest.raises(ConfigError, match=r"inputs.train: is a file system of AWS(.|\n)*--set inputs.train=./data"):
        plan_local_run(job, Path())


def test_a_private_registry_is_named(make: MakeEstimator) -> None:
    private = {"training_repository_access_mode": "Vpc", "training_repository_credentials_provider_arn": LAMBDA, **VPC}
    assert sent(make, None, **private)["AlgorithmSpecification"]["TrainingImageConfig"] == {
        "TrainingRepositoryAccessMode": "Vpc",
        "TrainingRepositoryAuthConfig": {"TrainingRepositoryCredentialsProviderArn": LAMBDA},
    }
    with pytest.raises(ConfigError, match="training_repository_credentials_provider_arn: requires registry_access"):
        make(training_repository_credentials_provider_arn=LAMBDA)
    with pytest.raises(ConfigError, match=r"training_repository_credentials_provider_arn: .* does not fit"):
        make(**{**private, "training_repository_credentials_provider_arn": "x"}).plan()


def test_an_experiment_is_named_as_in_the_sdk(make: MakeEstimator, aws: Aws) -> None:
    config = {"ExperimentName": "e", "TrialName": "t", "TrialComponentDisplayName": "d", "RunName": "r"}
    make().fit(wait=False, job_name="job", experiment_config=config)
    assert aws.jobs["job"].request["ExperimentConfig"] == config
    with pytest.raises(ConfigError, match="did you mean `ExperimentName`"):
        make().fit(experiment_config={"ExperimentNmae": "e"})
