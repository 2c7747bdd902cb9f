"""Take saved tensors away from the device and bring them back in time.

::

    compute  F0     F1     F2     F3    │ B3   B2   B1   B0
    out        0 ────►1 ────►2 ────►3   │
    back                                │      1 ──► 0 ──►          (a lead of 2: 3 and 2 never left)

A *group* is what one layer needs back at once. The hooks (`hooks.py`) hand over each group when its layer has saved
enough (`send`) and ask for each storage when backward needs it (`restore`). `BackwardOrder` predicts which groups come
next, and `PrefetchTuner` how many of them must be under way.

Nothing waits for the device but compute for a load, and an allocator for a copy. Who may touch which bytes when is said
by events alone.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.core.offload_hooks import Offloader, OffloadUse
from smpkit.torch.offload.arena import ALIGNMENT, Arena, aligned, make_arena
from smpkit.torch.offload.hooks import HookContext, SpecCache
from smpkit.torch.offload.link import CopyBatch, Event, Link, link_for
from smpkit.torch.offload.prefetch import BackwardOrder, Lead, PrefetchTuner
from smpkit.torch.offload.report import OffloadStats, StepReport
from smpkit.torch.offload.saved_storage import BACK, COPYING, DEAD, HOST, LIVE, LOADING, Group, SavedStorage

__all__ = ["DEBUG", "GROUP_BYTES", "ActivationEngine", "make_engine"]

_log = logging.getLogger("smpkit")

GROUP_BYTES: Final = 64 << 20
_MIN_HELD: Final = 2
_NO_GROUP: Final = -1
_IN_FLIGHT: Final = COPYING | LOADING
_LOADED: Final = LOADING | BACK
_CASTABLE_DTYPES: Final = frozenset({torch.float32, torch.float64})
"""Types that autocast casts to narrower ones."""
DEBUG: Final = "SMPKIT_OFFLOAD_DEBUG"
"""`1`: check the order of all accesses, poison what is free, compare what comes back. Slow."""


class _ReuseWait:
    """How long compute waited for a copy whose memory it was about to reuse."""

    __slots__ = ("_link", "stamps")

    def __init__(self, link: Link, first: Any, last: Any) -> None:
        self._link, self.stamps = link, (first, last)

    @property
    def seconds(self) -> float | None:
        """The time; None if the device has not reached the wait yet."""
        return self._link.seconds_between(*self.stamps)


class ActivationEngine(Offloader):
    """Offloads what autograd saves inside its contexts.

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
        self.link = link
        self.arena = arena
        self.order = order or BackwardOrder()
        self.tuner = PrefetchTuner(link, lead)
        self.stats = OffloadStats(rank)
        self.min_bytes = link.min_bytes if min_bytes is None else min_bytes
        self.specs = SpecCache()
        self.empty = torch.empty(0, device=link.device)
        self.storages: dict[Hashable, SavedStorage] = {}
        """By storage, to recognise one that is saved again."""
        self.parameters: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that never leave. Weak references: when one is freed, another tensor may get its address."""
        self.num_checkpointed_calls = 0
        """How many checkpointed calls there have been."""
        self.num_inputs_of: dict[str, int] = {}
        """How many storages left with the latest call of each name; the next is sent when it has as many."""
        self.on_step: Callable[[StepReport], object] | None = None
        self.on_stall: Callable[[Group, Any, Any], object] | None = None
        """Called with the beginning and end of each wait: stamps of the device, or where it blocked this thread, of
        `time.perf_counter_ns()`."""
        self._device = link.device
        self._microbatch: int | None = None
        self._groups: dict[int, weakref.ref[Group]] = {}
        self._current_group = _NO_GROUP
        """The group whose backward runs."""
        self._copying: deque[weakref.ref[Group]] = deque()
        """Groups sent whose device memory is not released yet, oldest first."""
        self._consumed_bytes = 0
        """Handed to backward, which may still use them: no longer ours, and still on the device."""
        self._prefetched: set[int] = set()
        """Groups that were loaded, and that backward has not come to."""
        self._stale: frozenset[int] = frozenset()
        """Those that were in `_prefetched` when the step before this one ended."""
        self._last_wait: tuple[Event | None, Hashable] = (None, None)
        """The latest load that a stream was made to wait for, and that stream."""
        self._warned = False

    # --- what is offloaded -------------------------------------------------------------------------------------------

    def offload_inputs(self, name: str) -> AbstractContextManager[object]:
        """Offload what autograd saves inside, as one group: the inputs of a checkpointed call.

        Does nothing inside another checkpointed call, whose recomputation makes these tensors again.
        """
        self.num_checkpointed_calls += 1
        # The first call does not know how many inputs there are. Send them all at its end, in one block: `footprint`
        # measures the first microbatch, and later ones must need the same blocks.
        return self.context_type(self, name, None, self.num_inputs_of.get(name, sys.maxsize))

    def offload_saved_tensors(self, name: str, group_bytes: int = GROUP_BYTES) -> HookContext:
        """Offload all that autograd saves inside, in groups that end at `next_layer` or when they are large."""
        return self.context_type(self, name, group_bytes)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never offload these tensors (parameters, buffers) or views of them; replaces the previous set."""
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
        """Note that a pipeline's action begins, and load what is needed soon."""
        self._microbatch = microbatch
        self.order.begin(kind, segment, microbatch)
        self._current_group = _NO_GROUP
        self._prefetch(())

    def begin_microbatch(self, microbatch: int) -> None:
        """Note which microbatch runs, where there is no pipeline."""
        self._microbatch = microbatch

    def footprint(self) -> list[int]:
        """Return the sizes of the blocks that the live graphs would take if all their groups were on the host."""
        seen, sizes = set[int](), list[int]()
        for index in sorted(self._groups):
            group = self._live_group(index)
            own = [] if group is None else [saved for saved in group.storages if id(saved) not in seen]
            seen.update(map(id, own))
            sizes.append(sum(aligned(saved.num_bytes) for saved in own))
        return [size for size in sizes if size]

    def reserve(self, sizes: Sequence[int]) -> None:
        """Take host memory for blocks of these sizes now, so that no step has to ask the system for it."""
        self.arena.reserve(sizes)

    def use(self) -> OffloadUse:
        """Return what is held now, and was moved since the step began."""
        arena, stats = self.arena, self.stats
        stats.hold(0)
        arena.collect()
        return OffloadUse(stats.device_bytes, arena.used_bytes, arena.mapped_bytes, stats.bytes_out, stats.bytes_back)

    def end_step(self) -> StepReport:
        """Close the step's statistics; graphs may outlive it."""
        self._microbatch, self._current_group = None, _NO_GROUP
        self.order.end()
        self._count_consumed()
        self._release_copied()
        # Free what was loaded a whole step ago and never used: nothing else would, for as long as its graph lives.
        # Not at the end of the same step, because loops that run backward a step behind forward are about to use it.
        for index in self._stale.intersection(self._prefetched):
            self._evict(index)
        self._stale = frozenset(self._prefetched)
        self.tuner.end_step()
        report = self.stats.end_step(self.tuner.lead, self.arena.peak_bytes)
        self.arena.reset_peak()
        if self.on_step is not None:
            self.on_step(report)
        return report

    def abandon_step(self) -> None:
        """Forget a step that an exception ended; its graphs give back what they hold when they go."""
        self._microbatch, self._current_group = None, _NO_GROUP
        self.order.end()
        self._count_consumed()
        for index in list(self._prefetched):
            self._evict(index)

    def close(self) -> None:
        """End copies and give host memory back; no graph may need it any more."""
        self.link.close()
        self.arena.close()

    # --- forward: from the device to the host ------------------------------------------------------------------------

    def new_group(self, name: str) -> Group:
        """Begin the group of what the next layer saves."""
        group = Group(self.order.add(), name, self._microbatch, self._drop_group)
        self._groups[group.index] = weakref.ref(group)
        group.stays_on_device = self.order.is_needed_within(self.tuner.lead)
        self._release_copied()
        self.tuner.begin_layer(0)
        self._prefetch(())
        return group

    def send(self, group: Group, storages: Sequence[SavedStorage]) -> None:
        """Begin to copy storages of a group to the host; they stay if it has no room, or if they would soon be back.

        From now on the statistics count them as held on the device.
        """
        sizes = [saved.num_bytes for saved in storages]
        self.stats.hold(sum(sizes))
        if not group.stays_on_device:
            self._copy_to_host(group, storages, sizes)

    def _copy_to_host(self, group: Group, storages: Sequence[SavedStorage], sizes: Sequence[int]) -> None:
        """Begin to copy storages to one block; without a block that large, each half to one of its own."""
        # Each rounded up, as `aligned` does. Lists, not generators, which take longer: this runs for every layer.
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
        # The copy must come after what computes the sources, on whichever streams those run (nearly always the current
        # one alone), and after the last users of the block's bytes.
        after = [self.link.now(stream) for stream in {saved.stream for saved in storages}]
        after += block.free_after
        block.num_users, block.last_uses = len(storages), []
        for saved, host in zip(storages, targets, strict=True):
            assert saved.state == LIVE
            # Before the copy, which may fail: then `retire` returns the block all the same.
            saved.block, saved.host = block, host
        event = self.link.send(CopyBatch(sources, targets), after, group.label)
        for saved in storages:
            saved.state, saved.d2h_event = COPYING, event
        self.stats.bytes_out += sum(sizes)
        self._copying.append(weakref.ref(group))

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

    def _release_copied(self) -> None:
        """Release device memory whose copy is complete, oldest group first."""
        # Without a plan, backward may begin any time, and with the latest groups: hold those. If this thread runs ahead
        # of the device, hold at least two, so that their copies have time to end before the allocator waits for them.
        held = 0 if self.order.is_planned else self.tuner.lead
        if self.link.is_stream_ordered:
            held = max(held, _MIN_HELD)
        copying = self._copying
        while copying:
            group = copying[0]()
            # Backward has a held group already, and a dead one needs nothing: neither stops the ones after it.
            if group is not None and not group.is_held:
                is_finished = not self.order.is_recent(group.index, held) and self._release_group(group)
                if not is_finished:
                    return
            copying.popleft()

    def _release_group(self, group: Group) -> bool:
        """Release a group's device memory; return False if that would have blocked this thread."""
        complete: Event | None = None
        awaited: tuple[Event | None, Hashable] = (None, None)
        released = list[SavedStorage]()
        num_bytes = 0
        is_complete = True
        for saved in group.storages:
            if saved.state != COPYING:
                continue
            d2h_event = saved.d2h_event
            assert d2h_event is not None
            if d2h_event is not complete:
                if d2h_event.done():
                    complete = d2h_event
                elif self.link.is_stream_ordered:
                    # This thread is ahead of the device: let the allocator's stream wait, or nothing would be free.
                    if awaited != (d2h_event, saved.stream):
                        self._before_reuse(group, d2h_event, saved.stream)
                        awaited = (d2h_event, saved.stream)
                else:
                    is_complete = False
                    break
            num_bytes += saved.num_bytes
            released.append(saved)
        for saved in released:  # only now: had a wait above failed, all of them would still be on the device
            saved.state = HOST
        self._drop(released)
        self.stats.release(num_bytes)
        return is_complete

    # --- backward: from the host to the device -----------------------------------------------------------------------

    def restore(self, group: Group, saved: SavedStorage) -> Tensor:
        """Return the bytes of a storage on the device; the current stream may use them at once."""
        if self._current_group != group.index:
            self._enter_group(group)
        data = saved.data
        if data is None:
            self._load(group)
            data = saved.data
            assert data is not None
        h2d_event = saved.h2d_event
        if h2d_event is None:
            # It never left. Autograd hands `data` on, and it must not be emptied when the version alias is.
            saved.detach_version_alias(self.empty)
            return data
        stream = self.link.stream()
        awaited, by = self._last_wait
        if h2d_event is not awaited or stream != by:  # one wait for all storages that were loaded together
            if not h2d_event.done():
                self._await(group, h2d_event)
            self._last_wait = (h2d_event, stream)
        if saved.state == LOADING:  # not if it was handed out before
            saved.state = BACK
        return data if saved.stream == stream else self._copy_to_stream(saved, data, stream)

    def release(self, group: Group, saved: SavedStorage) -> None:
        """Drop the device copy after backward has asked for it as often as it was saved."""
        saved.num_pending = saved.num_handles  # `retain_graph`: backward may come again
        state = saved.state
        if state == LIVE:
            return  # it never left, and has no other copy
        self._consumed_bytes += saved.num_bytes
        if state == COPYING:
            assert saved.d2h_event is not None
            self._before_reuse(group, saved.d2h_event, saved.stream)
        else:
            assert state == BACK
        self._drop((saved,))
        saved.state = HOST

    def _enter_group(self, group: Group) -> None:
        """Begin the backward of a group: load it and prefetch those after it."""
        self._current_group = group.index
        self.order.begin_backward(group.index)
        self._prefetched.discard(group.index)
        self._release_copied()
        self.tuner.begin_layer(group.num_bytes)
        self._prefetch((group.index,))

    def _prefetch(self, now: tuple[int, ...]) -> None:
        """Issue the loads of what is needed now and soon, and evict what was loaded on a wrong prediction."""
        self._count_consumed()
        soon = self.order.upcoming(self.tuner.lead)
        if not (now or soon or self._prefetched):
            return
        if len(self._prefetched) >= self.tuner.lead:
            for index in self._prefetched.difference(soon):
                self._evict(index)
        for index in (*now, *soon):
            group = self._live_group(index)
            if group is not None and self._load(group) and index not in now:
                self._prefetched.add(index)

    def _load(self, group: Group) -> bool:
        """Issue one copy for all that a group lacks on the device; return whether there was any."""
        group.is_held = True
        absent = [saved for saved in group.storages if saved.state == HOST]
        if not absent:
            return False
        hosts, after = list[Tensor](), list[Event]()
        last: Event | None = None
        num_bytes = 0
        for saved in absent:
            host, d2h_event = saved.host, saved.d2h_event
            assert host is not None
            assert d2h_event is not None
            hosts.append(host)
            num_bytes += saved.num_bytes
            if d2h_event is not last:  # the storages of a group usually left in one copy and share its event
                last = d2h_event
                after.append(d2h_event)
        rooms = self._allocate(hosts)  # before any state changes: the device may be out of memory
        # Recorded after the last allocation: the allocator hands out memory that work already queued on this stream may
        # still use, and the copy must come after that work.
        after.append(self.link.now())
        event, stream = self.link.fetch(CopyBatch(hosts, rooms), after, group.label), self.link.stream()
        self.stats.hold(num_bytes)
        self.stats.bytes_back += num_bytes
        for saved, room in zip(absent, rooms, strict=True):
            saved.state, saved.data, saved.h2d_event, saved.stream = LOADING, room, event, stream
        return True

    def _allocate(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """Return device memory of the current stream for what is on the host."""
        like, device = torch.empty_like, self._device
        return [like(host, device=device) for host in hosts]

    def _await(self, group: Group, h2d_event: Event) -> None:
        """Make the current stream wait for the load."""
        start_ns = time.perf_counter_ns()
        wait = self.link.wait(h2d_event, group.label)
        if self.on_stall is not None:
            self.on_stall(group, *(wait.stamps or (start_ns, time.perf_counter_ns())))
        self.stats.add_wait(group.name, group.microbatch, wait)
        self.tuner.add_wait(wait)

    def _copy_to_stream(self, saved: SavedStorage, data: Tensor, stream: Hashable) -> Tensor:
        """Return a copy in memory of the current stream.

        The allocator of the stream that loaded the bytes does not know that this one reads them, and would give the
        memory to others too early.
        """
        moved = saved.data = data.clone()
        self.link.before_reuse(self.link.now(), saved.stream)
        saved.stream = stream
        self.stats.hold(saved.num_bytes)
        self.stats.release(saved.num_bytes)
        return moved

    def _evict(self, index: int) -> None:
        """Drop what was loaded and not used."""
        self._prefetched.discard(index)
        group = self._live_group(index)
        if group is None:
            return
        for saved in group.storages:
            if saved.state & _LOADED:
                assert saved.h2d_event is not None
                self.link.before_reuse(saved.h2d_event, saved.stream)
                self.stats.release(saved.num_bytes)
                self._drop((saved,))
                saved.state = HOST

    # --- freeing -----------------------------------------------------------------------------------------------------

    def retire(self, saved: SavedStorage) -> None:
        """Free all memory of a storage that no graph needs, once no copy uses it; runs in destructors."""
        if self.storages.get(saved.key) is saved:
            del self.storages[saved.key]
        last = saved.h2d_event or saved.d2h_event
        state = saved.state
        assert state != DEAD
        if state & _IN_FLIGHT and last is not None:
            self.link.before_reuse(last, saved.stream)
        if saved.data is not None:
            saved.version_alias = self.empty  # so that `_drop` does not empty data that a copy or a user still has
            self.stats.release(saved.num_bytes)
            self._drop((saved,))
        saved.state = DEAD
        block = saved.block
        if block is None:
            return
        uses = block.last_uses
        if last is not None and not (uses and uses[-1] is last):  # storages copied together share one event
            uses.append(last)
        # Graphs die in any thread: only the thread that counts down to zero may give the block back.
        block.num_users = left = block.num_users - 1
        if not left:
            self.arena.free(block, uses)

    def _drop(self, storages: Iterable[SavedStorage]) -> None:
        """Let go of device memory; the storages' streams may use it again at once."""
        empty = self.empty
        is_shared = self.link.is_stream_ordered
        for saved in storages:
            data, version_alias = saved.data, saved.version_alias
            if is_shared and saved.h2d_event is None and data is not None:
                # The user's own tensor. Without offloading, its graph would have kept it until backward; the user may
                # have allocated it on another stream and rely on that.
                self.link.record_stream(data, saved.stream)
            if version_alias is data:
                version_alias.data = empty
            saved.data = None

    def _before_reuse(self, group: Group, event: Event, stream: Hashable) -> None:
        """Let memory be reused after a copy; if that makes compute wait, it is a stall, and measured."""
        link = self.link
        if not link.is_stream_ordered or stream != link.stream():
            link.before_reuse(event, stream)
            return
        first = link.stamp()
        link.before_reuse(event, stream)
        wait = _ReuseWait(link, first, link.stamp())
        self.stats.add_wait(group.name, group.microbatch, wait)
        if self.on_stall is not None:
            self.on_stall(group, *wait.stamps)

    def _drop_group(self, group: Group) -> None:
        """Retire what no other group needs; called by the group's destructor."""
        for saved in group.storages:
            saved.num_groups -= 1
            if not saved.num_groups:
                self.retire(saved)
        index = group.index
        self._groups.pop(index, None)
        self._prefetched.discard(index)
        self.order.drop(index)

    def _count_consumed(self) -> None:
        """Stop counting what the previous layer's backward used."""
        spent, self._consumed_bytes = self._consumed_bytes, 0
        if spent:
            self.stats.release(spent)

    def _live_group(self, index: int) -> Group | None:
        found = self._groups.get(index)
        return None if found is None else found()


def make_engine(
    device: torch.device,
    *,
    lead: Lead = "auto",
    horizon: int | None = None,
    min_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    link: Link | None = None,
    deadline_seconds: float = 600.0,
    rank: int = 0,
    num_sharers: int = 1,
) -> ActivationEngine:
    """Return an engine for a device; with `SMPKIT_OFFLOAD_DEBUG=1`, one that checks itself.

    Args:
        device: whose memory tensors leave.
        lead: how many layers ahead loads are issued, or "auto".
        horizon: over how many of this rank's next pipeline actions loads may reach; None: no bound.
        min_bytes: smaller tensors stay on the device; None: what is worth a copy there.
        host_budget_bytes: the most host memory; None: this process's part of three quarters of what is free.
        link: the device's link; None: its own.
        deadline_seconds: of every wait for a copy.
        rank: for reports.
        num_sharers: how many processes of this machine share its memory.
    """
    link = link or link_for(device, deadline_seconds)
    arena = make_arena(link, host_budget_bytes, num_sharers)
    engine_type: type[ActivationEngine] = ActivationEngine
    if os.environ.get(DEBUG) == "1":
        # By name: the product imports nothing of `smpkit.testing`, which import-linter checks.
        testing: Any = importlib.import_module("smpkit.testing.checked_offload")
        engine_type, link = testing.CheckedEngine, testing.CheckedLink(link)
    return engine_type(link, arena, BackwardOrder(horizon), lead=lead, min_bytes=min_bytes, rank=rank)
