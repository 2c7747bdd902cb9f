"""What is made of answers that the fake cluster does not give: pods in trouble, gaps in logs, half of a line."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from smpkit_estimator.kubernetes.log import PodLog
from smpkit_estimator.kubernetes.status import status_of
from tests.clock import FakeClock

NOW = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
SPEC = {"nodes": 2, "places": {"checkpoints": "/data/c"}}
FAILED = {"type": "Failed", "status": "True", "reason": "FailedIndexes", "message": "Job has failed indexes"}
FAILED |= {"lastTransitionTime": "2026-01-01T11:00:00Z"}


def job(**status: Any) -> dict[str, Any]:
    metadata = {"name": "job", "namespace": "team", "creationTimestamp": "2026-01-01T10:00:00Z"}
    return {"metadata": metadata, "spec": {}, "status": status}


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
    status = status_of("job", job(conditions=[FAILED], startTime="2026-01-01T10:15:00Z"), pods, SPEC, NOW)
    assert status.status == "Failed"
    assert status.failure is not None
    assert status.failure.headline == headline
    ranked = "rank 1 on" in str(pods)
    assert (status.failure.rank, status.failure.host) == (1, "pod-1") if ranked else status.failure.rank in (0, None)
    assert status.billable_seconds is not None
    assert status.billable_seconds > 0


def test_what_a_job_waits_for() -> None:
    unscheduled = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]}
    assert status_of("job", job(active=1), [pod(0, unscheduled)], SPEC, NOW).message == "pod-0: 0/3 nodes are available"
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    found = status_of("job", job(active=1), [pod(1, **pulling)], SPEC, NOW)
    assert (found.phase, found.message) == ("Starting", "pod-1: ImagePullBackOff: no such image")
    failing = status_of("job", job(active=1, ready=1, failedIndexes="1"), [pod(0, running={})], SPEC, NOW)
    assert (failing.status, failing.phase) == ("InProgress", "Failing")
    assert failing.message == "hosts that failed: 1; the others have not ended yet"


class Recorded:
    """An API whose one pod prints what a test says."""

    def __init__(self) -> None:
        self.data = b""
        self.gone = False
        self.asked: list[tuple[float | None, int | None]] = []

    def list(self, kind: str, selector: str) -> Iterator[dict[str, Any]]:
        if not self.gone:
            yield pod(0, running={})

    def log(self, pod: str, since_seconds: float | None = None, tail: int | None = None) -> bytes:
        self.asked.append((since_seconds, tail))
        lines = self.data.splitlines(keepends=True)
        return b"".join(lines if tail is None else lines[-tail:])


def line(seconds: float, text: str) -> bytes:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%f123Z ").encode() + text.encode() + b"\n"


def reader(api: Recorded) -> PodLog:
    return PodLog(api, "job", FakeClock(NOW))  # type: ignore[arg-type]


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
    assert not log.incomplete


def test_what_a_node_threw_away_is_said() -> None:
    api = Recorded()
    log = reader(api)
    api.data = line(0, "a")
    log.read()
    api.data = line(5, "after the gap")
    assert [each.text for each in log.read()] == ["after the gap"]
    assert log.incomplete == ["pod-0 (job-0-abcde): the node threw lines away before they were read"]
    api.gone = True
    assert log.read() == []
    assert log.incomplete[1] == "pod-0 (job-0-abcde, which is gone)"


def test_the_tail_asks_for_no_more_than_it_takes() -> None:
    api = Recorded()
    api.data = b"".join(line(n / 100, f"[rank {n % 2}] {n}") for n in range(5000))
    log = reader(api)
    found = log.tail(600, lambda each: each.rank == 1)
    assert [each.text for each in found][-1] == "[rank 1] 4999"
    assert len(found) == 600
    assert [tail for _, tail in api.asked] == [1000, 8000]
    api.data += line(60, "[rank 0] new")
    assert [each.text for each in log.read()] == ["[rank 0] new"]
