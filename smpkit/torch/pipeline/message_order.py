"""The transfers of a microbatch between ranks, and the record of them that later microbatches follow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.simulate import simulate
from smpkit.torch.core.tensor_spec import TensorSpec

__all__ = [
    "DIVERGED",
    "TRANSFERS_PER_MICROBATCH",
    "P2PTransfer",
    "Timetable",
    "TimetableEntry",
    "TransferRecord",
    "backward_timetable",
    "timetable_of",
]

TRANSFERS_PER_MICROBATCH: Final = 1 << 12
DIVERGED: Final = 1 << 11
"""Added to the numbers of transfers of a microbatch that has diverged from the record."""


@dataclass(frozen=True)
class P2PTransfer:
    """A value that one rank sends to another, once; `number` counts those of a microbatch, alike on all ranks."""

    number: int
    source: int
    target: int
    source_segment: int
    target_segment: int
    spec: TensorSpec
    consumer: str = ""
    """What needed the value: a unit or an operation."""

    def __post_init__(self) -> None:
        assert self.number < TRANSFERS_PER_MICROBATCH, "more moves in one microbatch than tags"


@dataclass(frozen=True)
class TransferRecord:
    """The transfers of the first microbatch of a kind, which the schedule relies on."""

    transfers: tuple[P2PTransfer, ...]
    mutated: frozenset[int]
    """Numbers of transfers from this rank whose value was changed in place after the send: they are sent as copies."""
    has_mutations: bool
    """Whether any call has changed its arguments in place: then received values must allow that."""


# --- In which order the values and gradients of a step travel between GPUs: one order, which all ranks know beforehand
# It follows from the schedule, which every rank has: what an action sends counts from when the action ends, if actions
# last as long as they do by default. Nobody looks at a clock: real times may be others, the order stays. See `lanes.py`
# for why it must be one.


@dataclass(frozen=True)
class TimetableEntry:
    """A value, or its gradient (`backward`), that travels once in a step."""

    microbatch: int
    transfer: P2PTransfer
    backward: bool

    @property
    def sender(self) -> int:
        return self.transfer.target if self.backward else self.transfer.source

    @property
    def receiver(self) -> int:
        return self.transfer.source if self.backward else self.transfer.target


@dataclass(frozen=True)
class Timetable:
    """What one rank sends and receives in a step."""

    entries: tuple[TimetableEntry, ...]
    """In the order that all ranks follow."""
    blocks: Mapping[int, int]
    """By number of bytes, how many received values and gradients of that size the order makes a rank hold at a time."""


def timetable_of(schedule: Schedule, transfers: Sequence[P2PTransfer], rank: int) -> Timetable:
    """Return what a rank sends and receives in a step that follows a schedule.

    Args:
        transfers: of a microbatch; all make the same.
    """
    sent: defaultdict[tuple[int, bool, int], list[P2PTransfer]] = defaultdict(list)
    received: defaultdict[tuple[bool, int], list[P2PTransfer]] = defaultdict(list)
    for transfer in transfers:
        sent[transfer.source, False, transfer.source_segment].append(transfer)
        if rank == transfer.target:
            received[False, transfer.target_segment].append(transfer)
        if transfer.spec.requires_grad and schedule.graph.has_backward:
            sent[transfer.target, True, transfer.target_segment].append(transfer)
            if rank == transfer.source:
                received[True, transfer.source_segment].append(transfer)
    # Of what ends at once, the lower rank's goes first. An action sends in the order of the transfers' numbers.
    ends = sorted(
        (span.end_seconds, place, number)
        for place, spans in enumerate(simulate(schedule).spans)
        for number, span in enumerate(spans)
    )
    entries = []
    for _, sender, number in ends:
        action = schedule.actions[sender][number]
        if action.kind is not Kind.WEIGHT:  # nothing travels by it
            backward = action.kind is Kind.BACKWARD
            found = [
                TimetableEntry(action.microbatch, each, backward) for each in sent[sender, backward, action.segment]
            ]
            entries += [each for each in found if rank in (each.sender, each.receiver)]
    return Timetable(tuple(entries), _blocks(schedule.actions[rank], entries, received, sent, rank))


def backward_timetable(transfers: Mapping[int, Sequence[P2PTransfer]], rank: int) -> Timetable:
    """Return the backward of a step whose microbatches run one after the other.

    Args:
        transfers: of microbatches that have a backward, in their order.
    """
    entries = []
    for index, each in transfers.items():
        arrivals: defaultdict[tuple[int, int], list[P2PTransfer]] = defaultdict(list)
        for transfer in each:
            if transfer.spec.requires_grad:
                arrivals[transfer.target, transfer.target_segment].append(transfer)
        # What a segment sends has higher numbers than what it got, so its gradients are there when its turn comes.
        for found in sorted(arrivals.values(), key=lambda found: -found[-1].number):
            entries += [
                TimetableEntry(index, transfer, True)
                for transfer in found
                if rank in (transfer.source, transfer.target)
            ]
    return Timetable(tuple(entries), {})


def _blocks(
    actions: Sequence[Action],
    entries: Sequence[TimetableEntry],
    received: Mapping[tuple[bool, int], list[P2PTransfer]],
    sent: Mapping[tuple[int, bool, int], list[P2PTransfer]],
    rank: int,
) -> dict[int, int]:
    """Play the list of a rank as `Transport` does, and return how many blocks of each size are in use at most.

    Before anything is sent or taken, all receives begin that come before it. A value is needed until its microbatch is
    over on this rank, for autograd may have saved it; so is a gradient, for a weight's may be made of it later.
    """
    places = {entry: place for place, entry in enumerate(entries)}
    last = {action.microbatch: number for number, action in enumerate(actions)}
    begun = 0
    live: Counter[tuple[int, int]] = Counter()
    most: Counter[int] = Counter()
    for number, action in enumerate(actions):
        if action.kind is not Kind.WEIGHT:
            backward = action.kind is Kind.BACKWARD
            here = [*received.get((backward, action.segment), ()), *sent.get((rank, backward, action.segment), ())]
            until = max(
                (places[TimetableEntry(action.microbatch, transfer, backward)] + 1 for transfer in here), default=0
            )
            for entry in entries[begun:until]:
                size = entry.transfer.spec.num_bytes
                if entry.receiver == rank and size:
                    live[entry.microbatch, size] += 1
                    in_use = sum(count for (_, num_bytes), count in live.items() if num_bytes == size)
                    most[size] = max(most[size], in_use)
            begun = max(begun, until)
        if last[action.microbatch] == number:
            for key in [key for key in live if key[0] == action.microbatch]:
                del live[key]
    return dict(most)
