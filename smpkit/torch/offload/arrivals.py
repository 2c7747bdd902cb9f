"""Host to device: load what backward needs a few layers ahead, and wait for it where it is used."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable
from typing import Final

import torch
from torch import Tensor

from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.departures import DeviceToHost
from smpkit.torch.offload.link import CopyBatch, Event, Link
from smpkit.torch.offload.pace import Lead
from smpkit.torch.offload.prefetch import BackwardOrder
from smpkit.torch.offload.record import Group, SavedStorage, StorageState

__all__ = ["HostToDevice"]

_NONE: Final = -1


class HostToDevice(DeviceToHost):
    """Loads saved storages to the device. Arguments as of `DeviceToHost`."""

    def __init__(self, link: Link, arena: Arena, order: BackwardOrder, lead: Lead, rank: int) -> None:
        super().__init__(link, arena, order, lead, rank)
        self.on_stall: Callable[[Group, int, int], object] | None = None
        """Called with the beginning and end of a wait that blocked this thread (`time.perf_counter_ns()`)."""
        self._device = link.device
        self._groups: dict[int, weakref.ref[Group]] = {}
        self._prefetched: set[int] = set()
        """Groups that were loaded, and that backward has not come to."""
        self._stale: frozenset[int] = frozenset()
        """Those that were in `_prefetched` when the step before this one ended."""
        self._current_group = _NONE
        """The group that backward is at."""
        self._last_wait: tuple[Event | None, Hashable] = (None, None)
        """The latest load that a stream was made to wait for, and that stream."""

    def restore(self, group: Group, saved: SavedStorage) -> Tensor:
        """Return the bytes of a storage on the device, in the order of the current stream."""
        if self._current_group != group.index:
            self._enter_group(group)
        data = saved.data
        if data is None:
            self._load(group)
            data = saved.data
            assert data is not None
        h2d_event = saved.h2d_event
        if h2d_event is None:
            saved.detach_version_alias(self.empty)  # autograd hands on what it gets, so that must stay whole
            return data
        stream = self.link.stream()
        awaited, by = self._last_wait
        if h2d_event is not awaited or stream != by:  # what is loaded together is waited for once
            if not h2d_event.done():
                self._await(group, h2d_event)
            self._last_wait = (h2d_event, stream)
        saved.state = StorageState.LIVE
        return data if saved.stream == stream else self._copy_to_stream(saved, data, stream)

    def release(self, saved: SavedStorage) -> None:
        """Drop the device copy after backward has asked for it as often as it was saved."""
        saved.num_pending = saved.num_handles  # in case that the graph is kept and backward comes again
        if saved.block is None:
            return  # it never left, and has no other copy
        self._consumed_bytes += saved.num_bytes
        if saved.state == StorageState.COPYING:
            assert saved.d2h_event is not None
            self.link.before_reuse(saved.d2h_event, saved.stream)
        self._drop((saved,))
        saved.state = StorageState.HOST

    def _enter_group(self, group: Group) -> None:
        """Begin the backward of a group: load it and prefetch those after it."""
        self._current_group = group.index
        self.order.begin_backward(group.index)
        self._prefetched.discard(group.index)
        self._release_copied()
        self.tuner.begin_layer(group.num_bytes)
        self._prefetch((group.index,))

    def _prefetch(self, now: tuple[int, ...]) -> None:
        """Issue the loads of what is needed now and of what is needed soon, and take back those of a wrong guess."""
        self._count_consumed()
        soon = self.order.upcoming(self.tuner.lead)
        if not (now or soon or self._prefetched):
            return
        for index in self._prefetched.difference(soon) if len(self._prefetched) >= self.tuner.lead else ():
            self._evict(index)
        for index in (*now, *soon):
            group = self._live_group(index)
            if group is not None and self._load(group) and index not in now:
                self._prefetched.add(index)

    def _load(self, group: Group) -> bool:
        """Issue one copy for all that a group lacks on the device; return whether there was any."""
        group.is_held = True
        absent = [saved for saved in group.storages if saved.data is None]
        if not absent:
            return False
        # Nothing is noted before all of it is there: a device that is out of memory must leave storages as they were.
        rooms = [self._allocate(saved) for saved in absent]
        hosts, after = list[Tensor](), list[Event]()
        last: Event | None = None
        num_bytes = 0
        for saved in absent:
            host, d2h_event = saved.host, saved.d2h_event
            assert host is not None
            assert d2h_event is not None
            hosts.append(host)
            num_bytes += saved.num_bytes
            if d2h_event is not last:  # those of a group left together, with one event
                last = d2h_event
                after.append(d2h_event)
        after.append(self.link.now())  # only now is all of it allocated, and what used that memory before is behind it
        event, stream = self.link.fetch(CopyBatch(hosts, rooms), after, group.label), self.link.stream()
        on_host, loading = StorageState.HOST, StorageState.LOADING
        self.stats.hold(num_bytes)
        self.stats.bytes_back += num_bytes
        for saved, room in zip(absent, rooms, strict=True):
            assert saved.state == on_host
            saved.state, saved.data, saved.h2d_event, saved.stream = loading, room, event, stream
        return True

    def _allocate(self, saved: SavedStorage) -> Tensor:
        """Return device memory of the current stream."""
        assert saved.host is not None
        return torch.empty_like(saved.host, device=self._device)

    def _await(self, group: Group, h2d_event: Event) -> None:
        """Let the current stream, whichever it is, go on after the load."""
        start_ns = time.perf_counter_ns()
        wait = self.link.wait(h2d_event, group.label)
        if self.on_stall is not None and not self.link.is_stream_ordered:
            self.on_stall(group, start_ns, time.perf_counter_ns())
        self.stats.add_wait(group.name, group.microbatch, wait)
        self.tuner.add_wait(wait)

    def _copy_to_stream(self, saved: SavedStorage, data: Tensor, stream: Hashable) -> Tensor:
        """Give the current stream bytes of its own: the allocator of the one that loaded them knows nothing of it."""
        moved = saved.data = data.clone()
        self.link.before_reuse(self.link.now(), saved.stream)
        saved.stream = stream
        self.stats.hold(saved.num_bytes)
        self.stats.release(saved.num_bytes)
        return moved

    def _evict_unused(self) -> None:
        """Take back what was loaded for backward a whole step ago: nothing else would, for as long as its graph lives.

        Not at once: loops that run backward a step behind forward are about to use it.
        """
        for index in self._stale.intersection(self._prefetched):
            self._evict(index)
        self._stale = frozenset(self._prefetched)

    def _evict(self, index: int) -> None:
        """Drop what was loaded and not used."""
        self._prefetched.discard(index)
        group = self._live_group(index)
        for saved in group.storages if group is not None else ():
            if saved.h2d_event is not None and saved.data is not None:
                self.link.before_reuse(saved.h2d_event, saved.stream)
                self.stats.release(saved.num_bytes)
                self._drop((saved,))
                saved.enter(StorageState.HOST)

    def _drop_group(self, group: Group) -> None:
        """Let go of what no other group needs."""
        for saved in group.storages:
            saved.num_groups -= 1
            if not saved.num_groups:
                self.retire(saved)
        index = group.index
        self._groups.pop(index, None)
        self._prefetched.discard(index)
        self.order.drop(index)

    def _live_group(self, index: int) -> Group | None:
        found = self._groups.get(index)
        return None if found is None else found()
