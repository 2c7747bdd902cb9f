"""Whatever job file validates, is either refused with a sentence or becomes a request that the service's model accepts.

And whatever stands in it, it has no effect outside: no file is written, nothing is started.
"""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

import pytest
from botocore.validate import ParamValidator
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from smpkit.config.job import JobConfig
from smpkit.config.section import validated
from smpkit.errors import CloudError, ConfigError
from smpkit_estimator.aws import request_shape
from smpkit_estimator.limits import preflight
from smpkit_estimator.sagemaker import SageMaker
from tests.aws import Aws

SHAPE = request_shape("sagemaker", "CreateTrainingJob")

HOSTILE = [
    "../../etc",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned;",
    "'\"\\",
    "\n",
    "a\u202eb",
    "%s{0}",
    "-rf",
    "\0",
]

text = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20), st.text(min_size=500, max_size=520))
name = st.text(string.ascii_letters + string.digits + "-_.", min_size=1, max_size=12)
uri = st.one_of(
    st.sampled_from(["s3://bucket/path", "s3://bucket", "s3://bucket/ a'b", "data", "s3://b/x", "../.."]),
    st.builds("s3://bucket/{}".format, text),
)
json_value: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(name, inner, max_size=3)),
    max_leaves=5,
)
small = st.one_of(st.integers(1, 5), st.sampled_from([0, -1, 2**31, 2**63]))

DISTRIBUTIONS: list[Any] = [
    {},
    {"enabled": True, "parameters": {"partitions": 2, "ddp": True}},
    {"enabled": True, "parameters": {"partition_file": "x" * 3000}, "mpi": {"enabled": True, "processes_per_host": 2}},
    {"torch_distributed": {"enabled": True, "processes_per_host": 4}},
    {"mpi": {"enabled": True, "custom_mpi_options": "-x 'A=$(touch pwned) ; touch pwned'"}},
]


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "entry_point": text,
    "image": text,
    "role": name | text,
    "compute": st.fixed_dictionaries(
        {"instance_type": st.sampled_from(["ml.p4d.24xlarge", "ml.m5.large", "local"]) | text},
        optional={
            "instance_count": small,
            "volume_gb": small,
            "spot": st.booleans(),
            "max_run_seconds": small,
            "max_wait_seconds": small,
            "keep_alive_seconds": small,
            "retries": small,
            "infra_check": st.booleans(),
        },
    ),
    "name": name | text,
    "hyperparameters": st.dictionaries(name | text, json_value, max_size=4),
    "environment": st.dictionaries(name | text, text, max_size=4),
    "inputs": st.dictionaries(name | text, uri | maybe(uri=uri, mode=st.just("Pipe"), shuffle_seed=small), max_size=3),
    "output": uri,
    "checkpoints": uri,
    "tags": st.dictionaries(text, text, max_size=3),
    "metrics": st.dictionaries(text, st.just("loss=(.*)") | text, max_size=3),
    "network": maybe(
        subnets=st.lists(name, max_size=2), security_groups=st.lists(name, max_size=2), isolation=st.booleans()
    ),
    "secrets": st.dictionaries(name | text, text | maybe(entry=text, key=text, variable=name | text), max_size=3),
    "encryption": maybe(output_key=text, volume_key=text),
    "container": maybe(entry_point=st.lists(text, max_size=2), arguments=st.lists(text, max_size=2)),
    "distribution": st.sampled_from(DISTRIBUTIONS),
    "dependencies": st.lists(st.just("lib") | text, max_size=2),
}

GOOD: dict[str, Any] = {
    "entry_point": "train.py",
    "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest",
    "role": "arn:aws:iam::123456789012:role/SM",
    "compute": {"instance_type": "ml.p4d.24xlarge"},
}


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """A good job in which a few fields are anything at all."""
    changed = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True))
    return {**GOOD, **{field: draw(FIELDS[field]) for field in changed}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside") / "job"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").touch()
    (folder / "lib" / "a.py").touch()
    return folder


@pytest.fixture
def backend(aws: Aws) -> SageMaker:
    return aws.open()


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(written=jobs())
def test_what_validates_is_refused_in_words_or_accepted_by_the_service(
    backend: SageMaker, folder: Path, written: dict[str, Any]
) -> None:
    before = sorted(map(str, folder.parent.rglob("*")))
    os.chdir(folder)
    try:
        job = validated(JobConfig, written, subject="job")
        plan = backend.plan(job, folder, name="job")
    except ConfigError as error:
        event("refused")
        assert all(problem.message for problem in error.problems)  # noqa: PT017  either way is right here
    except CloudError as error:
        event("refused by the cloud")
        assert error.message.startswith("cannot find role")  # noqa: PT017  one that is given by name
    else:
        event("accepted")
        assert not ParamValidator().validate(plan.payload.body, SHAPE).has_errors()
        assert preflight(plan.payload.body, SHAPE) == []
    assert sorted(map(str, folder.parent.rglob("*"))) == before


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    hyperparameters=st.dictionaries(
        name.filter(lambda key: not key.startswith("sagemaker_")),
        json_value.filter(lambda value: "\0" not in str(value) and "\\x00" not in str(value)),  # no command line has it
        max_size=4,
    ),
    count=st.integers(1, 8),
)
def test_ordinary_jobs_are_accepted(
    backend: SageMaker, folder: Path, hyperparameters: dict[str, Any], count: int
) -> None:
    """The other side of the test above: it would also pass if everything were refused."""
    finite = json.loads(
        json.dumps(hyperparameters).replace("NaN", "0").replace("-Infinity", "0").replace("Infinity", "0")
    )
    written = {
        **GOOD,
        "image": "registry.example.com/image",
        "output": "s3://bucket/out",
        "compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": count},
        "hyperparameters": {key: value for key, value in finite.items() if len(json.dumps(value)) <= 2500},
    }
    body = backend.plan(validated(JobConfig, written, subject="job"), folder).payload.body
    assert not ParamValidator().validate(body, SHAPE).has_errors()
    for key, value in written["hyperparameters"].items():
        assert json.loads(body["HyperParameters"][key]) == value
