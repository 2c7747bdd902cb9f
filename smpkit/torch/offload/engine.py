"""Take saved tensors away from the device and bring them back in time.

::

    compute  F0     F1     F2     F3    │ B3   B2   B1   B0
    out        0 ────►1 ────►2 ────►3   │
    back                                │      1 ──► 0 ──►          (a lead of 2: 3 and 2 never left)

A *group* is what one layer needs back at once. Nothing waits for the device but compute for a load (`arrivals.py`) and
an allocator for a copy (`departures.py`); who may touch which bytes when is said by events alone.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.arena import ALIGNMENT, Arena, aligned
from smpkit.torch.offload.hooks import HookContext, SpecCache
from smpkit.torch.offload.link import CopyBatch, Event, Link
from smpkit.torch.offload.prefetch import BackwardOrder, Lead, PrefetchTuner
from smpkit.torch.offload.report import OffloadStats, StepReport
from smpkit.torch.offload.saved_storage import Group, SavedStorage, StorageState

__all__ = ["ActivationEngine", "DeviceToHost", "HostToDevice"]


# --- Device to host: copy saved storages out, and free device and host memory when nothing uses it any more -----------


_log = logging.getLogger("smpkit")

_MIN_HELD: Final = 2
_IN_FLIGHT: Final = StorageState.COPYING | StorageState.LOADING


class DeviceToHost:
    """Copies saved storages to the host, and frees device and host memory when that is safe.

    Args:
        link: the device's.
        arena: where the bytes go.
        order: predicts what backward needs next.
        lead: see `PrefetchTuner`.
        rank: for reports.
    """

    def __init__(self, link: Link, arena: Arena, order: BackwardOrder, lead: Lead, rank: int) -> None:
        self.link = link
        self.arena = arena
        self.order = order
        self.tuner = PrefetchTuner(link, lead)
        self.stats = OffloadStats(rank)
        self.storages: dict[Hashable, SavedStorage] = {}
        """By storage, to know one that is saved again."""
        self.empty = torch.empty(0, device=link.device)
        self._consumed_bytes = 0
        """On the device, of what backward has got and may still use; ours no more."""
        self._copying: deque[weakref.ref[Group]] = deque()
        self._warned = False

    def send(self, group: Group, storages: Sequence[SavedStorage]) -> None:
        """Begin to copy storages of a group to the host; they stay if it has no room, or if they would soon be back.

        Either way they are held from now on.
        """
        sizes = [saved.num_bytes for saved in storages]
        self.stats.hold(sum(sizes))
        if not group.stays_on_device:
            self._copy_to_host(group, storages, sizes)

    def _copy_to_host(self, group: Group, storages: Sequence[SavedStorage], sizes: Sequence[int]) -> None:
        """Begin to copy storages to one block; where there is none so large, half of them after the other."""
        # Each rounded up, as `aligned` does. All here are lists, not generators, which take longer.
        block = self.arena.take(sum([-(-num_bytes // ALIGNMENT) for num_bytes in sizes]) * ALIGNMENT)
        if block is None:
            if len(storages) == 1:
                self._keep_on_device(group, storages[0])
                return
            middle = len(storages) // 2
            self._copy_to_host(group, storages[:middle], sizes[:middle])
            self._copy_to_host(group, storages[middle:], sizes[middle:])
            return
        sources = [saved.data for saved in storages if saved.data is not None]  # all: they are on the device
        targets = block.views_of([saved.spec for saved in storages])
        # Nearly always the current stream alone. Another one may be joined only later than this.
        after = [self.link.now(stream) for stream in {saved.stream for saved in storages}]
        after += block.free_after
        block.num_users, block.last_uses = len(storages), []
        for saved, host in zip(storages, targets, strict=True):
            saved.block, saved.host = block, host  # before the copy, which may fail: they give the block back
        event = self.link.send(CopyBatch(sources, targets), after, group.label)
        copying = StorageState.COPYING
        for saved in storages:
            saved.state, saved.d2h_event = copying, event
        self.stats.bytes_out += sum(sizes)
        self._copying.append(weakref.ref(group))

    def retire(self, saved: SavedStorage) -> None:
        """Retire a storage that no graph needs: free its memory, once no copy uses it any more."""
        if self.storages.get(saved.key) is saved:
            del self.storages[saved.key]
        last = saved.h2d_event or saved.d2h_event
        if saved.state & _IN_FLIGHT and last is not None:
            self.link.before_reuse(last, saved.stream)
        if saved.data is not None:
            saved.version_alias = self.empty  # the copy that is under way, or a user, may have the data
            self.stats.release(saved.num_bytes)
            self._drop((saved,))
        saved.state = StorageState.DEAD
        block = saved.block
        if block is None:
            return
        uses = block.last_uses
        if last is not None and not (uses and uses[-1] is last):  # those of a group come and go with one event
            uses.append(last)
        # Graphs die in any thread: whoever takes the last one away, and nobody else, gives the block back.
        block.num_users = left = block.num_users - 1
        if not left:
            self.arena.free(block, uses)

    def _release_copied(self) -> None:
        """Release device memory whose copy is complete.

        Without a plan, backward may begin any time, and with the latest groups: those are held. On a device that this
        thread runs ahead of, two are held at least, so that their copies have time to end before anyone waits for them.
        """
        held = 0 if self.order.is_planned else self.tuner.lead
        if self.link.is_stream_ordered:
            held = max(held, _MIN_HELD)
        copying = self._copying
        while copying:
            group = copying[0]()
            if group is not None and not group.is_held and self._is_unfinished(group, held):
                return
            copying.popleft()

    def _is_unfinished(self, group: Group, held: int) -> bool:
        return self.order.is_recent(group.index, held) or not self._release_group(group)

    def _release_group(self, group: Group) -> bool:
        """Let go of a group's device memory; return whether that could be done without blocking this thread."""
        copying, host = StorageState.COPYING, StorageState.HOST
        complete: Event | None = None
        released = list[SavedStorage]()
        num_bytes = 0
        is_complete = True
        for saved in group.storages:
            if saved.state != copying:
                continue
            d2h_event = saved.d2h_event
            assert d2h_event is not None
            if d2h_event is not complete:
                if d2h_event.done():
                    complete = d2h_event
                elif self.link.is_stream_ordered:
                    # This thread is ahead of the device: let the allocator's stream wait, or nothing would be free.
                    self.link.before_reuse(d2h_event, saved.stream)
                else:
                    is_complete = False
                    break
            num_bytes += saved.num_bytes
            saved.state = host
            released.append(saved)
        self._drop(released)
        self.stats.release(num_bytes)
        return is_complete

    def _drop(self, storages: Iterable[SavedStorage]) -> None:
        """Let go of device memory; it may be used again by the storages' streams at once."""
        empty = self.empty
        is_shared = self.link.is_stream_ordered
        for saved in storages:
            data, version_alias = saved.data, saved.version_alias
            if is_shared and saved.h2d_event is None and data is not None:
                # Without us its graph would have held it until backward, and the user may have taken it from a stream
                # that counts on that.
                self.link.record_stream(data, saved.stream)
            if version_alias is data:
                version_alias.data = empty
            saved.data = None

    def _count_consumed(self) -> None:
        """Stop counting what the previous layer's backward used."""
        spent, self._consumed_bytes = self._consumed_bytes, 0
        if spent:
            self.stats.release(spent)

    def _keep_on_device(self, group: Group, saved: SavedStorage) -> None:
        """Leave a storage on the device for good, because the host has no room."""
        self.stats.kept_bytes += saved.num_bytes
        if not self._warned:
            self._warned = True
            budget = self.arena.budget_bytes
            _log.warning(
                "host memory for activations is used up (%s): those of %s, and others, stay on the device",
                "the machine has no more" if budget is None else f"{budget} bytes",
                group,
            )


