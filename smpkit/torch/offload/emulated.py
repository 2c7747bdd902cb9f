"""A link for the CPU: "device" and "host" are both ordinary memory, and a thread per direction copies at a given speed.

Order, overlap, memory and failures of the engine show on it as on a GPU, on any machine::

    compute  F0  F1  F2  B2  B1  B0        (the thread that calls; a wait blocks it)
    out        0   1   2                    a copy keeps its thread for latency + bytes / rate,
    back               1   0                and writes at the end of that time
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from smpkit.errors import DeadlineError, SmpkitError, UsageError
from smpkit.torch.offload.link import DONE, CopyBatch, Event

__all__ = ["CopyEvent", "EmulatedLink", "ThreadWait"]

_IDLE_SECONDS: Final = 0.2
"""A copy thread without work ends after this time, so that none is left behind; the next copy starts another."""


class CopyEvent:
    """The event of a copy that a thread makes."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Return whether the copy has been made."""
        return self._ended.is_set() and self.error is None

    def wait(self, seconds: float) -> bool:
        """Wait until the copy has ended, with or without an error; return whether it has."""
        return self._ended.wait(seconds)

    def end(self, error: BaseException | None = None) -> None:
        """Wake all who wait."""
        self.error = error
        self._ended.set()


@dataclass(frozen=True)
class ThreadWait:
    """How long a thread stood still in a wait."""

    seconds: float
    stamps: None = None


class EmulatedLink:
    """Copies between two places in the memory of this process, as slowly as a real link would.

    Args:
        out_bytes_per_second: speed to the host; without speed, latency and jitter copies are made in place.
        back_bytes_per_second: speed from the host; None: the same.
        latency_seconds: added to every copy.
        jitter_seconds: up to this much is added to every copy at random, to try other interleavings.
        seed: of the jitter.
        deadline_seconds: no wait lasts longer.

    Raises:
        UsageError: a speed that is not positive, or a negative time.
    """

    device = torch.device("cpu")
    is_stream_ordered = False
    min_bytes = 0

    def __init__(
        self,
        out_bytes_per_second: float = math.inf,
        back_bytes_per_second: float | None = None,
        latency_seconds: float = 0.0,
        jitter_seconds: float = 0.0,
        seed: int = 0,
        deadline_seconds: float = 60.0,
    ) -> None:
        back = out_bytes_per_second if back_bytes_per_second is None else back_bytes_per_second
        if not (out_bytes_per_second > 0 and back > 0):
            raise UsageError(f"a link of {out_bytes_per_second} and {back} bytes per second carries nothing")
        if min(latency_seconds, jitter_seconds) < 0 or deadline_seconds <= 0:
            raise UsageError(
                f"latency {latency_seconds}, jitter {jitter_seconds} or deadline {deadline_seconds} is no time"
            )
        self.out_bytes_per_second, self.back_bytes_per_second = out_bytes_per_second, back
        self.latency_seconds = latency_seconds
        self._deadline_seconds = deadline_seconds
        self._in_place = math.isinf(out_bytes_per_second) and math.isinf(back) and not latency_seconds + jitter_seconds
        times = (latency_seconds, jitter_seconds, deadline_seconds)
        self._out = _CopyThread("offload-out", out_bytes_per_second, *times, seed)
        self._back = _CopyThread("offload-back", back, *times, seed + 1)

    def stream(self) -> Hashable:
        """Return the only stream: the calling thread."""
        return "compute"

    def now(self, stream: Hashable = None) -> Event:
        """Return a complete event: a call on the CPU has done its work when it returns."""
        return DONE

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Copy on the thread to the host."""
        return self._copy(self._out, copies, after, what)

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Copy on the thread from the host."""
        return self._copy(self._back, copies, after, what)

    def wait(self, event: Event, what: str) -> ThreadWait:
        """Block this thread until `event`."""
        start = time.perf_counter()
        self.synchronize(event, what)
        return ThreadWait(time.perf_counter() - start)

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        """Do nothing: a copy under way holds the tensors that it copies."""

    def record_stream(self, data: Tensor, stream: Hashable) -> None:
        """Do nothing: there is one stream."""

    def synchronize(self, event: Event, what: str) -> None:
        """Block this thread until `event`."""
        if isinstance(event, CopyEvent):
            _await(event, what, self._deadline_seconds)

    def stamp(self) -> float:
        """Return the time of this thread."""
        return time.perf_counter()

    def seconds_between(self, first: float, last: float) -> float:
        """Return the difference."""
        return last - first

    def close(self) -> None:
        """Complete all copies, and end the threads."""
        self._out.close()
        self._back.close()

    def _copy(self, copy_thread: _CopyThread, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        if self._in_place:
            copies.run()
            return DONE
        job = _CopyJob(copies, tuple(event for event in after if not event.done()), what, CopyEvent())
        copy_thread.put(job)
        return job.event


def _await(event: CopyEvent, what: str, deadline_seconds: float) -> None:
    if not event.wait(deadline_seconds):
        raise DeadlineError(
            f"{what} waited {deadline_seconds:g} s for a copy between device and host memory",
            hint="is the machine out of memory or stopped? Raise `timeout_seconds` if the link is only slow",
        )
    if isinstance(event.error, DeadlineError):
        raise event.error
    if event.error is not None:
        raise SmpkitError(f"{what} was not copied between device and host memory: {event.error}") from event.error


@dataclass(frozen=True)
class _CopyJob:
    copies: CopyBatch
    after: tuple[Event, ...]
    what: str
    event: CopyEvent


class _CopyThread:
    """Copies of one direction, in a thread that runs while there is work."""

    def __init__(
        self,
        name: str,
        bytes_per_second: float,
        latency_seconds: float,
        jitter_seconds: float,
        deadline_seconds: float,
        seed: int,
    ) -> None:
        self._name = name
        self._bytes_per_second = bytes_per_second
        self._latency_seconds, self._jitter_seconds = latency_seconds, jitter_seconds
        self._deadline_seconds = deadline_seconds
        self._random = random.Random(seed)  # noqa: S311 - for delays
        self._jobs: deque[_CopyJob] = deque()
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._free_at = 0.0

    def put(self, job: _CopyJob) -> None:
        """Queue a copy, and wake or start the thread."""
        with self._work:
            self._closing = False
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name)
                self._thread.start()
            self._work.notify()

    def close(self) -> None:
        """End the thread after the copies that are queued."""
        with self._work:
            self._closing = True
            thread = self._thread
            self._work.notify()
        if thread is not None:
            thread.join(self._deadline_seconds)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._copy(job)
            except BaseException as error:
                job.event.end(error)
            del job  # an idle thread must not keep the last tensors alive

    def _next(self) -> _CopyJob | None:
        """Return the next copy; None ends the thread."""
        with self._work:
            if not self._jobs and not self._closing:
                self._work.wait(_IDLE_SECONDS)
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None

    def _copy(self, job: _CopyJob) -> None:
        for event in job.after:
            if isinstance(event, CopyEvent):
                _await(event, job.what, self._deadline_seconds)
        num_bytes = sum(source.nbytes for source, _ in job.copies)
        start = max(time.perf_counter(), self._free_at)
        jitter = self._random.uniform(0, self._jitter_seconds) if self._jitter_seconds else 0.0
        self._free_at = start + self._latency_seconds + jitter + num_bytes / self._bytes_per_second
        _sleep_until(self._free_at)
        job.copies.run()
        job.event.end()


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
