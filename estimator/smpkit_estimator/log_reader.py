"""Read all log streams of a job to their present end, those of later attempts too, and no line twice.

A stream ends where the forward token stays the same; an empty page is not the end (CloudWatch returns empty pages
within gaps). Streams are listed page by page as well: there may be more than the 50 of one page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from smpkit_estimator.aws import Cloud, CloudProblem, code_of, explained
from smpkit_estimator.backend import LogLine, merged

_MAX_EMPTY_PAGES = 10_000


@dataclass
class _Stream:
    name: str
    host: str
    token: str | None = None


class LogReader:
    """Reads a job's log as far as it has come; call `read` again for what came since.

    A class, and no generator, which an error would end: whoever follows a log reads on when the network is back.

    Args:
        since: leave out what was logged before.
        tail: begin with so many of the last lines of each stream.
        host_of: tells the host by the whole name of a stream.
    """

    def __init__(
        self,
        cloud: Cloud,
        job_name: str,
        since: datetime | None = None,
        *,
        tail: int | None = None,
        group: str,
        host_of: Callable[[str], str],
    ) -> None:
        self._cloud, self._group, self._host_of = cloud, group, host_of
        self._prefix = f"{job_name}/"
        self._bounds: dict[str, Any] = {"startTime": round(since.timestamp() * 1000)} if since is not None else {}
        self._streams: dict[str, _Stream] = {}
        # Lines that the tokens have passed: an error in a later stream or page must not lose them.
        self._unread: list[LogLine] = []
        self._tail = tail

    def read(self) -> list[LogLine]:
        self._find_streams()
        if self._tail is not None:
            lines = [line for stream in self._streams.values() for line in self._backward(stream, self._tail)]
            self._tail = None
            return merged(lines)
        for stream in self._streams.values():
            self._forward(stream)
        lines, self._unread = self._unread, []
        return merged(lines)

    def _find_streams(self) -> None:
        arguments = {"logGroupName": self._group, "logStreamNamePrefix": self._prefix}
        try:
            pages = self._cloud.client("logs").get_paginator("describe_log_streams").paginate(**arguments)
            names = [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except CloudProblem as error:
            if code_of(error) == "ResourceNotFoundException":  # nothing was logged yet
                return
            raise explained(error, "cannot list the job's log streams", "logs") from None
        for name in names:
            if name not in self._streams:
                self._streams[name] = _Stream(name, self._host_of(name))

    def _forward(self, stream: _Stream) -> None:
        empty = 0
        while empty < _MAX_EMPTY_PAGES:
            page = self._page(stream, stream.token, startFromHead=True)
            self._unread += _lines(stream, page["events"])
            token = page.get("nextForwardToken")
            if token is None or token == stream.token:
                return
            stream.token = token
            empty = 0 if page["events"] else empty + 1

    def _backward(self, stream: _Stream, count: int) -> list[LogLine]:
        """Read a stream backwards until it has given so many lines: the beginning of a long log is not read at all."""
        pages: list[list[dict[str, Any]]] = []
        num_events, token, empty = 0, None, 0
        while empty < _MAX_EMPTY_PAGES:
            page = self._page(stream, token, startFromHead=False)
            if token is None:
                stream.token = page.get("nextForwardToken")
            pages.insert(0, page["events"])
            num_events += len(page["events"])
            empty = 0 if page["events"] else empty + 1
            if num_events >= count or page.get("nextBackwardToken") in (None, token):
                break
            token = page["nextBackwardToken"]
        lines = _lines(stream, (event for events in pages for event in events))
        return lines[-count:] if count else []

    def _page(self, stream: _Stream, token: str | None, *, startFromHead: bool) -> dict[str, Any]:  # noqa: N803
        """Return one page of a stream; an empty one if the stream is not there yet."""
        place: dict[str, Any] = {"startFromHead": startFromHead} if token is None else {"nextToken": token}
        names: dict[str, Any] = {"logGroupName": self._group, "logStreamName": stream.name}
        try:
            return self._cloud.call("logs", "get_log_events", **names, **place, **self._bounds)
        except CloudProblem as error:
            if code_of(error) == "ResourceNotFoundException":
                return {"events": []}
            raise explained(error, "cannot read the job's log", "logs") from None


def _lines(stream: _Stream, events: Iterable[dict[str, Any]]) -> list[LogLine]:
    return [
        LogLine(
            datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc),
            stream.host,
            event["message"].rstrip("\r\n"),
        )
        for event in events
    ]
