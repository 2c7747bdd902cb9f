"""Answers that are lost, or not the service's: no job is started twice, and none that runs is hidden."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from smpkit.errors import CloudError, ConfigError, UnreachableError
from smpkit.testing import FakeSageMaker
from smpkit_estimator import submission
from smpkit_estimator.cloud import Cloud
from smpkit_estimator.sagemaker import open_session
from tests.estimator.conftest import MakeEstimator
from tests.testing.test_fake_sagemaker import REQUEST

LOST = ConnectionClosedError(endpoint_url="https://x")


def failing(fake: FakeSageMaker, kind: str, **options: Any) -> None:
    if kind == "reset":
        fake.faults.raises("create_training_job", LOST, **options)
    else:
        fake.faults.add("create_training_job", "InternalFailure", "try again", status=500, **options)


@pytest.mark.parametrize("kind", ["reset", "500"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_job_that_was_accepted_is_found(make: MakeEstimator, kind: str, times: int) -> None:
    fake = FakeSageMaker()
    failing(fake, kind, times=times, late=True)
    assert make(fake).fit(wait=False, job_name="job").name == "job"
    assert list(fake.jobs) == ["job"]


@pytest.mark.parametrize("kind", ["reset", "500"])
def test_a_job_that_was_not_accepted_is_started(make: MakeEstimator, kind: str) -> None:
    fake = FakeSageMaker()
    failing(fake, kind, times=2)
    make(fake).fit(wait=False, job_name="job")
    assert list(fake.jobs) == ["job"]


@pytest.mark.parametrize("kind", ["reset", "500"])
def test_a_job_that_cannot_be_looked_up_may_run(make: MakeEstimator, kind: str) -> None:
    fake = FakeSageMaker()
    failing(fake, kind, times=9, late=True)
    fake.faults.raises("describe_training_job", LOST, times=99)
    with pytest.raises(UnreachableError, match="it may have been started all the same") as caught:
        make(fake).fit(wait=False, job_name="job")
    assert "`smpkit status job`" in str(caught.value.hint)


def test_a_quota_that_the_accepted_job_itself_uses_up_is_no_error(make: MakeEstimator) -> None:
    fake = FakeSageMaker(quotas={"ml.p4d.24xlarge": 1})
    failing(fake, "reset", late=True)
    fake.faults.raises("describe_training_job", LOST)
    make(fake).fit(wait=False, job_name="job")
    assert list(fake.jobs) == ["job"]


@pytest.mark.parametrize("change", ["another request", "an older job"])
def test_another_job_of_the_same_name_is_not_taken_for_ours(make: MakeEstimator, change: str) -> None:
    fake = FakeSageMaker()
    make(fake, volume_size=31, hyperparameters={"a": 1} if change == "another request" else {}).fit(
        wait=False, job_name="job"
    )
    if change == "an older job":
        fake.clock.advance(1000)
    failing(fake, "reset")
    with pytest.raises(CloudError, match="already exists"):
        make(fake).fit(wait=False, job_name="job")


# ---- the real client, and a server that behaves as networks do ------------------------------------------------------

Reply = tuple[int, dict[str, str], bytes] | None
"""Status, headers and body; None closes the connection without an answer."""


class Service:
    """A SageMaker of one operation each, whose answers may be lost."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.lose: Callable[[int], Reply | str] = lambda _: "answer"

    def reply(self, operation: str, request: dict[str, Any]) -> Reply:
        self.calls.append(operation)
        if operation == "DescribeTrainingJob":
            job = self.jobs.get(request["TrainingJobName"])
            return self._ok(job) if job else self._error("ValidationException", "Requested resource not found.")
        name = request["TrainingJobName"]
        if name in self.jobs:
            return self._error("ResourceInUse", "Job name must be unique, and this name already exists")
        now = datetime.now(timezone.utc).timestamp()
        state = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting", "CreationTime": now}
        arn = {"TrainingJobArn": f"arn:aws:sagemaker:us-west-2:123456789012:training-job/{name}"}
        self.jobs[name] = {**request, **arn, **state}
        lost = self.lose(self.calls.count("CreateTrainingJob"))
        return self._ok(arn) if isinstance(lost, str) else lost

    @staticmethod
    def _ok(value: Any) -> Reply:
        return 200, {"x-amzn-RequestId": "1", "Content-Type": "application/x-amz-json-1.1"}, json.dumps(value).encode()

    @staticmethod
    def _error(code: str, message: str) -> Reply:
        return 400, {"x-amzn-RequestId": "1"}, json.dumps({"__type": code, "message": message}).encode()


