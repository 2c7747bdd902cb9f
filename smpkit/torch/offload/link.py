"""What offloading needs of a device: one stream of copies to the host, one back, and events between them.

::

    compute   F0     F1     F2     F3    │ B3   B2   B1   B0
    out        0 ────►1 ────►2 ────►3    │                       each stream makes its copies in order;
    back                                 │      1 ──► 0 ──►      everything else is ordered by events alone
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from smpkit.errors import DeadlineError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.distributed.host_memory import pinned_bytes, zeros

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of source and target, of the same type and size."""
_MEASURED_BYTES: Final = 32 << 20
_MEASURED_COPIES: Final = 5
_POLL_SECONDS: Final = 50e-6
_numbers: Final = itertools.count()
_speeds: Final[dict[torch.device, tuple[float, float]]] = {}
"""Measured once for all links of a device."""


class Event(Protocol):
    """A point in the work of a stream."""

    number: int
    """It grows from one event of a stream to the next."""

    def done(self) -> bool:
        """Return whether that work is complete; does not block."""


class _Done:
    """The event of work that is complete."""

    number = -1

    def done(self) -> bool:
        return True


DONE: Final[Event] = _Done()


class Link:
    """A device's link to host memory; this one is the CPU's, whose "device" and "host" are the same memory.

    `send` and `fetch` return at once, and each makes its copies in order.
    """

    device = torch.device("cpu")
    runs_ahead = False
    """Whether this thread enqueues work long before the device has done it."""
    min_bytes = 0
    """Smaller tensors are not worth a copy."""
    latency_seconds = 0.0
    out_bytes_per_second = back_bytes_per_second = float("inf")

    def stream(self) -> Hashable:
        """Return the stream that computes now; it may change between two calls."""
        return "compute"

    def now(self) -> Event:
        """Return an event of all that is enqueued so far on the current stream."""
        return DONE

    def send(self, copies: Copies, after: Iterable[Event]) -> Event:  # noqa: ARG002 - everything is complete here
        """Copy to the host when `after` is complete."""
        for source, target in copies:
            target.copy_(source)
        return DONE

    def fetch(self, copies: Copies, after: Iterable[Event]) -> Event:
        """Copy to the device when `after` is complete."""
        return Link.send(self, copies, after)

    def wait(self, event: Event, what: str) -> None:
        """Make what is enqueued on the current stream from now on run after `event`.

        Args:
            what: names who waits, if this thread is what waits and the copy fails or takes too long.
        """

    def before_reuse(self, data: Tensor, event: Event, stream: Hashable) -> None:
        """Let nobody use the memory of `data`, which is about to be freed, before `stream` and `event` are over."""

    def synchronize(self, event: Event, what: str) -> None:
        """Block this thread until `event`; raises DeadlineError, which names `what`, and errors of the copy."""

    def stamp(self) -> Any:
        """Return a time stamp of the current stream."""
        return time.perf_counter_ns()

    def seconds_between(self, first: Any, last: Any) -> float | None:
        """Return the time between two stamps; None as long as the device has not reached them."""
        return 1e-9 * float(last - first)

    def before_free(self) -> None:
        """Block this thread until no copy can use memory that is freed next.

        Python's garbage collector calls this, perhaps while this thread starts another one or holds a lock: so it must
        wait for no thread and no lock. A link whose copies keep their memory alive has nothing to do.
        """

    def close(self) -> None:
        """Block this thread until all copies have ended."""
        self.before_free()


class _StreamEvent:
    """An event of a stream."""

    __slots__ = ("_is_done", "event", "number")

    def __init__(self, stream: torch.Stream) -> None:
        self.number = next(_numbers)
        self.event = torch.Event(stream.device)
        self.event.record(stream)
        self._is_done = False

    def done(self) -> bool:
        self._is_done = self._is_done or _is_complete(self.event)
        return self._is_done


