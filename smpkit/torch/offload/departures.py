"""Device to host: copy saved storages out, and free device and host memory when nothing uses it any more."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import torch

from smpkit.torch.offload.arena import ALIGNMENT, Arena
from smpkit.torch.offload.link import CopyBatch, Event, Link
from smpkit.torch.offload.pace import Lead, PrefetchTuner
from smpkit.torch.offload.prefetch import BackwardOrder
from smpkit.torch.offload.record import Group, SavedStorage, StorageState
from smpkit.torch.offload.report import OffloadStats

__all__ = ["DeviceToHost"]

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
