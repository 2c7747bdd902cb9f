"""Answers that are lost, or not the service's: no job is started twice, and none that runs is hidden."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from smpkit.errors import CloudError, ConfigError, UnreachableError
from smpkit_estimator import aws as aws_module
from smpkit_estimator import sagemaker
from tests.aws import Aws
from tests.estimator.conftest import MakeEstimator

LOST = ConnectionClosedError(endpoint_url="https://x")
TRIES = 8
"""Of botocore, for one call."""


def fail_to_start(aws: Aws, kind: str, **options: Any) -> None:
    if kind == "reset":
        aws.fail("CreateTrainingJob", LOST, **options)
    else:
        aws.fail("CreateTrainingJob", "InternalFailure", "try again", status=500, **options)


@pytest.mark.parametrize("kind", ["reset", "500"])
@pytest.mark.parametrize("times", [1, TRIES])
def test_a_job_that_was_accepted_is_found(make: MakeEstimator, aws: Aws, kind: str, times: int) -> None:
    fail_to_start(aws, kind, times=times, late=True)
    assert make(instance_count=2).fit(wait=False, job_name="job").name == "job"
    assert list(aws.jobs) == ["job"]
    assert aws.calls["DescribeTrainingJob"] == 1
    assert sum(uri.endswith("/token") for uri in aws.objects()) == 1


@pytest.mark.parametrize("kind", ["reset", "500"])
def test_a_job_that_was_not_accepted_is_started(make: MakeEstimator, aws: Aws, kind: str) -> None:
    fail_to_start(aws, kind, times=2)
    make().fit(wait=False, job_name="job")
    assert list(aws.jobs) == ["job"]
    assert aws.calls["DescribeTrainingJob"] == 0


@pytest.mark.parametrize("kind", ["reset", "500"])
def test_a_job_that_cannot_be_looked_up_may_run(make: MakeEstimator, aws: Aws, kind: str) -> None:
    fail_to_start(aws, kind, times=TRIES, late=True)
    aws.fail("DescribeTrainingJob", LOST, times=99)
    with pytest.raises(UnreachableError, match="it may have been started all the same") as caught:
        make(instance_count=2).fit(wait=False, job_name="job")
    assert "`smpkit status job`" in str(caught.value.hint)
    assert sum(uri.endswith("/token") for uri in aws.objects()) == 1  # the job may read it


def test_a_quota_that_the_accepted_job_itself_uses_up_is_no_error(make: MakeEstimator, aws: Aws) -> None:
    fail_to_start(aws, "reset", late=True)
    aws.fail("CreateTrainingJob", "ResourceLimitExceeded", "no more")
    make().fit(wait=False, job_name="job")
    assert list(aws.jobs) == ["job"]


@pytest.mark.parametrize("change", ["another request", "an older job"])
def test_another_job_of_the_same_name_is_not_taken_for_ours(make: MakeEstimator, aws: Aws, change: str) -> None:
    make(hyperparameters={"a": 1} if change == "another request" else {}).fit(wait=False, job_name="job")
    if change == "an older job":
        aws.clock.advance(1000)
    fail_to_start(aws, "reset")
    with pytest.raises(CloudError, match="already exists"):
        make().fit(wait=False, job_name="job")


def test_a_job_that_was_refused_leaves_no_secret_behind(make: MakeEstimator, aws: Aws) -> None:
    aws.fail("CreateTrainingJob", "AccessDeniedException", "not allowed")
    with pytest.raises(CloudError, match="not allowed"):
        make(instance_count=2).fit(wait=False, job_name="job")
    assert not [uri for uri in aws.objects() if "token" in uri]


class BreaksOff(BaseHTTPRequestHandler):
    """A service that ends the connection in the middle of an object."""

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.command == "GET":
            self.wfile.write(b"abc")

    def do_HEAD(self) -> None:
        self.send_response(200)
        for name, value in (("Content-Length", "100"), ("ETag", '"a"')):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def breaks_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[aws_module.Cloud]:
    with ThreadingHTTPServer(("127.0.0.1", 0), BreaksOff) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield aws_module.Cloud(aws_module.open_session())
        server.shutdown()


def test_an_object_that_breaks_off_is_no_bug_of_smpkit(breaks_off: aws_module.Cloud) -> None:
    """The body of an answer was read where nothing caught its errors, nor those of a download that is tried in vain."""
    for read in (breaks_off.read, lambda uri: breaks_off.fetch(uri, io.BytesIO())):
        with pytest.raises(UnreachableError, match=r"^cannot read s3://b/k: .*\b3 (bytes )?read, "):
            read("s3://b/k")


def test_a_timeout_that_stays_is_told(make: MakeEstimator, aws: Aws) -> None:
    aws.fail("CreateTrainingJob", ReadTimeoutError(endpoint_url="https://x"), times=TRIES)
    with pytest.raises(CloudError, match="timeout") as caught:
        make().fit(wait=False, job_name="another")
    assert "may have been" not in str(caught.value)
    assert not aws.jobs


# ---- what S3 and clocks say ------------------------------------------------------------------------------------------


def test_who_may_not_list_the_bucket_can_submit(make: MakeEstimator, aws: Aws) -> None:
    """S3 answers 403 to HEAD of a missing object if `s3:ListBucket` is lacking."""
    aws.fail("HeadObject", "403", "Forbidden", status=403, times=2)
    make().fit(wait=False, job_name="job")
    assert len(aws.objects()) == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("RequestTimeTooSkewed", "The difference between the request time and the current time is too large."),
        ("InvalidSignatureException", "Signature expired: 20260101T000000Z is now earlier than 20260101T001000Z"),
        ("SignatureDoesNotMatch", "Signature not yet current: 20260101T010000Z is still later than 20260101T000000Z"),
    ],
)
def test_a_clock_that_is_wrong_is_named(make: MakeEstimator, aws: Aws, code: str, message: str) -> None:
    aws.fail("CreateTrainingJob", code, message)
    with pytest.raises(CloudError, match="this machine's clock differs") as caught:
        make().fit(wait=False)
    assert "set this machine's clock" in str(caught.value.hint)


def test_sources_that_are_too_large_stay_here(make: MakeEstimator, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws_module, "_MAX_OBJECT_BYTES", 10)
    with pytest.raises(ConfigError, match="S3 takes at most"):
        make().fit(wait=False)
    monkeypatch.setattr(sagemaker, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(ConfigError, match="a job takes at most"):
        make().plan()
    assert not aws.objects()
