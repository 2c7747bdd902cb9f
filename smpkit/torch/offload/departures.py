"""The way out: from a saved storage to host memory, and back into the hands of the allocators when nobody needs it."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import torch

from smpkit.torch.offload.arena import ALIGNMENT, Arena
from smpkit.torch.offload.link import Copies, Event, Link
from smpkit.torch.offload.pace import Lead, Pace
from smpkit.torch.offload.prefetch import Order
from smpkit.torch.offload.record import Group, Record, State
from smpkit.torch.offload.report import Ledger

__all__ = ["Departures"]

_log = logging.getLogger("smpkit")

_LEAST_HELD: Final = 2
_ON_ITS_WAY: Final = State.COPYING | State.LOADING


class Departures:
    """Sends records to the host, and lets go of device and host memory when that is safe.

    Args:
        link: the device's.
        arena: where the bytes go.
        order: predicts what backward needs next.
        lead: see `Pace`.
        rank: for reports.
    """

    def __init__(self, link: Link, arena: Arena, order: Order, lead: Lead, rank: int) -> None:
        self.link = link
        self.arena = arena
        self.order = order
        self.pace = Pace(link, lead)
        self.ledger = Ledger(rank)
        self.records: dict[Hashable, Record] = {}
        """By storage, to know one that is saved again."""
        self.nothing = torch.empty(0, device=link.device)
        self._spent_bytes = 0
        """On the device, of what backward has got and may still use; ours no more."""
        self._copying: deque[weakref.ref[Group]] = deque()
        self._warned = False

    def send(self, group: Group, records: Sequence[Record]) -> None:
        """Begin to copy records of a group to the host; they stay if it has no room, or if they would soon be back.

        Either way they are held from now on.
        """
        sizes = [record.num_bytes for record in records]
        self.ledger.hold(sum(sizes))
        if not group.stays:
            self._depart(group, records, sizes)

    def _depart(self, group: Group, records: Sequence[Record], sizes: Sequence[int]) -> None:
        """Begin to copy records of a group to one block; where there is none so large, half of them after the other."""
        # Each rounded up, as `aligned` does. All here are lists, not generators, which take longer.
        block = self.arena.take(sum([-(-num_bytes // ALIGNMENT) for num_bytes in sizes]) * ALIGNMENT)
        if block is None:
            if len(records) == 1:
                self._keep(group, records[0])
                return
            middle = len(records) // 2
            self._depart(group, records[:middle], sizes[:middle])
            self._depart(group, records[middle:], sizes[middle:])
            return
        sources = [record.data for record in records if record.data is not None]  # all: they are on the device
        targets = block.shaped([record.form for record in records])
        # Nearly always the current stream alone. Another one may be joined only later than this.
        after = [self.link.now(stream) for stream in {record.stream for record in records}]
        after += block.free_after
        block.num_users, block.last_uses = len(records), []
        for record, host in zip(records, targets, strict=True):
            record.block, record.host = block, host  # before the copy, which may fail: they give the block back
        event = self.link.send(Copies(sources, targets), after, group.what)
        copying = State.COPYING
        for record in records:
            record.state, record.out = copying, event
        self.ledger.bytes_out += sum(sizes)
        self._copying.append(weakref.ref(group))

    def bury(self, record: Record) -> None:
        """Take over what a record leaves behind: its block, once nobody reads or writes it any more."""
        if self.records.get(record.key) is record:
            del self.records[record.key]
        last = record.load or record.out
        if record.state & _ON_ITS_WAY and last is not None:
            self.link.before_reuse(last, record.stream)
        if record.data is not None:
            record.witness = self.nothing  # the copy that is under way, or a user, may have the data
            self.ledger.let_go(record.num_bytes)
            self._drop((record,))
        record.state = State.DEAD
        block = record.block
        if block is None:
            return
        uses = block.last_uses
        if last is not None and not (uses and uses[-1] is last):  # those of a group come and go with one event
            uses.append(last)
        # Graphs die in any thread: whoever takes the last one away, and nobody else, gives the block back.
        block.num_users = left = block.num_users - 1
        if not left:
            self.arena.give(block, uses)

    def _poll(self) -> None:
        """Release device memory whose copy is complete.

        Without a plan, backward may begin any time, and with the latest groups: those are held. On a device that this
        thread runs ahead of, two are held at least, so that their copies have time to end before anyone waits for them.
        """
        held = 0 if self.order.is_planned else self.pace.lead
        if self.link.is_stream_ordered:
            held = max(held, _LEAST_HELD)
        copying = self._copying
        while copying:
            group = copying[0]()
            if group is not None and not group.is_pinned and self._must_wait(group, held):
                return
            copying.popleft()

    def _must_wait(self, group: Group, held: int) -> bool:
        return self.order.is_recent(group.index, held) or not self._release(group)

    def _release(self, group: Group) -> bool:
        """Let go of a group's device memory; return whether that could be done without blocking this thread."""
        copying, host = State.COPYING, State.HOST
        complete: Event | None = None
        released = list[Record]()
        num_bytes = 0
        is_complete = True
        for record in group.needs:
            if record.state != copying:
                continue
            out = record.out
            assert out is not None
            if out is not complete:
                if out.done():
                    complete = out
                elif self.link.is_stream_ordered:
                    # This thread is ahead of the device: let the allocator's stream wait, or nothing would be free.
                    self.link.before_reuse(out, record.stream)
                else:
                    is_complete = False
                    break
            num_bytes += record.num_bytes
            record.state = host
            released.append(record)
        self._drop(released)
        self.ledger.let_go(num_bytes)
        return is_complete

    def _drop(self, records: Iterable[Record]) -> None:
        """Let go of device memory; it may be used again by the records' streams at once."""
        nothing = self.nothing
        is_shared = self.link.is_stream_ordered
        for record in records:
            data, witness = record.data, record.witness
            if is_shared and record.load is None and data is not None:
                # Without us its graph would have held it until backward, and the user may have taken it from a stream
                # that counts on that.
                self.link.used(data, record.stream)
            if witness is data:
                witness.data = nothing
            record.data = None

    def _count_out(self) -> None:
        """Count what backward has got no more: it has gone on to another layer."""
        spent, self._spent_bytes = self._spent_bytes, 0
        if spent:
            self.ledger.let_go(spent)

    def _keep(self, group: Group, record: Record) -> None:
        """Leave a record on the device for good, because the host has no room."""
        self.ledger.kept_bytes += record.num_bytes
        if not self._warned:
            self._warned = True
            budget = self.arena.budget_bytes
            _log.warning(
                "host memory for activations is used up (%s): those of %s, and others, stay on the device",
                "the machine has no more" if budget is None else f"{budget} bytes",
                group,
            )
