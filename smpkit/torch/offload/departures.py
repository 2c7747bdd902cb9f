"""The way out: from a saved storage to host memory, and back into the hands of the allocators when nobody needs it."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final

import torch
from torch import Tensor

from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.link import Link
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
        self.records: dict[Hashable, weakref.ref[Record]] = {}
        """By storage, to know one that is saved again."""
        self.nothing = torch.empty(0, device=link.device)
        self._copying: deque[weakref.ref[Group]] = deque()
        self._warned = False

    def take(self, group: Group, record: Record) -> None:
        """Take over a storage: from now on it is known when it is saved again."""
        self.records[record.key] = weakref.ref(record)
        record.last_group = group.index
        group.needs.append(record)

    def send(self, group: Group, records: Sequence[Record]) -> None:
        """Begin to copy records of a group to the host; they stay if it has no room, or if they would soon be back.

        Either way they are held from now on.
        """
        num_bytes = 0
        for record in records:
            num_bytes += record.num_bytes
        self.ledger.hold(num_bytes)
        if group.stays:
            return
        take = self.arena.take
        sent: list[Record] = []
        copies: list[tuple[Tensor, Tensor]] = []
        after = [self.link.now()]
        for record in records:
            block = record.block = take(record.num_bytes)
            if block is None:
                self._keep(group, record)
                num_bytes -= record.num_bytes
                continue
            assert record.data is not None
            copies.append((record.data, block.bytes if record.form is None else block.shaped(record.form)))
            if block.free_after:
                after += block.free_after
            sent.append(record)
        if not sent:
            return
        event = self.link.send(copies, after, group.what)
        copying = State.COPYING
        for record in sent:
            record.state, record.out = copying, event
        self.ledger.bytes_out += num_bytes
        self._copying.append(weakref.ref(group))

    def bury(self, record: Record) -> None:
        """Take over what a record leaves behind: its block, once nobody reads or writes it any more."""
        records, key = self.records, record.key
        known = records.get(key)
        if known is not None and ((other := known()) is None or other is record):
            del records[key]
        last = record.load or record.out
        if record.state & _ON_ITS_WAY and last is not None:
            self.link.before_reuse(last, record.stream)
        if record.data is not None:
            record.witness = self.nothing  # the copy that is under way, or a user, may have the data
            self._drop(record)
        record.state = State.DEAD
        if record.block is not None:
            self.arena.give(record.block, () if last is None else (last,))

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
        for record in group.needs:
            if record.state != copying:
                continue
            assert record.out is not None
            if not record.out.done():
                if not self.link.is_stream_ordered:
                    return False
                # This thread is ahead of the device: let the allocator's stream wait, or nothing would ever be free.
                self.link.before_reuse(record.out, record.stream)
            self._drop(record)
            record.state = host
        return True

    def _drop(self, record: Record) -> None:
        """Let go of device memory; it may be used again by the record's stream at once."""
        if record.load is None:  # what was brought back is counted until its last user lets go of it
            self.ledger.let_go(record.num_bytes)
            if record.witness is record.data:
                record.witness.data = self.nothing
        record.data = None

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