class AcceleratorLink(Link):
    """Two copy streams of a GPU or another accelerator, beside the one that computes.

    No wait of this thread lasts longer than the deadline.
    """

    runs_ahead = True
    min_bytes = 1 << 20
    latency_seconds = 10e-6

    def __init__(self, device: torch.device, deadline_seconds: float) -> None:
        self.device = torch.empty(0, device=device).device  # with an index, as tensors have it
        self._deadline_seconds = deadline_seconds
        self._out, self._back = torch.Stream(self.device), torch.Stream(self.device)
        if self.device not in _speeds:
            _speeds[self.device] = self._measure()
        self.out_bytes_per_second, self.back_bytes_per_second = _speeds[self.device]

    def stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def now(self) -> Event:
        return _StreamEvent(self.stream())

    def send(self, copies: Copies, after: Iterable[Event]) -> Event:
        return _copy(self._out, copies, after)

    def fetch(self, copies: Copies, after: Iterable[Event]) -> Event:
        return _copy(self._back, copies, after)

    def wait(self, event: Event, what: str) -> None:  # noqa: ARG002 - this thread goes on
        _order_after(self.stream(), event)

    def before_reuse(self, data: Tensor, event: Event, stream: Hashable) -> None:
        # The wait comes first: `record_stream` alone frees memory when the allocator happens to check, and the peak
        # would depend on chance. torch ignores it for the stream that owns the memory.
        assert isinstance(stream, torch.Stream)
        _order_after(stream, event)
        data.record_stream(stream)

    def synchronize(self, event: Event, what: str) -> None:
        # Polled with a deadline: a device that hangs must not hang this thread.
        deadline = time.monotonic() + self._deadline_seconds
        while not event.done():
            if devices.is_capturing(self.device):  # no event completes until it ends
                raise UsageError(f"{what} would have to wait for a copy, while a CUDA graph is captured")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{what} waited {self._deadline_seconds:g} s for a copy between device and host memory",
                    hint="`nvidia-smi` shows whether the GPU hangs; `timeout_seconds` of a `modelparallel`"
                    " configuration makes this wait longer",
                )
            time.sleep(_POLL_SECONDS)

    def stamp(self) -> torch.Event:
        event = devices.record_event(self.device, keeps_time=True)
        assert event is not None, "the device has streams"
        return event

    def seconds_between(self, first: torch.Event, last: torch.Event) -> float | None:
        return 1e-3 * float(first.elapsed_time(last)) if _is_complete(last) else None

    def before_free(self) -> None:
        for name, stream in (("out", self._out), ("back", self._back)):
            self.synchronize(_StreamEvent(stream), f"closing the copy stream {name}")

    def _measure(self) -> tuple[float, float]:
        """Return bytes per second out and back."""
        there = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=self.device)
        try:
            here = pinned_bytes(self.device, _MEASURED_BYTES)
        except OSError:  # no pinned memory: activations will not leave either, and the speed does not matter
            here = zeros(_MEASURED_BYTES, torch.uint8)
        return self._speed(self._out, there, here), self._speed(self._back, here, there)

    def _speed(self, stream: torch.Stream, source: Tensor, target: Tensor) -> float:
        """Return bytes per second of the best of some copies: other ranks of this machine measure at the same time."""
        stamps = [torch.Event(self.device, enable_timing=True) for _ in range(1 + _MEASURED_COPIES)]
        after = self.now()  # the computing stream may still use this memory for what it held before
        for stamp in stamps:  # the first copy, before the first stamp, pays for what the driver puts off
            _copy(stream, [(source, target)], [after])
            stamp.record(stream)
        self.synchronize(_StreamEvent(stream), "measuring the link")
        return source.numel() / min(1e-3 * first.elapsed_time(last) for first, last in pairwise(stamps))


def _copy(stream: torch.Stream, copies: Copies, after: Iterable[Event]) -> Event:
    with devices.on_stream(stream):
        for event in after:
            _order_after(stream, event)
        for source, target in copies:
            target.copy_(source, non_blocking=True)
    return _StreamEvent(stream)


def _order_after(stream: torch.Stream, event: Event) -> None:
    if isinstance(event, _StreamEvent) and not event.done():
        stream.wait_event(event.event)


def _is_complete(event: torch.Event) -> bool:
    # During the capture of a CUDA graph a query is forbidden, and would make the capture fail.
    return not devices.is_capturing(event.device) and event.query()


def link_for(device: torch.device, deadline_seconds: float) -> Link:
    """Return the link of a device; no wait of this thread for a copy lasts longer than the deadline."""
    return AcceleratorLink(device, deadline_seconds) if devices.has_streams(device) else Link()
