"""What the tests of managed jobs share: a folder with a script, and estimators on an AWS account in memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from smpkit_estimator.estimator import Estimator
from tests.aws import SESSION, Aws, aws

__all__ = ["aws"]

ARGUMENTS: dict[str, Any] = {
    "role": "arn:aws:iam::123456789012:role/SM",
    "image_uri": "123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest",
    "instance_type": "ml.p4d.24xlarge",
    "instance_count": 1,
    "output_path": "s3://bucket/out",
}

with_sdk2 = pytest.mark.skipif(
    not (find_spec("sagemaker") and find_spec("sagemaker.estimator")),
    reason="needs SageMaker's SDK v2; `scripts/test-sdk sdk2` installs and runs it",
)

MakeEstimator = Callable[..., Estimator]


@pytest.fixture
def make(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEstimator:
    """Make an estimator in a folder of its own, on the account's clock."""
    (tmp_path / "train.py").write_text("print()\n")
    monkeypatch.chdir(tmp_path)

    def make(**arguments: Any) -> Estimator:
        estimator = Estimator("train.py", session=SESSION, **{**ARGUMENTS, **arguments})
        estimator._backend = aws.open()
        return estimator

    return make
