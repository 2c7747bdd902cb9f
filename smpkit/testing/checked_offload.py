"""An engine that checks itself (`SMPKIT_OFFLOAD_DEBUG=1`): the order of accesses, what was stored, what is left over.

Every stream, copy thread and this thread has a vector clock: how much of each other's work is known to be complete
before what it does next. An event carries the clock of the place where it was recorded, and a wait joins it. So whether
two accesses are ordered does not depend on how long they happened to take: a missing edge is found even if it did no
harm this time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.hooks import HookContext, SavedTensorHandle
from smpkit.torch.offload.link import CopyBatch, Event, Link, Wait
from smpkit.torch.offload.report import StepReport
from smpkit.torch.offload.saved_storage import Group, SavedStorage

__all__ = ["CheckedEngine", "CheckedLink", "RaceError"]

_POISON: Final = 0xFF
"""In each byte: NaN in every floating type, -1 in integers."""

Clock = dict[Hashable, int]


class RaceError(AssertionError):
    """Two accesses to the same bytes that no event orders, bytes that came back changed, or memory never freed."""


@dataclass(frozen=True)
class _Access:
    what: str
    is_write: bool
    timeline: Hashable
    tick: int
    begin: int
    end: int


@dataclass
class Clocks:
    """What each timeline knows to be complete, and who last accessed which bytes."""

    timelines: dict[Hashable, Clock] = field(default_factory=dict)
    host: Clock = field(default_factory=dict)
    """What this thread knows to be complete: everything it enqueues later comes after that."""
    accesses: list[_Access] = field(default_factory=list)
    first_race: RaceError | None = None
    """Kept, because Python swallows what is raised in a destructor; the end of the step raises it again."""

    def step(self, timeline: Hashable, *known: Clock) -> Clock:
        """Advance a timeline by one operation, after `known`; return its clock."""
        clock = self.timelines.setdefault(timeline, {})
        for other in (self.host, *known):
            _join(clock, other)
        clock[timeline] = clock.get(timeline, 0) + 1
        return dict(clock)

    def allocated(self, tensor: Tensor) -> None:
        """Forget earlier accesses to this memory: the allocator has ordered its uses by streams."""
        begin, end = _span(tensor)
        self.accesses = [each for each in self.accesses if each.end <= begin or end <= each.begin]

    def touch(self, timeline: Hashable, tensor: Tensor, what: str, *, is_write: bool) -> None:
        """Record an access by the latest operation of a timeline, and check it against earlier ones.

        Raises:
            RaceError: an earlier one may still run.
        """
        clock = self.timelines[timeline]
        begin, end = _span(tensor)
        kept = []
        for each in self.accesses:
            meets = each.begin < end and begin < each.end
            if meets and (is_write or each.is_write) and clock.get(each.timeline, 0) < each.tick:
                self.first_race = self.first_race or RaceError(
                    f"offload race: {what} is not ordered after: {each.what}"
                )
                raise self.first_race
            # This write comes after them, so a later access need only be compared with this one.
            if not (meets and is_write and begin <= each.begin and each.end <= end):
                kept.append(each)
        self.accesses = [*kept, _Access(what, is_write, timeline, clock[timeline], begin, end)]


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _join(clock: Clock, other: Clock) -> None:
    for timeline, tick in other.items():
        clock[timeline] = max(clock.get(timeline, 0), tick)


class _ClockedEvent:
    """An event with the clock of where it was recorded."""

    def __init__(self, inner: Event, clock: Clock, clocks: Clocks) -> None:
        self.inner, self.clock, self._clocks = inner, clock, clocks

    def done(self) -> bool:
        """Return whether it is complete; if so, this thread knows that."""
        is_done = self.inner.done()
        if is_done:
            _join(self._clocks.host, self.clock)
        return is_done


class CheckedLink:
    """A link that keeps the clocks.

    Args:
        inner: the link that copies.
    """

    def __init__(self, inner: Link) -> None:
        self.inner = inner
        self.clocks = Clocks()
        self.device = inner.device
        self.is_stream_ordered = inner.is_stream_ordered
        self.min_bytes = inner.min_bytes
        self.out_bytes_per_second = inner.out_bytes_per_second
        self.back_bytes_per_second = inner.back_bytes_per_second
        self.latency_seconds = inner.latency_seconds

    def stream(self) -> Hashable:
        """Return the stream that computes now."""
        return self.inner.stream()

    def now(self, stream: Hashable = None) -> Event:
        """Return an event with the stream's clock."""
        clock = self.clocks.step(self.stream() if stream is None else stream)
        return _ClockedEvent(self.inner.now(stream), clock, self.clocks)

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Check and copy: the copy reads the device's bytes and writes the host's."""
        return self._copy("out", copies, after, what)

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Check and copy: the copy reads the host's bytes and writes the device's."""
        return self._copy("back", copies, after, what)

    def wait(self, event: Event, what: str) -> Wait:
        """Join the event's clock to the current stream's."""
        self.clocks.step(self.stream(), _clock(event))
        return self.inner.wait(_inner(event), what)

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        """Join the event's clock to the stream's."""
        self.clocks.step(stream, _clock(event))
        self.inner.before_reuse(_inner(event), stream)

    def record_stream(self, data: Tensor, stream: Hashable) -> None:
        """Pass on to the inner link."""
        self.inner.record_stream(data, stream)

    def synchronize(self, event: Event, what: str) -> None:
        """Join the event's clock to this thread's."""
        self.inner.synchronize(_inner(event), what)
        _join(self.clocks.host, _clock(event))

    def stamp(self) -> Any:
        """Return the inner link's stamp."""
        return self.inner.stamp()

    def seconds_between(self, first: Any, last: Any) -> float | None:
        """Return the inner link's measurement."""
        return self.inner.seconds_between(first, last)

    def close(self) -> None:
        """Close the inner link."""
        self.inner.close()

    def _copy(self, timeline: str, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        clock = self.clocks.step(timeline, *map(_clock, after))
        for source, target in copies:
            self.clocks.touch(timeline, source, f"the copy {timeline} of {what} (read)", is_write=False)
            self.clocks.touch(timeline, target, f"the copy {timeline} of {what} (write)", is_write=True)
        copy = self.inner.send if timeline == "out" else self.inner.fetch
        return _ClockedEvent(copy(copies, [_inner(event) for event in after], what), clock, self.clocks)


def _clock(event: Event) -> Clock:
    return event.clock if isinstance(event, _ClockedEvent) else {}


def _inner(event: Event) -> Event:
    return event.inner if isinstance(event, _ClockedEvent) else event


class CheckedHookContext(HookContext):
    """Hooks that compare what comes back with what was saved."""

    def _pack(self, tensor: Tensor) -> SavedTensorHandle:
        return super()._pack(tensor), _fingerprint(tensor), self._name

    def _unpack(self, handle: SavedTensorHandle) -> Tensor:
        inner, saved, name = handle
        tensor = super()._unpack(inner)
        if isinstance(self._engine, CheckedEngine) and len(inner) != 3:
            self._engine.synchronize(inner[0])
        if saved is not None and (back := _fingerprint(tensor)) != saved:
            raise RaceError(f"a tensor of `{name}` came back as {back}, and was saved as {saved}")
        return tensor


def _fingerprint(tensor: Tensor) -> Hashable:
    """Return size, dtype and a checksum of a tensor's values; waits for the device."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    content = tensor.detach().resolve_neg().resolve_conj().contiguous().cpu().flatten().view(torch.uint8)
    return tuple(tensor.size()), tensor.dtype, hashlib.blake2b(content.numpy().data, digest_size=8).hexdigest()


class CheckedEngine(ActivationEngine):
    """An engine over a `CheckedLink`."""

    context_type = CheckedHookContext
    link: CheckedLink

    def end_step(self) -> StepReport:
        """Close the step, and check that no host memory is left over once no graph is alive.

        Raises:
            RaceError: host memory is left over, or a destructor has found a race.
        """
        report = super().end_step()
        if self.link.clocks.first_race is not None:
            raise self.link.clocks.first_race
        if not self._groups and (left := self.arena.num_blocks):
            raise RaceError(f"{left} blocks of host memory ({self.arena.used_bytes} bytes) belong to no graph any more")
        return report

    def synchronize(self, saved: SavedStorage) -> None:
        """Wait for a storage's copies without joining clocks: this wait must not hide a missing edge."""
        for event in (saved.d2h_event, saved.h2d_event):
            if event is not None:
                self.link.inner.synchronize(_inner(event), "the checker")

    def send(self, group: Group, storages: Sequence[SavedStorage]) -> None:
        """Record that compute has written what is about to leave."""
        for saved in storages:
            if saved.data is not None:
                self.link.clocks.allocated(saved.data)
                self._touch(saved.stream, saved.data, f"computing what {group} saves", is_write=True)
        super().send(group, storages)

    def restore(self, group: Group, saved: SavedStorage) -> Tensor:
        """Record that compute reads what came back."""
        data = super().restore(group, saved)
        self._touch(self.link.stream(), data, f"the backward of {group}", is_write=False)
        return data

    def retire(self, saved: SavedStorage) -> None:
        """Poison the freed host memory: a read that comes too late gets NaN."""
        host = None if saved.block is None else saved.host
        with contextlib.suppress(RaceError):  # this runs in a destructor; the end of the step raises it
            super().retire(saved)
        if host is not None:
            self.synchronize(saved)
            host.flatten().view(torch.uint8).fill_(_POISON)

    def _copy_to_stream(self, saved: SavedStorage, data: Tensor, stream: Hashable) -> Tensor:
        self._touch(stream, data, "taking bytes over from another stream", is_write=False)
        moved = super()._copy_to_stream(saved, data, stream)
        self.link.clocks.allocated(moved)
        return moved

    def _allocate(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        rooms = super()._allocate(hosts)
        for data in rooms:
            data.flatten().view(torch.uint8).fill_(_POISON)
            self.link.clocks.allocated(data)
            self._touch(self.link.stream(), data, "taking device memory", is_write=True)
        return rooms

    def _drop(self, storages: Iterable[SavedStorage]) -> None:
        """Record a write: the allocator may give the memory to the stream's next user, who writes to it."""
        storages = list(storages)
        for saved in storages:
            if saved.data is not None and saved.h2d_event is None:
                self._touch(saved.stream, saved.data, "using memory again that was offloaded", is_write=True)
        super()._drop(storages)

    def _touch(self, stream: Hashable, data: Tensor, what: str, *, is_write: bool) -> None:
        self.link.clocks.step(stream)
        self.link.clocks.touch(stream, data, what, is_write=is_write)