PAGE = (200, {"Content-Type": "text/html"}, b"<html>please log in</html>")
Serve = Callable[[Callable[[str, dict[str, Any]], Reply]], Cloud]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serve answers on the loopback device, and return a cloud of real clients that are sent there."""
    servers: list[ThreadingHTTPServer] = []

    def start(reply: Callable[[str, dict[str, Any]], Reply]) -> Cloud:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                operation = self.headers.get("X-Amz-Target", f".{self.command}").partition(".")[2]
                found = reply(operation, json.loads(text) if text[:1] == b"{" else {})
                self.close_connection = True
                if found is None:
                    self.connection.close()
                    return
                self.send_response(found[0])
                for name, value in {**found[1], "Content-Length": str(len(found[2]))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(found[2])

            do_POST = do_GET = do_PUT = do_HEAD = answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("smpkit_estimator.cloud._MAX_PAUSE_SECONDS", 0.1)
        return Cloud(open_session(region="us-west-2"))

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


SERVER_ERROR: Reply = (500, {"x-amzn-RequestId": "1"}, b'{"__type": "InternalFailure"}')


@pytest.mark.parametrize("lost", [None, SERVER_ERROR, (503, {}, b"<html>busy</html>")], ids=["reset", "500", "503"])
def test_the_real_client_finds_the_job_that_was_accepted(serve: Serve, lost: Reply) -> None:
    service = Service()
    service.lose = lambda call: lost if call == 1 else "answer"
    assert serve(service.reply).create_job(REQUEST).endswith("training-job/job")
    assert service.calls == ["CreateTrainingJob", "DescribeTrainingJob"]


def test_a_page_of_the_network_is_no_answer(serve: Serve, tmp_path: Path) -> None:
    """Proxies and captive portals answer with status 200 and a page of their own."""
    cloud = serve(lambda operation, request: PAGE)
    calls: list[Callable[[], Any]] = [
        lambda: cloud.create_job(REQUEST),
        lambda: cloud.describe_job("job"),
        lambda: list(cloud.jobs()),
        lambda: cloud.log_streams("job/"),
        lambda: cloud.log_events("job/algo-1"),
        lambda: cloud.object_exists("s3://bucket/key"),
        lambda: list(cloud.objects("s3://bucket/key")),
        lambda: cloud.read("s3://bucket/key"),
        cloud.identity,
    ]
    for call in calls:
        with pytest.raises(UnreachableError, match="is not AWS"):
            call()
    with (tmp_path / "x").open("w+b") as file, pytest.raises(UnreachableError, match="is not AWS"):
        cloud.upload(file, "s3://bucket/key")


def test_answers_of_the_service_pass(serve: Serve) -> None:
    html = {"Content-Type": "text/html", "x-amz-request-id": "1"}
    assert serve(lambda operation, request: (200, html, b"<p>")).object_exists("s3://bucket/page.html")


# ---- what S3 and clocks say ------------------------------------------------------------------------------------------


def test_who_may_not_list_the_bucket_can_submit(make: MakeEstimator) -> None:
    """S3 answers 403 to HEAD of a missing object if `s3:ListBucket` is lacking."""
    fake = FakeSageMaker()
    fake.faults.add("head_object", "403", "Forbidden", status=403)
    make(fake).fit(wait=False, job_name="job")
    assert len(fake.storage.objects) == 1
    fake.faults.add("head_object", "403", "Forbidden", status=403)
    fake.faults.add("put_object", "AccessDenied", "Access Denied", status=403)
    with pytest.raises(CloudError) as caught:
        make(fake).fit(wait=False, job_name="other")
    assert caught.value.hint == "allow `s3:PutObject` for this identity"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("RequestTimeTooSkewed", "The difference between the request time and the current time is too large."),
        ("InvalidSignatureException", "Signature expired: 20260101T000000Z is now earlier than 20260101T001000Z"),
        ("SignatureDoesNotMatch", "Signature not yet current: 20260101T010000Z is still later than 20260101T000000Z"),
    ],
)
def test_a_clock_that_is_wrong_is_named(make: MakeEstimator, code: str, message: str) -> None:
    fake = FakeSageMaker()
    fake.faults.add("create_training_job", code, message)
    with pytest.raises(CloudError, match="this machine's clock differs") as caught:
        make(fake).fit(wait=False)
    assert "set this machine's clock" in str(caught.value.hint)


def test_sources_over_the_limits_are_refused_before_the_upload(
    make: MakeEstimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSageMaker()
    monkeypatch.setattr(submission, "_MAX_ARCHIVE_BYTES", 10)
    with pytest.raises(ConfigError, match="S3 takes at most"):
        make(fake).fit(wait=False)
    monkeypatch.setattr(submission, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(ConfigError, match="a job takes at most"):
        make(fake).plan()
    assert not fake.storage.objects


def test_a_timeout_that_stays_is_told(make: MakeEstimator) -> None:
    fake = FakeSageMaker()
    fake.faults.raises("create_training_job", ReadTimeoutError(endpoint_url="https://x"), times=9)
    with pytest.raises(CloudError, match="timeout") as caught:
        make(fake).fit(wait=False, job_name="another")
    assert "may have been" not in str(caught.value)
    assert not fake.jobs
