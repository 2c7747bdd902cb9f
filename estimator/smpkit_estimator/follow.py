"""Follow a job: new log lines, changes of phase, and notices about gaps, until the log is complete.

Never stops the job, whatever happens to the follower.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone

from smpkit.errors import UnreachableError
from smpkit_estimator.backend import Backend, Log
from smpkit_estimator.log_line import LogLine
from smpkit_estimator.status import JobStatus

__all__ = ["UNREACHABLE_SECONDS", "LogFilter", "Notice", "follow", "snapshot"]

_QUIET_SECONDS = 30.0
_MAX_LAST_READS = 6
UNREACHABLE_SECONDS = 300.0
"""How long the back end may be unreachable before following or waiting gives up."""


@dataclass(frozen=True)
class Notice:
    """Something about the job or the log, which is not a line of it."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted; empty means all."""

    ranks: frozenset[int] = frozenset()
    hosts: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    def __call__(self, line: LogLine) -> bool:
        """Tell whether a line is wanted."""
        return (
            (not self.ranks or line.rank in self.ranks)
            and (not self.hosts or line.host in self.hosts)
            and (self.pattern is None or self.pattern.search(line.text) is not None)
        )

    def describe(self, since: datetime | None = None) -> str:
        """Return what is wanted in words that follow "line": "of rank 1 or 2, since ..."; empty for all."""
        words = [
            f"of rank {' or '.join(map(str, sorted(self.ranks)))}" if self.ranks else "",
            f"from {' or '.join(f'`{host}`' for host in sorted(self.hosts))}" if self.hosts else "",
            f"that matches `{self.pattern.pattern}`" if self.pattern is not None else "",
            f"since {since.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC" if since is not None else "",
        ]
        return ", ".join(filter(None, words))


def snapshot(
    backend: Backend, name: str, *, wanted: LogFilter, tail: int | None = None, since: datetime | None = None
) -> Iterator[LogLine | Notice]:
    """Yield what has been logged so far."""
    status = backend.describe(name)
    reader = backend.logs(name, since)
    lines = reader.tail(tail, wanted) if tail is not None else [line for line in reader.read() if wanted(line)]
    yield from lines
    if not reader.num_streams:
        yield Notice(f"nothing is logged yet; the job is {status.phase}" if not status.over else "nothing was logged")
    elif not lines and tail != 0:
        yield from _no_line(wanted, since, status)
    yield from _gaps(reader, status)


@dataclass
class _Follower:
    backend: Backend
    name: str
    wanted: LogFilter
    reader: Log
    phase: tuple[str, int] = ("", 0)
    quiet: float = 0.0
    """For how long nothing came."""
    quiet_limit: float = _QUIET_SECONDS
    unreachable: float = 0.0
    status: JobStatus | None = field(default=None)

    def look(self) -> Iterator[LogLine | Notice]:
        """Yield the change of phase and the new lines; remember how long there were none."""
        # The status first: lines that were written before the end are then read after it was seen.
        self.status = self.backend.describe(self.name)
        phase = (self.status.phase, len(self.status.phases))
        if phase != self.phase:
            self.phase, self.quiet, self.quiet_limit = phase, 0.0, _QUIET_SECONDS
            yield Notice(_phase_sentence(self.status))
        lines = self.reader.read()
        if lines:
            self.quiet, self.quiet_limit = 0.0, _QUIET_SECONDS
        yield from filter(self.wanted, lines)

    @property
    def pause(self) -> float:
        pace = self.backend.pace
        return max(pace.poll, self.reader.num_streams / pace.streams_per_second)

    def wait(self) -> Iterator[Notice]:
        assert self.status is not None
        if self.quiet >= self.quiet_limit:
            yield Notice(f"no new lines for {self.quiet:.0f} s; the job is {self.status.phase}")
            self.quiet_limit *= 2
        self.backend.clock.sleep(self.pause)
        self.quiet += self.pause


def follow(
    backend: Backend, name: str, *, wanted: LogFilter, tail: int | None = None, since: datetime | None = None
) -> Iterator[LogLine | Notice]:
    """Yield the lines of a job until it is over and its log is complete.

    Network failures of up to five minutes are waited out. After the job has ended, the log is read until two reads in a
    row return nothing, since CloudWatch delivers late and shared folders do, too.

    Raises:
        CloudError: the log cannot be read, or the back end could not be reached for too long.
    """
    follower = _Follower(backend, name, wanted, backend.logs(name, since))
    nothing = True
    for line in _until_the_end(follower, tail):
        nothing = nothing and isinstance(line, Notice)
        yield line
    if nothing and follower.reader.num_streams and follower.status is not None:
        yield from _no_line(wanted, since, follower.status)


def _until_the_end(follower: _Follower, tail: int | None) -> Iterator[LogLine | Notice]:
    if tail is not None:
        follower.backend.describe(follower.name)  # says so if there is no such job
        yield from follower.reader.tail(tail, follower.wanted)
    while follower.status is None or not follower.status.over:
        try:
            yield from follower.look()
        except UnreachableError as error:
            yield from _out_of_reach(follower, error)
            continue
        follower.unreachable = 0.0
        assert follower.status is not None
        if not follower.status.over:
            yield from follower.wait()
    yield from _last_lines(follower)


def _out_of_reach(follower: _Follower, error: UnreachableError) -> Iterator[Notice]:
    if follower.unreachable >= UNREACHABLE_SECONDS:
        raise error
    if not follower.unreachable:
        yield Notice(
            f"{error.message}; trying for {UNREACHABLE_SECONDS / 60:.0f} minutes, the job goes on", warning=True
        )
    follower.backend.clock.sleep(follower.backend.pace.poll)
    follower.unreachable += follower.backend.pace.poll


def _last_lines(follower: _Follower) -> Iterator[LogLine | Notice]:
    """Read on after the job has ended, until no more lines arrive."""
    assert follower.status is not None
    silent = 0
    for _ in range(_MAX_LAST_READS):
        follower.backend.clock.sleep(follower.backend.pace.settle)
        lines = follower.reader.read()
        yield from filter(follower.wanted, lines)
        silent = 0 if lines else silent + 1
        if silent == 2:
            break
    else:
        yield Notice(f"lines still come in; `smpkit logs {follower.name}` shows the rest later", warning=True)
    yield from _gaps(follower.reader, follower.status)


def _no_line(wanted: LogFilter, since: datetime | None, status: JobStatus) -> Iterator[Notice]:
    """Say that no line passed the filters, and name them."""
    words = wanted.describe(since)
    if words:
        yield Notice(f"the log has no line {words}" + ("" if status.over else f" yet; the job is {status.phase}"))


def _gaps(reader: Log, status: JobStatus) -> Iterator[Notice]:
    """Say where the log may be incomplete."""
    if status.over and status.training_started is not None and len(reader.hosts) < status.instance_count:
        text = f"only {len(reader.hosts)} of {status.instance_count} hosts have a log; it may be incomplete"
        yield Notice(text, warning=True)
    for stream in reader.incomplete:
        yield Notice(f"the log stream {stream} did not come to an end; it may be incomplete", warning=True)


def _phase_sentence(status: JobStatus) -> str:
    message = " ".join(status.message.split()).rstrip(".")
    return f"{status.phase}: {message}" if message else status.phase
