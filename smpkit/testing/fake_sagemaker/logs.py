"""The fake's CloudWatch Logs: streams per host and attempt, pages with tokens, empty pages, lines that come late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from smpkit.testing.fake_sagemaker.client import Handler, client_error
from smpkit.testing.fake_sagemaker.jobs import FakeJob, FakeJobs
from smpkit_estimator.backend import Clock
from smpkit_estimator.status import machines_of

__all__ = ["FakeLogs"]

_GROUP = "/aws/sagemaker/TrainingJobs"
_MAX_STREAMS = 50


@dataclass(frozen=True)
class _Event:
    time: datetime
    readable: datetime
    text: str


class FakeLogs:
    """The log group of all training jobs.

    Args:
        page_events: most events on a page.
        empty_pages: how many empty pages come before each page that has events, as after a gap of hours.
    """

    def __init__(self, clock: Clock, jobs: FakeJobs, page_events: int = 10_000, empty_pages: int = 0) -> None:
        self._clock = clock
        self._jobs = jobs
        self.page_events = page_events
        self.empty_pages = empty_pages

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Method of the client -> what answers it."""
        return {"describe_log_streams": self.describe_log_streams, "get_log_events": self.get_log_events}

    def describe_log_streams(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """List streams by name, at most 50 on a page."""
        if request["logGroupName"] != _GROUP or not self._jobs.jobs:
            raise client_error("ResourceNotFoundException", "The specified log group does not exist.", "x")
        prefix = request.get("logStreamNamePrefix", "")
        all_names = (stream for job in self._jobs.jobs.values() for stream in _streams_of(job))
        names = sorted(name for name in all_names if name.startswith(prefix) and self._events(name))
        start, size = int(request.get("nextToken", "0")), min(request.get("limit", _MAX_STREAMS), _MAX_STREAMS)
        rest = {"nextToken": str(start + size)} if len(names) > start + size else {}
        return {"logStreams": [{"logStreamName": name} for name in names[start : start + size]], **rest}

    def get_log_events(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return a page of a stream; its end is where the forward token stays the same, not where a page is empty."""
        events = self._events(request["logStreamName"])
        if request.get("logGroupName") != _GROUP or not events:
            raise client_error("ResourceNotFoundException", "The specified log stream does not exist.", "GetLogEvents")
        begin, end = request.get("startTime", 0), request.get("endTime", 2**62)
        shown = [event for event in events if begin <= _milliseconds(event.time) < end]
        size = min(request.get("limit", self.page_events), self.page_events)
        first, last, empty = self._page(request, len(shown), size)
        return {
            "events": [_plain(event) for event in shown[first:last]],
            "nextForwardToken": f"f/{last}/{empty}",
            "nextBackwardToken": f"b/{first}/0",
        }

    def _page(self, request: Mapping[str, Any], count: int, size: int) -> tuple[int, int, int]:
        """Return the first and the last position of a page, and how many empty pages have come in a row."""
        token = request.get("nextToken")
        if token is None and not request.get("startFromHead", False):
            return max(0, count - size), count, 0
        kind, position, empty = (token or "f/0/0").split("/")
        place = int(position)
        if kind == "b":
            return max(0, place - size), place, 0
        if place < count and int(empty) < self.empty_pages:
            return place, place, int(empty) + 1
        return place, min(place + size, count), 0 if place < count else int(empty)

    def _events(self, stream: str) -> list[_Event]:
        """Return what can be read of a stream by now."""
        job = self._jobs.jobs.get(stream.rpartition("/")[0])
        found = _streams_of(job).get(stream) if job is not None else None
        if job is None or found is None:
            return []
        number, host = found
        attempt, lines = job.history.attempts[number], job.script.lines
        if number > 0 and job.script.resumed_lines is not None:
            lines = job.script.resumed_lines
        now, delay = self._clock.now(), timedelta(seconds=job.script.log_delay)
        times = [(attempt.start + timedelta(seconds=line.at), line) for line in lines if line.host == host]
        events = [_Event(time, time + delay, line.text) for time, line in times if time <= attempt.end]
        return [event for event in events if event.readable <= now]


def _streams_of(job: FakeJob) -> dict[str, tuple[int, int]]:
    """Return the streams that a job will have had in the end: name -> numbers of the attempt and the host."""
    hosts = set(range(sum(each.instance_count for each in machines_of(job.request)))) - job.script.silent_hosts
    return {
        f"{job.name}/algo-{host + 1}-{round(attempt.start.timestamp())}": (number, host)
        for number, attempt in enumerate(job.history.attempts)
        for host in sorted(hosts)
    }


def _plain(event: _Event) -> dict[str, Any]:
    return {
        "timestamp": _milliseconds(event.time),
        "message": event.text,
        "ingestionTime": _milliseconds(event.readable),
    }


def _milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)
