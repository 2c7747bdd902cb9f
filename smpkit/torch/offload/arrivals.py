"""The way back: what backward needs is loaded a few layers ahead, and waited for where it is used."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.departures import Departures
from smpkit.torch.offload.link import Event, Link
from smpkit.torch.offload.pace import Lead
from smpkit.torch.offload.prefetch import Order
from smpkit.torch.offload.record import Group, Record, State

__all__ = ["Arrivals"]


class Arrivals(Departures):
    """Brings records back to the device. Arguments as of `Departures`."""

    def __init__(self, link: Link, arena: Arena, order: Order, lead: Lead, rank: int) -> None:
        super().__init__(link, arena, order, lead, rank)
        self.on_stall: Callable[[Group, int, int], object] | None = None
        """Called with the beginning and end of a wait that blocked this thread (`time.perf_counter_ns()`)."""
        self._groups: dict[int, weakref.ref[Group]] = {}
        self._ahead: set[int] = set()
        """Groups that were loaded, and that backward has not come to."""
        self._using: weakref.ref[Group] | None = None

    def bring(self, group: Group, record: Record) -> Tensor:
        """Return the bytes of a record on the device, in the order of the current stream."""
        if self._using is None or self._using() is not group:
            self._use(group)
        if record.data is None:
            self._load(group)
        assert record.data is not None
        if record.load is not None:
            self._await(group, record)
            if record.stream != (stream := self.link.stream()):
                self._move(record, record.data, stream)
        return record.data

    def let_go(self, record: Record) -> None:
        """Drop the device copy after backward has asked for it as often as it was saved."""
        record.pending = record.handles  # in case that the graph is kept and backward comes again
        if record.block is None:
            return  # it never left, and has no other copy
        if record.state == State.COPYING:
            assert record.out is not None
            self.link.before_reuse(record.out, record.stream)
        self._drop(record)
        record.enter(State.HOST)

    def _use(self, group: Group) -> None:
        """Come to a group in backward: load it and those after it."""
        self._using = weakref.ref(group)
        self.order.use(group.index)
        self._ahead.discard(group.index)
        self._poll()
        self.pace.note(group.num_bytes)
        self._prefetch((group.index,))

    def _prefetch(self, now: tuple[int, ...]) -> None:
        """Issue the loads of what is needed now and of what is needed soon, and take back those of a wrong guess."""
        soon = self.order.upcoming(self.pace.lead)
        for index in self._ahead.difference(soon) if len(self._ahead) >= self.pace.lead else ():
            self._evict(index)
        for index in (*now, *soon):
            group = self._alive(index)
            if group is not None and self._load(group) and index not in now:
                self._ahead.add(index)

    def _load(self, group: Group) -> bool:
        """Issue one copy for all that a group lacks on the device; return whether there was any."""
        group.is_pinned = True
        absent = [record for record in group.needs if record.data is None]
        if not absent:
            return False
        # Nothing is noted before all of it is there: a device that is out of memory must leave records as they were.
        rooms = [self._room(record.num_bytes) for record in absent]
        copies: list[tuple[Tensor, Tensor]] = []
        after: list[Event] = []
        for record, room in zip(absent, rooms, strict=True):
            assert record.block is not None
            assert record.out is not None
            copies.append((record.block.bytes, room))
            if after[-1:] != [record.out]:  # those of a group left together, with one event
                after.append(record.out)
        after.append(self.link.now())  # only now is all of it allocated, and what used that memory before is behind it
        event, stream = self.link.fetch(copies, after, str(group)), self.link.stream()
        for record, room in zip(absent, rooms, strict=True):
            record.data, record.load, record.stream = room, event, stream
            record.enter(State.LOADING)
            self.ledger.restored(room.untyped_storage(), record.num_bytes)
        self.ledger.bytes_back += sum([record.num_bytes for record in absent])
        return True

    def _room(self, num_bytes: int) -> Tensor:
        """Return device memory of the current stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.link.device)

    def _await(self, group: Group, record: Record) -> None:
        """Let the current stream, whichever it is, go on after the load."""
        assert record.load is not None
        if not record.load.done():
            start_ns = time.perf_counter_ns()
            wait = self.link.wait(record.load, str(group))
            if self.on_stall is not None and not self.link.is_stream_ordered:
                self.on_stall(group, start_ns, time.perf_counter_ns())
            self.ledger.waited(group.name, group.microbatch, wait)
            self.pace.waited(wait)
        if record.state == State.LOADING:
            record.enter(State.LIVE)

    def _move(self, record: Record, data: Tensor, stream: Hashable) -> None:
        """Give the current stream bytes of its own: the allocator of the one that loaded them knows nothing of it."""
        record.data = data.clone()
        self.link.before_reuse(self.link.now(), record.stream)
        record.stream = stream
        self.ledger.restored(record.data.untyped_storage(), record.num_bytes)

    def _evict(self, index: int) -> None:
        """Drop what was loaded and not used."""
        self._ahead.discard(index)
        group = self._alive(index)
        for record in group.needs if group is not None else ():
            if record.load is not None and record.data is not None:
                self.link.before_reuse(record.load, record.stream)
                self._drop(record)
                record.enter(State.HOST)

    def _forget(self, index: int) -> None:
        self._groups.pop(index, None)
        self._ahead.discard(index)
        self.order.drop(index)

    def _alive(self, index: int) -> Group | None:
        found = self._groups.get(index)
        return None if found is None else found()
