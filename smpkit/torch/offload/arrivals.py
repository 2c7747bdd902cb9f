"""The way back: what backward needs is loaded a few layers ahead, and waited for where it is used."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable
from typing import Final

import torch
from torch import Tensor

from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.departures import Departures
from smpkit.torch.offload.link import Copies, Event, Link
from smpkit.torch.offload.pace import Lead
from smpkit.torch.offload.prefetch import Order
from smpkit.torch.offload.record import Group, Record, State

__all__ = ["Arrivals"]

_NONE: Final = -1


class Arrivals(Departures):
    """Brings records back to the device. Arguments as of `Departures`."""

    def __init__(self, link: Link, arena: Arena, order: Order, lead: Lead, rank: int) -> None:
        super().__init__(link, arena, order, lead, rank)
        self.on_stall: Callable[[Group, int, int], object] | None = None
        """Called with the beginning and end of a wait that blocked this thread (`time.perf_counter_ns()`)."""
        self._device = link.device
        self._groups: dict[int, weakref.ref[Group]] = {}
        self._ahead: set[int] = set()
        """Groups that were loaded, and that backward has not come to."""
        self._unused: frozenset[int] = frozenset()
        """Those that were in `_ahead` when the step before this one ended."""
        self._using = _NONE
        """The group that backward is at."""
        self._awaited: tuple[Event | None, Hashable] = (None, None)
        """The latest load that a stream was made to wait for, and that stream."""

    def bring(self, group: Group, record: Record) -> Tensor:
        """Return the bytes of a record on the device, in the order of the current stream."""
        if self._using != group.index:
            self._use(group)
        data = record.data
        if data is None:
            self._load(group)
            data = record.data
            assert data is not None
        load = record.load
        if load is None:
            record.part(self.nothing)  # autograd hands on what it gets, so that must stay whole
            return data
        stream = self.link.stream()
        awaited, by = self._awaited
        if load is not awaited or stream != by:  # what is loaded together is waited for once
            if not load.done():
                self._await(group, load)
            self._awaited = (load, stream)
        record.state = State.LIVE
        return data if record.stream == stream else self._move(record, data, stream)

    def let_go(self, record: Record) -> None:
        """Drop the device copy after backward has asked for it as often as it was saved."""
        record.pending = record.handles  # in case that the graph is kept and backward comes again
        if record.block is None:
            return  # it never left, and has no other copy
        self._spent_bytes += record.num_bytes
        if record.state == State.COPYING:
            assert record.out is not None
            self.link.before_reuse(record.out, record.stream)
        self._drop((record,))
        record.state = State.HOST

    def _use(self, group: Group) -> None:
        """Come to a group in backward: load it and those after it."""
        self._using = group.index
        self.order.use(group.index)
        self._ahead.discard(group.index)
        self._poll()
        self.pace.note(group.num_bytes)
        self._prefetch((group.index,))

    def _prefetch(self, now: tuple[int, ...]) -> None:
        """Issue the loads of what is needed now and of what is needed soon, and take back those of a wrong guess."""
        self._count_out()
        soon = self.order.upcoming(self.pace.lead)
        if not (now or soon or self._ahead):
            return
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
        rooms = [self._room(record) for record in absent]
        hosts, after = list[Tensor](), list[Event]()
        last: Event | None = None
        num_bytes = 0
        for record in absent:
            host, out = record.host, record.out
            assert host is not None
            assert out is not None
            hosts.append(host)
            num_bytes += record.num_bytes
            if out is not last:  # those of a group left together, with one event
                last = out
                after.append(out)
        after.append(self.link.now())  # only now is all of it allocated, and what used that memory before is behind it
        event, stream = self.link.fetch(Copies(hosts, rooms), after, group.what), self.link.stream()
        on_host, loading = State.HOST, State.LOADING
        self.ledger.hold(num_bytes)
        self.ledger.bytes_back += num_bytes
        for record, room in zip(absent, rooms, strict=True):
            assert record.state == on_host
            record.state, record.data, record.load, record.stream = loading, room, event, stream
        return True

    def _room(self, record: Record) -> Tensor:
        """Return device memory of the current stream."""
        assert record.host is not None
        return torch.empty_like(record.host, device=self._device)

    def _await(self, group: Group, load: Event) -> None:
        """Let the current stream, whichever it is, go on after the load."""
        start_ns = time.perf_counter_ns()
        wait = self.link.wait(load, group.what)
        if self.on_stall is not None and not self.link.is_stream_ordered:
            self.on_stall(group, start_ns, time.perf_counter_ns())
        self.ledger.waited(group.name, group.microbatch, wait)
        self.pace.waited(wait)

    def _move(self, record: Record, data: Tensor, stream: Hashable) -> Tensor:
        """Give the current stream bytes of its own: the allocator of the one that loaded them knows nothing of it."""
        moved = record.data = data.clone()
        self.link.before_reuse(self.link.now(), record.stream)
        record.stream = stream
        self.ledger.hold(record.num_bytes)
        self.ledger.let_go(record.num_bytes)
        return moved

    def _evict_unused(self) -> None:
        """Take back what was loaded for backward a whole step ago: nothing else would, for as long as its graph lives.

        Not at once: loops that run backward a step behind forward are about to use it.
        """
        for index in self._unused.intersection(self._ahead):
            self._evict(index)
        self._unused = frozenset(self._ahead)

    def _evict(self, index: int) -> None:
        """Drop what was loaded and not used."""
        self._ahead.discard(index)
        group = self._alive(index)
        for record in group.needs if group is not None else ():
            if record.load is not None and record.data is not None:
                self.link.before_reuse(record.load, record.stream)
                self.ledger.let_go(record.num_bytes)
                self._drop((record,))
                record.enter(State.HOST)

    def _forget(self, group: Group) -> None:
        """Let go of what no other group needs."""
        for record in group.needs:
            record.num_groups -= 1
            if not record.num_groups:
                self.bury(record)
        index = group.index
        self._groups.pop(index, None)
        self._ahead.discard(index)
        self.order.drop(index)

    def _alive(self, index: int) -> Group | None:
        found = self._groups.get(index)
        return None if found is None else found()
