"""Look at a job until it is over, and follow its log until that is complete. Neither ever stops the job."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeVar

from smpkit.errors import UnreachableError
from smpkit_estimator.backend import Backend, LogLine
from smpkit_estimator.status import JobStatus

_QUIET_SECONDS = 30.0
_MAX_LAST_READS = 6
_UNREACHABLE_SECONDS = 300.0
"""How long the back end may be unreachable before following or waiting gives up."""

_Answer = TypeVar("_Answer")


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


class Patience:
    """Waits out failures of the network, of up to five minutes each."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lost_for = 0.0
        self._error: UnreachableError | None = None

    def ask(self, call: Callable[[], _Answer]) -> _Answer | None:
        """Return an answer, or None after a pause in which there was none; give up when there is none for too long."""
        began = time.monotonic()
        try:
            answer = call()
        except UnreachableError as error:
            if self._lost_for >= _UNREACHABLE_SECONDS:
                raise
            self._error = error if not self._lost_for else None
            waited = time.monotonic() - began  # of the call, which has tried more than once
            self._backend.clock.sleep(self._backend.pace)
            self._lost_for += waited + self._backend.pace
            return None
        self._lost_for = 0.0
        return answer

    def notices(self) -> Iterator[Notice]:
        """Say that there was no answer, after the first of several."""
        if self._error is not None:
            minutes = f"{_UNREACHABLE_SECONDS / 60:.0f} minutes"
            yield Notice(f"{self._error.message}; trying for {minutes}, the job goes on", warning=True)


def snapshot(
    backend: Backend, name: str, *, wanted: LogFilter, tail: int | None = None, since: datetime | None = None
) -> Iterator[LogLine | Notice]:
    """Yield what has been logged so far."""
    status = backend.describe(name)
    lines = next(backend.log(name, since=since, tail=tail))
    chosen = [line for line in lines if wanted(line)]
    yield from chosen
    if not chosen and tail != 0:
        yield _nothing(wanted, since, status)


def follow(
    backend: Backend, name: str, *, wanted: LogFilter, tail: int | None = None, since: datetime | None = None
) -> Iterator[LogLine | Notice]:
    """Yield the lines of a job until it is over and its log is complete.

    After the job is seen to be over, the log is read until two reads in a row return nothing, since CloudWatch delivers
    late and shared folders do, too.
    """
    patience, log = Patience(backend), backend.log(name, since=since, tail=tail)
    phase, quiet, quiet_limit, chosen = ("", 0), 0.0, _QUIET_SECONDS, 0
    last_reads = empty_reads = 0
    while True:
        # The status first: lines that were written before the end are then read after it was seen.
        look = patience.ask(lambda: (backend.describe(name), next(log)))
        if look is None:
            yield from patience.notices()
            continue
        status, lines = look
        if (status.phase, len(status.phases)) != phase:
            phase, quiet, quiet_limit = (status.phase, len(status.phases)), 0.0, _QUIET_SECONDS
            yield Notice(_phase_sentence(status))
        for line in filter(wanted, lines):
            chosen += 1
            yield line
        if status.over:
            empty_reads = 0 if lines or not last_reads else empty_reads + 1
            if empty_reads == 2:
                break
            if last_reads == _MAX_LAST_READS:
                yield Notice(f"lines still come in; `smpkit logs {name}` shows the rest later", warning=True)
                break
            last_reads += 1
        elif lines:
            quiet, quiet_limit = 0.0, _QUIET_SECONDS
        elif quiet >= quiet_limit:
            yield Notice(f"no new lines for {quiet:.0f} s; the job is {status.phase}")
            quiet_limit *= 2
        backend.clock.sleep(backend.pace)
        quiet += backend.pace
    if not chosen and wanted.describe(since):
        yield _nothing(wanted, since, status)


def _nothing(wanted: LogFilter, since: datetime | None, status: JobStatus) -> Notice:
    words = wanted.describe(since)
    if words:
        return Notice(f"the log has no line {words}" + ("" if status.over else f" yet; the job is {status.phase}"))
    if status.over:
        return Notice(f"nothing was logged{f': {status.message}' if status.message else ''}")
    return Notice(f"nothing is logged yet; the job is {status.phase}")


def _phase_sentence(status: JobStatus) -> str:
    message = " ".join(status.message.split()).rstrip(".")
    return f"{status.phase}: {message}" if message else status.phase
