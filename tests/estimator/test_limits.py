"""Every limit that botocore's service model tells of is checked here, under the name in the job file, with a hint."""

from __future__ import annotations

from typing import Any

import pytest

from smpkit_estimator.aws import request_shape
from smpkit_estimator.limits import preflight

SHAPE = request_shape("sagemaker", "CreateTrainingJob")
ALGORITHM = {"TrainingInputMode": "File", "TrainingImage": "image"}
LONG = "x" * 2501
PARAMETERS = "distribution.smdistributed.modelparallel.parameters"
FOLDER = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "/data"}}


def body(**changes: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": "job",
        "RoleArn": "arn:aws:iam::123456789012:role/SM",
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/"},
        "AlgorithmSpecification": ALGORITHM,
        **changes,
    }


def test_a_good_request_has_no_problems() -> None:
    assert preflight(body(), SHAPE) == []


@pytest.mark.parametrize(
    ("changes", "where", "what", "hint"),
    [
        ({"HyperParameters": {"a": LONG}}, "hyperparameters.a", "has 2,501 characters", "file in source_dir"),
        ({"HyperParameters": {"mp_parameters": LONG}}, PARAMETERS, "2,501", "leave out the parameters that have"),
        ({"Environment": {"A": "x" * 513}}, "environment.A", "has 513 characters, SageMaker takes at most 512", "file"),
        ({"Environment": {f"A{n}": "" for n in range(101)}}, "environment", "has 101 entries", "file"),
        ({"TrainingJobName": "a_b"}, "name", "`a_b` does not fit SageMaker's pattern", None),
        ({"TrainingJobName": "a" * 64}, "name", "64 characters", None),
        ({"RoleArn": "SageMakerRole-of-somebody"}, "role", "does not fit", "arn:aws:iam::<account>"),
        ({"ResourceConfig": {"InstanceType": "ml.g5.xlarg"}}, "compute.instance_type", "xlarg` is", "`ml.g5.xlarge`"),
        ({"ResourceConfig": {"InstanceType": "ml.zz9"}}, "compute.instance_type", "not one of", "update boto3"),
        ({"ResourceConfig": {"VolumeSizeInGB": 2**31}}, "compute.volume_gb", "is 2147483648", None),
        ({"ResourceConfig": {"KeepAlivePeriodInSeconds": 21601}}, "compute.keep_alive_seconds", "0 to 21600", None),
        ({"RetryStrategy": {"MaximumRetryAttempts": 31}}, "compute.retries", "is 31, SageMaker takes 1 to 30", None),
        ({"Tags": [{"Key": "k", "Value": "x" * 257}]}, "tags.k.Value", "257", "letters"),
        ({"Tags": [{"Key": "k!", "Value": "x"}]}, "tags.k!.Key", "does not fit", "letters"),
        ({"InputDataConfig": [{"ChannelName": "a", "DataSource": FOLDER}]}, "inputs.a.uri", "not fit", "S3 prefix"),
        ({"AlgorithmSpecification": {**ALGORITHM, "TrainingImage": "x" * 256}}, "image", "256", "dkr.ecr"),
        (
            {"AlgorithmSpecification": {**ALGORITHM, "ContainerArguments": [LONG]}},
            "container.arguments[0]",
            "256",
            None,
        ),
        ({"NewField": 1}, "NewField", "is not known to this version of botocore", "update boto3"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and len(value) < 30 else None,
)
def test_a_limit_has_the_job_files_name(changes: dict[str, Any], where: str, what: str, hint: str | None) -> None:
    (problem,) = preflight(body(**changes), SHAPE)
    assert problem.where == where
    assert what in problem.message
    assert (hint or "") in (problem.hint or "")


def test_all_limits_are_told_at_once() -> None:
    found = preflight(body(TrainingJobName="-", Environment={"1": "x" * 513, "B": "y" * 513}), SHAPE)
    assert [problem.where for problem in found] == ["name", "environment.1", "environment.1", "environment.B"]


def test_a_missing_field_is_told() -> None:
    request = body()
    del request["RoleArn"]
    assert [str(problem).splitlines()[0] for problem in preflight(request, SHAPE)] == ["role: is required"]


@pytest.mark.parametrize("text", ["naïve café", "日本 ٣", "a:/=+-@_.b"])
def test_javas_letter_classes_are_understood(text: str) -> None:
    """The service's pattern of tags has `\\p{L}`, which Python's `re` does not know."""
    assert preflight(body(Tags=[{"Key": text, "Value": text}]), SHAPE) == []
