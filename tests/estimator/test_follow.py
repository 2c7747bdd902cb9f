"""The follower gives every line once, whatever the service does between; each of SageMaker's own mistakes is a test."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from smpkit.errors import CloudError, DeadlineError, UnreachableError
from smpkit_estimator.aws import Cloud
from smpkit_estimator.backend import LogLine
from smpkit_estimator.follow import Notice, Patience
from smpkit_estimator.job import Job
from tests.aws import Aws, Line, Script
from tests.estimator.conftest import MakeEstimator

Play = Callable[..., Job]


@pytest.fixture
def play(make: MakeEstimator, aws: Aws) -> Play:
    """Start a job that does what a `Script` says, of whose log CloudWatch gives so many lines at once."""

    def play(hosts: int = 1, page: int = 10_000, **script: Any) -> Job:
        aws.script, aws.page_events = Script(**script), page
        return make(instance_count=hosts).fit(wait=False)

    return play


def texts(found: object) -> list[str]:
    return [line.text for line in found if isinstance(line, LogLine)]  # type: ignore[attr-defined]


def notices(found: object) -> list[str]:
    return [line.text for line in found if isinstance(line, Notice)]  # type: ignore[attr-defined]


def numbered(count: int, every: float = 1.0) -> tuple[Line, ...]:
    return tuple(Line(number * every, f"line {number}") for number in range(count))


def test_every_line_comes_once_and_in_order(play: Play) -> None:
    found = list(play(page=7, lines=numbered(300), training=300).logs(follow=True))
    assert texts(found) == [f"line {number}" for number in range(300)]
    assert [text.split(":")[0] for text in notices(found)] == [
        *("Starting", "no new lines for 30 s; the job is Starting"),
        *("Downloading", "Training", "Uploading", "Completed"),
    ]


def test_more_streams_than_a_page_lists(play: Play, aws: Aws) -> None:
    """SDK v2 asks for the first page of streams again and again, and never ends with more than 50."""
    hosts = 60
    lines = tuple(Line(1, f"hello of {host}", host) for host in range(hosts))
    found = list(play(hosts, lines=lines, training=5).logs(follow=True))
    assert sorted(texts(found)) == sorted(f"hello of {host}" for host in range(hosts))
    assert len({line.host for line in found if isinstance(line, LogLine)}) == hosts
    assert aws.calls["DescribeLogStreams"] < 100


def test_streams_of_a_restarted_job_are_read(play: Play) -> None:
    """After a spot restart the log goes on in other streams, which neither SDK reads."""
    found = list(play(lines=numbered(20), training=20, interruptions=(10.0,)).logs(follow=True))
    assert texts(found) == [f"line {n}" for n in range(11)] + [f"line {n}" for n in range(20)]
    assert any(text.startswith("Interrupted") for text in notices(found))


def test_empty_pages_are_not_the_end(play: Play, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """CloudWatch returns pages without events within gaps, here five before each page."""
    real = Cloud.call

    def call(cloud: Cloud, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        token = arguments.get("nextToken")
        if operation != "get_log_events" or token is None:
            return real(cloud, service, operation, **arguments)
        if token.count("+") < 5:
            return {"events": [], "nextForwardToken": f"{token}+", "nextBackwardToken": f"{token}+"}
        page = real(cloud, service, operation, **{**arguments, "nextToken": token.rstrip("+")})
        return page if page["events"] else {**page, "nextForwardToken": token, "nextBackwardToken": token}

    monkeypatch.setattr(Cloud, "call", call)
    job = play(lines=numbered(30), page=4, training=30)
    job.wait()
    aws.clock.advance(100)
    assert len(texts(job.logs())) == 30
    assert texts(job.logs(tail=3)) == ["line 27", "line 28", "line 29"]


def test_a_long_gap_is_no_end(play: Play) -> None:
    found = list(play(lines=(Line(1, "a"), Line(900, "b")), training=901).logs(follow=True))
    assert texts(found) == ["a", "b"]
    quiet = [text for text in notices(found) if text.startswith("no new lines")]
    assert 3 <= len(quiet) < 9  # ever more seldom


def test_lines_that_are_delivered_after_the_end_are_read(play: Play) -> None:
    """Both SDKs read once when they see the end; what CloudWatch delivers later is lost."""
    found = list(play(lines=(Line(9.9, "the error"),), training=10, log_delay=17).logs(follow=True))
    assert texts(found) == ["the error"]


def test_lines_that_never_stop_coming_are_told(play: Play) -> None:
    found = list(play(lines=numbered(100, 0.5), training=50, log_delay=55).logs(follow=True))
    assert 0 < len(texts(found)) < 100
    assert "lines still come in" in notices(found)[-1]


def test_hosts_are_merged_by_time(play: Play, aws: Aws) -> None:
    lines = tuple(Line(n, f"{n}", n % 3) for n in range(12))
    job = play(3, lines=lines, training=20)
    aws.clock.advance(500)
    assert texts(job.logs()) == [str(n) for n in range(12)]


RANKS = (
    Line(1, "[rank 0] step 1"),
    Line(2, "[rank 1] step 1", 1),
    Line(3, "[rank 10] loss", 1),
    Line(4, "[1,mpirank:1,algo-2]<stdout>: of mpirun", 1),
    Line(5, "no rank"),
)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"ranks": [1]}, [1, 3]),
        ({"ranks": [0, 10]}, [0, 2]),
        ({"hosts": ["algo-1"]}, [0, 4]),
        ({"grep": "step|loss"}, [0, 1, 2]),
        ({"grep": "step", "hosts": ["algo-2"]}, [1]),
        ({"tail": 2}, [0, 2, 3, 4]),
        ({"tail": 2, "ranks": [0]}, [0]),
        ({"tail": 0}, []),
        ({"tail": 99}, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
@pytest.mark.parametrize("page", [1, 2, 100])
def test_lines_are_chosen(play: Play, aws: Aws, choice: dict[str, object], expected: list[int], page: int) -> None:
    job = play(2, lines=RANKS, page=page, training=10)
    aws.clock.advance(500)
    assert texts(job.logs(**choice)) == [RANKS[number].text for number in expected]  # type: ignore[arg-type]


def test_tail_and_follow_leave_no_gap_and_give_nothing_twice(play: Play, aws: Aws) -> None:
    job = play(lines=numbered(60), page=9, training=60)
    aws.clock.advance(112)  # half way
    got = texts(job.logs(follow=True, tail=5))
    assert got == [f"line {n}" for n in range(int(got[0].split()[1]), 60)]
    assert 20 < len(got) < 40


def test_since_leaves_out_what_is_older(play: Play, aws: Aws) -> None:
    job = play(lines=numbered(60), training=60)
    aws.clock.advance(80 + 60)
    assert 5 <= len(texts(job.logs(since=timedelta(seconds=10)))) <= 10


def test_throttling_is_waited_out(play: Play, aws: Aws) -> None:
    job = play(lines=numbered(10), training=10)
    for method in ("DescribeTrainingJob", "GetLogEvents", "DescribeLogStreams"):
        aws.fail(method, "ThrottlingException", "Rate exceeded", times=5, after=3)
    assert len(texts(job.logs(follow=True))) == 10
    assert not any(fault.times for fault in aws.faults)


def test_a_network_that_comes_back_is_waited_for(play: Play, aws: Aws) -> None:
    job = play(lines=numbered(100), page=10, training=100)
    cut = EndpointConnectionError(endpoint_url="https://logs")
    aws.clock.advance(130)  # half way
    aws.fail("GetLogEvents", cut, times=10, after=4)
    aws.fail("DescribeTrainingJob", cut, times=10, after=10)
    found = list(job.logs(follow=True))
    assert texts(found) == [f"line {number}" for number in range(100)]
    assert sum("the job goes on" in text for text in notices(found)) == 2
    aws.fail("DescribeLogStreams", cut, times=10, after=1)  # once the job is seen to be over
    assert texts(job.logs(follow=True)) == [f"line {number}" for number in range(100)]


def test_a_network_that_stays_away_is_told(play: Play, aws: Aws) -> None:
    job = play(training=10_000)
    aws.fail("DescribeTrainingJob", EndpointConnectionError(endpoint_url="https://x"), times=10**6, after=3)
    with pytest.raises(CloudError, match="could not connect"):
        list(job.logs(follow=True))
    assert aws.clock.slept < 1000


def test_expired_credentials_say_that_the_job_goes_on(play: Play, aws: Aws) -> None:
    job = play(training=10_000)
    aws.fail("DescribeTrainingJob", "ExpiredTokenException", "expired", times=9, after=2)
    with pytest.raises(CloudError, match="credentials have expired") as caught:
        list(job.logs(follow=True))
    assert "jobs that run are not touched" in (caught.value.hint or "")


def test_nothing_logged_is_said(play: Play) -> None:
    job = play()
    assert notices(job.logs()) == ["nothing is logged yet; the job is Starting"]
    assert notices(job.logs(tail=5)) == ["nothing is logged yet; the job is Starting"]


def test_a_job_whose_name_begins_alike_is_another(make: MakeEstimator, aws: Aws) -> None:
    first, second = make(), make()
    for name, estimator in (("a", first), ("a-b", second)):
        aws.script = Script(lines=(Line(1, name),), training=2)
        estimator.fit(wait=False, job_name=name)
    aws.clock.advance(500)
    assert texts(first.latest_training_job.logs()) == ["a"]


def test_a_limit_of_waiting_holds_without_a_network(play: Play, aws: Aws) -> None:
    job = play()
    aws.fail("DescribeTrainingJob", EndpointConnectionError(endpoint_url="https://x"), times=10**6)
    with pytest.raises(DeadlineError, match="which is out of reach"):
        job.wait(timeout=60)


def test_what_the_calls_themselves_wait_counts(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of AWS without an answer takes two minutes, so that five minutes lasted two hours."""
    seconds = itertools.count(step=60)  # that each call takes
    monkeypatch.setattr("smpkit_estimator.follow.time.monotonic", lambda: next(seconds))
    backend: Any = SimpleNamespace(clock=aws.clock, pace=5.0)
    patience = Patience(backend)

    def unreachable() -> None:
        raise UnreachableError("no answer")

    assert [patience.ask(unreachable) for _ in range(5)] == [None] * 5
    with pytest.raises(UnreachableError):
        patience.ask(unreachable)


def test_waiting_outlasts_a_network_that_fails_for_less_than_five_minutes(play: Play, aws: Aws) -> None:
    cut = EndpointConnectionError(endpoint_url="https://x")
    job = play(training=1_500)
    aws.fail("DescribeTrainingJob", cut, times=60, after=3)
    assert job.wait().succeeded
    job = play(training=1_500)
    aws.fail("DescribeTrainingJob", cut, times=10**6, after=3)
    before = aws.clock.slept
    with pytest.raises(CloudError, match="could not connect"):
        job.wait()
    assert aws.clock.slept < before + 1000
