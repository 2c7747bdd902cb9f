"""A link for the CPU: "device" and "host" are both ordinary memory, and a thread per direction copies at a given speed.

Order, overlap, memory and failures of the offload engine show on it as on a GPU, on any machine::

    compute  F0  F1  F2  B2  B1  B0        (the thread that calls; a wait blocks it)
    out        0   1   2                    a copy keeps its thread for latency + bytes / rate,
    back               1   0                and writes at the end of that time
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final

from smpkit.errors import DeadlineError, SmpkitError, UsageError
from smpkit.torch.offload.link import Copies, Event, Link

_numbers: Final = itertools.count()


class _CopyEvent:
    """The event of a copy that a thread makes."""

    def __init__(self, copy: Future[None]) -> None:
        self.number = next(_numbers)
        self.copy = copy

    def done(self) -> bool:
        """Return whether the copy has been made."""
        return self.copy.done() and self.copy.exception() is None


class _Direction:
    """Copies of one direction, one after the other."""

    def __init__(self, name: str, bytes_per_second: float) -> None:
        self.name, self.bytes_per_second = name, bytes_per_second
        self.pool = ThreadPoolExecutor(1, name)
        self.free_at = 0.0


class EmulatedLink(Link):
    """Copies between two places in the memory of this process, as slowly as a real link would.

    Args:
        out_bytes_per_second: speed to the host; without speed, latency and jitter copies are made at once.
        back_bytes_per_second: speed from the host; None: the same.
        latency_seconds: added to every copy.
        jitter_seconds: up to this much is added to every copy at random, to try other interleavings.
        seed: of the jitter.
        deadline_seconds: no wait lasts longer.

    Raises:
        UsageError: a speed that is not positive, or a negative time.
    """

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
        self._jitter_seconds, self._deadline_seconds = jitter_seconds, deadline_seconds
        self._random = random.Random(seed)  # noqa: S311 - for delays
        self._out, self._back = _Direction("offload-out", out_bytes_per_second), _Direction("offload-back", back)

    def send(self, copies: Copies, after: Iterable[Event]) -> Event:
        return self._queue(self._out, copies, after)

    def fetch(self, copies: Copies, after: Iterable[Event]) -> Event:
        return self._queue(self._back, copies, after)

    def wait(self, event: Event, what: str) -> None:
        self.synchronize(event, what)

    def synchronize(self, event: Event, what: str) -> None:
        if not isinstance(event, _CopyEvent):
            return
        try:
            event.copy.result(self._deadline_seconds)
        except FutureTimeout as error:
            raise DeadlineError(
                f"{what} waited {self._deadline_seconds:g} s for a copy between device and host memory",
                hint="is the machine out of memory or stopped? Raise `timeout_seconds` if the link is only slow",
            ) from error
        except DeadlineError:
            raise
        except Exception as error:
            raise SmpkitError(f"{what} was not copied between device and host memory: {error}") from error

    def close(self) -> None:
        """Complete all copies, and end the threads; a later copy starts them anew."""
        for direction in (self._out, self._back):
            direction.pool.shutdown()
            direction.pool = ThreadPoolExecutor(1, direction.name)

    def _queue(self, direction: _Direction, copies: Copies, after: Iterable[Event]) -> Event:
        if math.isinf(direction.bytes_per_second) and not self.latency_seconds + self._jitter_seconds:
            return super().send(copies, after)
        jitter = self._random.uniform(0, self._jitter_seconds)
        return _CopyEvent(direction.pool.submit(self._copy, direction, list(copies), tuple(after), jitter))

    def _copy(self, direction: _Direction, copies: Copies, after: Iterable[Event], jitter: float) -> None:
        for event in after:
            self.synchronize(event, "a copy")
        num_bytes = sum(source.nbytes for source, _ in copies)
        start = max(time.perf_counter(), direction.free_at)
        direction.free_at = start + self.latency_seconds + jitter + num_bytes / direction.bytes_per_second
        time.sleep(max(0.0, direction.free_at - time.perf_counter()))
        for source, target in copies:
            target.copy_(source)
