"""Drive the real SDK v2 with an S3 of moto's, and catch the request that it would send."""

from __future__ import annotations

import os
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

from tests.estimator.golden.cases import CASES, INPUTS, JOB_NAME, REGION

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": REGION,
    "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
}


def requests_of_the_sdk() -> dict[str, dict[str, Any]]:
    """Return the SDK's request for every case."""
    from sagemaker.inputs import TrainingInput
    from sagemaker.pytorch import PyTorch

    made = {name: sent_by(PyTorch, arguments, inputs) for name, (arguments, inputs) in CASES.items()}
    made["training-input"] = sent_by(PyTorch, CASES["no-distribution"][0], {"train": TrainingInput(**INPUTS)})
    return made


def sent_by(kind: Any, arguments: dict[str, Any], inputs: Any) -> dict[str, Any]:
    """Return what an estimator of class `kind` sends in `fit`."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        import boto3
        from moto import mock_aws
        from sagemaker import Session

        with mock_aws(), tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text("print('hello')\n")
            boto3.client("s3").create_bucket(
                Bucket="smpkit-demo", CreateBucketConfiguration={"LocationConstraint": REGION}
            )
            session = Session(boto_session=boto3.Session(region_name=REGION), default_bucket="smpkit-demo")
            session.sagemaker_client.create_training_job = mock.Mock()
            # A copy, since the SDK writes into the dicts that it is given.
            given = deepcopy(arguments)
            estimator = kind(entry_point="train.py", source_dir=folder, sagemaker_session=session, **given)
            estimator.fit(inputs, job_name=JOB_NAME, wait=False)
            request: dict[str, Any] = session.sagemaker_client.create_training_job.call_args.kwargs
            return request
