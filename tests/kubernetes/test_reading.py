"""What is made of answers that launchers alone do not give: pods in trouble, failing requests, half of a line."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import Mock

import pytest
from kubernetes.client import Configuration
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import MaxRetryError

from smpkit.errors import CloudError, UnreachableError
from smpkit_estimator.kubernetes.api import Api
from smpkit_estimator.kubernetes.state import PodLog, status_of
from tests.clock import FakeClock

NOW = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
FAILED = {"type": "Failed", "status": "True", "reason": "FailedIndexes", "message": "Job has failed indexes"}
FAILED |= {"lastTransitionTime": "2026-01-01T11:00:00Z"}


def job(**status: Any) -> dict[str, Any]:
    metadata = {"name": "job", "namespace": "team", "creationTimestamp": "2026-01-01T10:00:00Z"}
    return {"metadata": metadata, "spec": {"completions": 2}, "status": status}


def pod(index: int, status: dict[str, Any] | None = None, **state: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    found = {"containerStatuses": [{"name": "launcher", "state": state}], **(status or {})}
    return {"metadata": {"name": f"job-{index}-abcde", "labels": labels}, "status": found}


def ended(code: int, message: str = "", **more: str) -> dict[str, Any]:
    times = {"startedAt": "2026-01-01T10:30:00Z", "finishedAt": "2026-01-01T11:00:00Z"}
    return {"terminated": {"exitCode": code, "message": message, **times, **more}}


@pytest.mark.parametrize(
    ("pods", "headline"),
    [
        ([pod(0, **ended(1, "ValueError: x\nrank 0 on pod-0, exit 1"))], "ValueError: x"),
        (
            [pod(0, **ended(1, "ValueError: x\non pod-1; pod-0 ended because of it")),
             pod(1, **ended(1, "ValueError: x\nrank 1 on pod-1, exit 1"))],
            "ValueError: x",
        ),
        ([pod(0, **ended(137, reason="OOMKilled"))], "the pod ran out of memory (OOMKilled, exit code 137)"),
        ([pod(0, **ended(137, "[rank 0] a line"))], "the container ended with exit code 137"),
        ([pod(0, **ended(2))], "the container ended with exit code 2"),
        ([pod(0, {"phase": "Failed", "reason": "Evicted", "message": "disk"})], "Evicted: disk"),
        ([], "Kubernetes says FailedIndexes: Job has failed indexes"),
    ],
    ids=["rank", "the first rank", "memory", "killed", "no reason", "evicted", "no pods"],
)  # fmt: skip
def test_why_a_job_failed(pods: list[dict[str, Any]], headline: str) -> None:
    status = status_of(job(conditions=[FAILED], startTime="2026-01-01T10:15:00Z"), pods, NOW)
    assert status.status == "Failed"
    assert status.failure is not None
    assert status.failure.headline == headline
    ranked = "rank 1 on" in str(pods)
    assert (status.failure.rank, status.failure.host) == (1, "pod-1") if ranked else status.failure.rank in (0, None)
    assert (status.billable_seconds or 0) > 0


def test_what_a_job_waits_for() -> None:
    unscheduled = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]}
    assert status_of(job(active=1), [pod(0, unscheduled)], NOW).message == "pod-0: 0/3 nodes are available"
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    found = status_of(job(active=1), [pod(1, **pulling)], NOW)
    assert (found.phase, found.message) == ("Starting", "pod-1: ImagePullBackOff: no such image")
    failing = status_of(job(active=1, ready=1, failedIndexes="1"), [pod(0, running={})], NOW)
    assert (failing.status, failing.phase) == ("InProgress", "Failing")
    assert failing.message == "hosts that failed: 1; the others have not ended yet"


class Recorded:
    """An API whose one pod prints what a test says."""

    def __init__(self) -> None:
        self.data = b""
        self.asked: list[tuple[float | None, int | None]] = []

    def list(self, kind: str, selector: str) -> Iterator[dict[str, Any]]:
        yield pod(0, running={})

    def log(self, pod: str, since_seconds: float | None = None, tail: int | None = None) -> bytes:
        self.asked.append((since_seconds, tail))
        lines = self.data.splitlines(keepends=True)
        return b"".join(lines if tail is None else lines[-tail:])


def line(seconds: float, text: str) -> bytes:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%f123Z ").encode() + text.encode() + b"\n"


def reader(api: Recorded, tail: int | None = None) -> PodLog:
    return PodLog(api, "job", FakeClock(NOW), tail=tail)  # type: ignore[arg-type]


def test_lines_that_come_again_are_left_out_and_those_of_one_moment_counted() -> None:
    api = Recorded()
    log = reader(api)
    api.data = line(0, "a") + line(1, "b") + line(1, "c")
    assert [each.text for each in log.read()] == ["a", "b", "c"]
    api.data += line(1, "d") + line(2, "e") + b"2026-01-01T12:00:03.000000000Z half"
    assert [each.text for each in log.read()] == ["d", "e"]
    api.data += b" a line\n"
    assert [each.text for each in log.read()] == ["half a line"]
    assert api.asked[0] == (None, None)
    assert all(seconds is not None and 57 <= seconds <= 61 for seconds, _ in api.asked[1:])


def test_the_tail_asks_for_no_more_than_it_takes() -> None:
    api = Recorded()
    api.data = b"".join(line(n / 100, f"[rank {n % 2}] {n}") for n in range(5000))
    log = reader(api, tail=6)
    assert [each.text for each in log.read()] == [f"[rank {n % 2}] {n}" for n in range(4994, 5000)]
    api.data += line(60, "[rank 0] new")
    assert [each.text for each in log.read()] == ["[rank 0] new"]
    assert [tail for _, tail in api.asked] == [6, None]


def refusing(error: Exception) -> Api:
    """Return an API that answers with a status of HTTP, or not at all."""
    return Api(Mock(configuration=Configuration(), call_api=Mock(side_effect=error)), "team")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ApiException(401, "Unauthorized"), CloudError, "the cluster does not know these credentials"),
        (ApiException(403, "Forbidden"), CloudError, "403 Forbidden"),
        (ApiException(503, "Unavailable"), UnreachableError, "503 Unavailable"),
        (MaxRetryError(None, "/", OSError("refused")), UnreachableError, "did not answer: refused"),  # type: ignore[arg-type]
    ],
)
def test_why_the_api_did_not_do_it(error: Exception, kind: type[CloudError], words: str) -> None:
    with pytest.raises(kind, match=words):
        list(refusing(error).list("Job", "a=b"))


def test_what_is_not_there_is_none() -> None:
    assert refusing(ApiException(404, "Not Found")).read("Job", "none") is None


def test_what_ends_a_job_is_neither_its_time_limit_nor_a_host_that_starts_again() -> None:
    late = status_of(job(conditions=[{**FAILED, "reason": "DeadlineExceeded"}]), [], NOW)
    assert (late.status, late.phase) == ("Stopped", "MaxRuntimeExceeded")
    lost = pod(0, **ended(75, "lost pod-1\non pod-0", finishedAt="2026-01-01T10:40:00Z"))
    failed = status_of(job(conditions=[FAILED]), [lost, pod(1, **ended(1, "ValueError: x\nrank 1 on pod-1"))], NOW)
    assert (failed.failure and failed.failure.headline) == "ValueError: x"
