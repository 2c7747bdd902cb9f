"""Read the logs of a job's pods through the API: each line once, as far as it has come."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from smpkit_estimator.clock import Clock
from smpkit_estimator.kubernetes.api import Api
from smpkit_estimator.kubernetes.manifests import JOB_LABEL
from smpkit_estimator.kubernetes.status import host_of, terminated
from smpkit_estimator.log_line import LogLine, rank_of

__all__ = ["PodLog"]

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?(.*)", re.DOTALL)
_OVERLAP_SECONDS = 60.0
"""How far the clocks of nodes and this machine may be apart: so much is read again and left out."""
_FIRST_TAIL = 1000


@dataclass
class _Stream:
    pod: str
    host: str
    last: tuple[str, int] | None = None
    """The time of its last line as it was written, and how many lines of that time were read."""
    when: datetime | None = None
    count: int = 0
    whole: bool = False
    """Whether it was read to its end after its container had ended."""


class PodLog:
    """A job's log; see `smpkit_estimator.backend.Log`. Earlier attempts belong to it while their pods are there."""

    def __init__(
        self, api: Api, name: str, clock: Clock, since: datetime | None = None, over: Callable[[], bool] = lambda: False
    ) -> None:
        """Read the log of the job of this name.

        Args:
            over: tells whether the job has ended.
        """
        self._api, self._name, self._clock, self._since, self._over = api, name, clock, since, over
        self._streams: dict[str, _Stream] = {}
        self.incomplete: list[str] = []

    @property
    def hosts(self) -> set[str]:
        """The hosts that have logged anything."""
        return {stream.host for stream in self._streams.values() if stream.count}

    @property
    def num_streams(self) -> int:
        """How many pods have logged anything, or would have if they were still there."""
        return sum(stream.count > 0 for stream in self._streams.values()) + len(self.incomplete)

    def read(self) -> list[LogLine]:
        """Return what is new, sorted by time."""
        found: list[LogLine] = []
        for stream, over in self._find():
            seconds = self._seconds(stream)
            data = self._api.log(stream.pod, seconds)
            found += self._gone(stream) if data is None else self._new(stream, data, again=seconds is not None)
            stream.whole = stream.whole or over
        return sorted(found)

    def tail(self, count: int, keep: Callable[[LogLine], bool]) -> list[LogLine]:
        """Return the last `count` lines of those that `keep` wants; `read` then goes on behind them.

        Of each pod only as much of its end is read as it takes.
        """
        found: list[LogLine] = []
        for stream, over in self._find():
            found += self._last(stream, count, keep)
            stream.whole = stream.whole or over
        return sorted(found)[-count:] if count else []

    def _find(self) -> list[tuple[_Stream, bool]]:
        """Return the pods whose log is not read to its end, and whether their containers have ended."""
        pods = {pod["metadata"]["name"]: pod for pod in self._api.list("Pod", f"{JOB_LABEL}={self._name}")}
        for name, stream in self._streams.items():
            if name not in pods and not stream.whole:
                self._gone(stream)
        for name in sorted(pods.keys() - self._streams.keys()):
            if _has_begun(pods[name]):
                self._streams[name] = _Stream(name, host_of(pods[name]))
        if not pods and not self._streams and not self.incomplete and self._over():
            self.incomplete.append("of every pod (Kubernetes deletes the pods of a stopped job, and their logs)")
        known = [stream for name, stream in self._streams.items() if name in pods and not stream.whole]
        return [(stream, terminated(pods[stream.pod]) is not None) for stream in known]

    def _seconds(self, stream: _Stream) -> float | None:
        since = stream.when or self._since
        if since is None:
            return None
        return (self._clock.now() - since + timedelta(seconds=_OVERLAP_SECONDS)).total_seconds()

    def _gone(self, stream: _Stream) -> list[LogLine]:
        stream.whole = True
        self.incomplete.append(f"{stream.host} ({stream.pod}, which is gone)")
        return []

    def _new(self, stream: _Stream, data: bytes, *, again: bool) -> list[LogLine]:
        """Return the lines behind the last one that was read."""
        lines = _lines(data)
        if not again or stream.last is None:
            fresh = lines
        else:
            stamp, seen = stream.last
            same = [index for index, (each, _) in enumerate(lines) if each == stamp]
            if lines and not same and lines[0][0] > stamp:  # what came between was thrown away by the node
                self.incomplete.append(f"{stream.host} ({stream.pod}): the node threw lines away before they were read")
            later = [line for line in lines if line[0] > stamp]
            fresh = [*(lines[index] for index in same[seen:]), *later]
        return self._taken(stream, fresh)

    def _last(self, stream: _Stream, count: int, keep: Callable[[LogLine], bool]) -> list[LogLine]:
        asked = max(count, _FIRST_TAIL)
        while True:
            data = self._api.log(stream.pod, None, asked)
            if data is None:
                return self._gone(stream)
            lines = _lines(data)
            stream.count, stream.last, stream.when = 0, None, None
            found = [line for line in self._taken(stream, lines) if keep(line)]
            if len(found) >= count or len(lines) < asked:
                return found[-count:] if count else []
            asked *= 8

    def _taken(self, stream: _Stream, fresh: list[tuple[str, str]]) -> list[LogLine]:
        lines = []
        for stamp, text in fresh:
            seen = stream.last[1] if stream.last is not None and stream.last[0] == stamp else 0
            stream.last, stream.when = (stamp, seen + 1), _moment(stamp)
            if self._since is None or stream.when >= self._since:
                lines.append(LogLine(stream.when, stream.pod, stream.count, text, stream.host, rank_of(text)))
            stream.count += 1
        return lines


def _lines(data: bytes) -> list[tuple[str, str]]:
    """Take lines apart into a time that can be compared as text, and what was printed."""
    found: list[tuple[str, str]] = []
    for text in data.decode("utf-8", "replace").split("\n")[:-1]:
        match = _STAMPED.fullmatch(text)
        if match is not None:
            found.append((f"{match[1]}.{(match[2] or '').ljust(9, '0')}{match[3]}", match[4]))
    return found


def _moment(stamp: str) -> datetime:
    return datetime.fromisoformat(stamp[:26] + stamp[29:].replace("Z", "+00:00")).astimezone(timezone.utc)


def _has_begun(pod: Mapping[str, Any]) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return any(state in each.get("state", {}) for each in statuses for state in ("running", "terminated"))
