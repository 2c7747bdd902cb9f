"""The link of a GPU or another accelerator: two copy streams beside the one that computes, and pinned host memory.

Everything that a copy touches is held until an event says that it is complete, or until the stream that owns the memory
waits for that event. `record_stream` is not used for that: it frees memory when the allocator happens to check, so the
peak would depend on chance. It is used only for memory that the user may have allocated on another stream.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from smpkit.errors import DeadlineError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.offload.arena import PAGE, Progress, mapped_bytes, ordinary_memory, touch
from smpkit.torch.offload.link import CopyBatch, Event

__all__ = ["AcceleratorLink", "pinned_memory"]

_MEASURED_BYTES: Final = 32 << 20
_MEASURED_COPIES: Final = 5
_speeds: Final[dict[torch.device, tuple[float, float]]] = {}
_POLL_SECONDS: Final = 50e-6
_progress: Final = Progress("pinning host memory")


class _StreamEvent:
    """An event of a stream."""

    __slots__ = ("_is_done", "event")

    def __init__(self, stream: torch.Stream) -> None:
        self.event = torch.Event(stream.device)
        self.event.record(stream)
        self._is_done = False

    def done(self) -> bool:
        """Return whether the stream has reached this event."""
        self._is_done = self._is_done or _is_complete(self.event)
        return self._is_done


class _StreamWait:
    """The time between two events around a wait: what the stream spent in it."""

    def __init__(self, first: torch.Event, last: torch.Event) -> None:
        self.stamps = first, last

    @property
    def seconds(self) -> float | None:
        """The time; None if the device has not reached the events yet."""
        return _seconds_between(*self.stamps)


class AcceleratorLink:
    """The copy engines of one accelerator.

    Args:
        device: the accelerator.
        deadline_seconds: no wait of this thread lasts longer.
    """

    is_stream_ordered = True
    min_bytes = 1 << 20
    latency_seconds = 10e-6

    def __init__(self, device: torch.device, deadline_seconds: float) -> None:
        self.device = torch.empty(0, device=device).device  # with an index, as tensors have it
        self._deadline_seconds = deadline_seconds
        self._out, self._back = torch.Stream(self.device), torch.Stream(self.device)
        self.out_bytes_per_second, self.back_bytes_per_second = self._bandwidths()

    def stream(self) -> Hashable:
        """Return the stream that computes now."""
        return torch.accelerator.current_stream(self.device)

    def now(self, stream: Hashable = None) -> Event:
        """Return an event of all work enqueued so far on a stream; None: the current one."""
        return _StreamEvent(
            stream if isinstance(stream, torch.Stream) else torch.accelerator.current_stream(self.device)
        )

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Copy on the stream to the host."""
        return _copy(self._out, copies, after)

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Copy on the stream from the host."""
        return _copy(self._back, copies, after)

    def wait(self, event: Event, what: str) -> _StreamWait:
        """Let the current stream wait; events around it measure what that costs."""
        first = self.stamp()
        _wait_event(torch.accelerator.current_stream(self.device), event)
        return _StreamWait(first, self.stamp())

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        """Make the stream whose allocator gets memory back wait."""
        assert isinstance(stream, torch.Stream)
        _wait_event(stream, event)

    def record_stream(self, data: Tensor, stream: Hashable) -> None:
        """Tell the allocator that `stream` uses the memory; torch ignores this for the stream that owns it."""
        assert isinstance(stream, torch.Stream)
        data.record_stream(stream)

    def synchronize(self, event: Event, what: str) -> None:
        """Block this thread until `event`."""
        # Polled with a deadline: a device that hangs must not hang this thread.
        deadline = time.monotonic() + self._deadline_seconds
        while not event.done():
            if devices.is_capturing(self.device):  # no event completes until it ends
                raise UsageError(f"{what} would have to wait for a copy, while a CUDA graph is captured")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{what} waited {self._deadline_seconds:g} s for a copy between device and host memory",
                    hint="raise `timeout_seconds` if the GPU is only slow",
                )
            time.sleep(_POLL_SECONDS)

    def stamp(self) -> torch.Event:
        """Return an event with a time stamp."""
        event = devices.record_event(self.device, keeps_time=True)
        assert event is not None, "the device has streams"
        return event

    def seconds_between(self, first: torch.Event, last: torch.Event) -> float | None:
        """Return the time between two stamps."""
        return _seconds_between(first, last)

    def close(self) -> None:
        """Wait for all copies."""
        for name, stream in (("out", self._out), ("back", self._back)):
            self.synchronize(_StreamEvent(stream), f"closing the copy stream {name}")

    def _bandwidths(self) -> tuple[float, float]:
        """Return bytes per second out and back; measured once for all links of a device."""
        if self.device not in _speeds:
            _speeds[self.device] = self._measure()
        return _speeds[self.device]

    def _measure(self) -> tuple[float, float]:
        """Return bytes per second out and back, of a copy that is large enough to show them."""
        there = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=self.device)
        try:
            here, release = pinned_memory(self.device, _MEASURED_BYTES)
        except OSError:  # no pinned memory: activations will not leave either, and the speed does not matter
            here, release = ordinary_memory(_MEASURED_BYTES)
        speeds = self._speed(self._out, there, here), self._speed(self._back, here, there)
        release()
        return speeds

    def _speed(self, stream: torch.Stream, source: Tensor, target: Tensor) -> float:
        """Return bytes per second of the best of some copies: other ranks of this machine measure at the same time."""
        events = [torch.Event(self.device, enable_timing=True) for _ in range(1 + _MEASURED_COPIES)]
        computed = self.stamp()
        with devices.on_stream(stream):
            # `source` and `target` are memory that the computing stream may still use for what it held before.
            stream.wait_event(computed)
            target.copy_(source, non_blocking=True)  # the first copy pays for what the driver puts off
            events[0].record(stream)
            for event in events[1:]:
                target.copy_(source, non_blocking=True)
                event.record(stream)
        self.synchronize(_StreamEvent(stream), "measuring the link")
        seconds = [1e-3 * float(first.elapsed_time(last)) for first, last in pairwise(events)]
        return source.numel() / min(seconds)


def _copy(stream: torch.Stream, copies: CopyBatch, after: Sequence[Event]) -> Event:
    with devices.on_stream(stream):
        for event in after:
            _wait_event(stream, event)
        copies.run(non_blocking=True)
    return _StreamEvent(stream)


def _wait_event(stream: torch.Stream, event: Event) -> None:
    if isinstance(event, _StreamEvent) and not event.done():
        stream.wait_event(event.event)


def _seconds_between(first: torch.Event, last: torch.Event) -> float | None:
    return 1e-3 * float(first.elapsed_time(last)) if _is_complete(last) else None


def _is_complete(event: torch.Event) -> bool:
    # During the capture of a CUDA graph a query is forbidden, and would make the capture fail.
    return not devices.is_capturing(event.device) and event.query()


def pinned_memory(device: torch.device, num_bytes: int) -> tuple[Tensor, Callable[[], object]]:
    """Return host memory of exactly this size that copies run from and to at full speed (see `arena.HostAllocator`).

    It is registered in one piece, because a copy must not cross from one registration to the next. The driver looks up
    every page, so pages are large where the system has large ones, and touched before. Progress is logged at INFO if
    this takes long. A device whose driver registers nothing gets memory that torch has pinned, rounded up to a power of
    two.

    Raises:
        OSError: the driver does not take the memory.
    """
    registration = devices.host_registration(device)
    if registration is None:
        return _pinned_by_torch(num_bytes)
    # Forked children (data loaders) must not share it: after a fork, a write by this process would copy the page to
    # another place, and the GPU would go on using the old one.
    tensor = mapped_bytes(num_bytes, in_children=False)
    touch(tensor, _progress.add)
    owner = os.getpid()
    start = time.perf_counter()
    registration.register(tensor.data_ptr(), -(-num_bytes // PAGE) * PAGE)
    _progress.add(0, time.perf_counter() - start)

    def release() -> None:  # holds the tensor: registered memory must stay mapped until it is unregistered
        if os.getpid() == owner:
            registration.unregister(tensor.data_ptr())

    return tensor, release


def _pinned_by_torch(num_bytes: int) -> tuple[Tensor, Callable[[], object]]:
    start = time.perf_counter()
    try:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise OSError(f"torch could not pin {num_bytes} bytes of the host: {error}") from error
    _progress.add(num_bytes, time.perf_counter() - start)
    return tensor, lambda: None  # torch keeps the memory of a tensor that is gone, and pins it no second time