# --- Host to device: load what backward needs a few layers ahead, and wait for it where it is used --------------------


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


# --- Take saved tensors away from the device and bring them back in time ----------------------------------------------


GROUP_BYTES: Final = 64 << 20
_CASTABLE_DTYPES: Final = frozenset({torch.float32, torch.float64})
"""Types that autocast makes narrower ones of."""


class ActivationEngine(HostToDevice):
    """Offloads what is saved inside its scopes.

    Args:
        link: the device's.
        arena: where the bytes go.
        order: predicts what backward needs next.
        lead: how many layers ahead loads are issued; "auto" learns the smallest number without a stall.
        min_bytes: smaller tensors stay; None: what the link thinks worth it.
        rank: for reports.
    """

    context_type: type[HookContext] = HookContext

    def __init__(
        self,
        link: Link,
        arena: Arena,
        order: BackwardOrder | None = None,
        *,
        lead: Lead = "auto",
        min_bytes: int | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__(link, arena, order or BackwardOrder(), lead, rank)
        self.min_bytes = link.min_bytes if min_bytes is None else min_bytes
        self.parameters: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that never leave. Known weakly: what is freed leaves its address to others, which may leave."""
        self.specs = SpecCache()
        self.on_step: Callable[[StepReport], object] | None = None
        self.num_checkpointed_calls = 0
        """How many checkpointed calls there have been."""
        self.num_inputs_of: dict[str, int] = {}
        """How many storages left with the latest call of each name; the next is sent when it has as many."""
        self._microbatch: int | None = None

    # --- what is offloaded -------------------------------------------------------------------------------------------

    def offload_inputs(self, name: str) -> AbstractContextManager[object]:
        """Offload what autograd saves inside, as one group: the inputs of a checkpointed call.

        Does nothing inside another checkpointed call, whose recomputation makes these tensors again.
        """
        self.num_checkpointed_calls += 1
        # What leaves the first time leaves together as later, in one block: that is what `footprint` predicts from.
        return self.context_type(self, name, None, self.num_inputs_of.get(name, sys.maxsize))

    def offload_saved_tensors(self, name: str, group_bytes: int = GROUP_BYTES) -> HookContext:
        """Offload all that autograd saves inside, in groups that end at `next_layer` or when they are large."""
        return self.context_type(self, name, group_bytes)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never offload these tensors (parameters, buffers) or views of them; replaces what was said before."""
        self.parameters, are_wide = {}, False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.parameters[storage._cdata] = weakref.ref(storage)
            are_wide = are_wide or tensor.dtype in _CASTABLE_DTYPES
        self.specs.check_half_precision(may_be_casts=are_wide)

    # --- the life of a step ------------------------------------------------------------------------------------------

    def follow(self, actions: Sequence[Action]) -> None:
        """Take the order in which this step's backwards come from the actions of this rank."""
        self.order.follow(actions)

    def begin_action(self, kind: Kind, segment: int, microbatch: int) -> None:
        """Note that a pipeline's action begins, and load what comes soon."""
        self._microbatch = microbatch
        self.order.begin(kind, segment, microbatch)
        self._current_group = -1
        self._prefetch(())

    def footprint(self) -> list[int]:
        """Return the sizes of the blocks that the graphs take which are alive now, were everything on the host."""
        seen, sizes = set[int](), list[int]()
        for index in sorted(self._groups):
            group = self._live_group(index)
            own = [] if group is None else [saved for saved in group.storages if id(saved) not in seen]
            seen.update(map(id, own))
            sizes.append(sum(aligned(saved.num_bytes) for saved in own))
        return [size for size in sizes if size]

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have host memory for blocks of these sizes, so that none is taken from the system while a step runs."""
        self.arena.reserve(sizes)

    def begin_microbatch(self, microbatch: int) -> None:
        """Note which microbatch runs, where there is no pipeline."""
        self._microbatch = microbatch

    def end_step(self) -> StepReport:
        """Close the accounts of a step; graphs may outlive it."""
        self._microbatch, self._current_group = None, -1
        self.order.end()
        self._count_consumed()
        self._release_copied()
        self._evict_unused()
        self.tuner.end_step()
        report = self.stats.end_step(self.tuner.lead, self.arena.peak_bytes)
        self.arena.reset_peak()
        if self.on_step is not None:
            self.on_step(report)
        return report

    def abandon_step(self) -> None:
        """Forget a step that an exception ended; its graphs give back what they hold when they go."""
        self._microbatch, self._current_group = None, -1
        self.order.end()
        self._count_consumed()
        for index in list(self._prefetched):
            self._evict(index)

    def close(self) -> None:
        """End copies and give host memory back; no graph may need it any more."""
        self.link.close()
        self.arena.close()

    # --- groups, for scopes ------------------------------------------------------------------------------------------

    def new_group(self, name: str) -> Group:
        """Start what the next layer saves."""
        group = Group(self.order.add(), name, self._microbatch, self._drop_group)
        self._groups[group.index] = weakref.ref(group)
        group.stays_on_device = self.order.is_needed_within(self.tuner.lead)
        self._release_copied()
        self.tuner.begin_layer(0)
        self._prefetch(())
        return group
