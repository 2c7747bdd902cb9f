"""The transfers of a microbatch between ranks, and the order in which those of a whole step travel between GPUs.

All microbatches of a kind make the same transfers, which the first one records (`TransferRecord`). Between GPUs they
need one order that all ranks know beforehand; `channels.py` says why. It follows from the schedule, which every rank
has: what an action sends counts from the action's end, if actions last as long as the simulator's default costs say.
Nobody looks at a clock: real times may differ, the order stays.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.simulate import simulate
from smpkit.torch.core.tensor_spec import TensorSpec

TRANSFERS_PER_MICROBATCH: Final = 1 << 15
"""How many numbers each microbatch has for its transfers: no two messages of a step share a tag."""


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


_ByAction = defaultdict[tuple[Kind, int, int], list[P2PTransfer]]
"""Transfers by kind, rank and segment of an action."""


@dataclass(frozen=True)
class TransferRecord:
    """The transfers of the first microbatch of a kind, which the schedule and later microbatches follow."""

    transfers: tuple[P2PTransfer, ...]
    changed: frozenset[int]
    """Numbers of transfers from this rank whose value was changed in place after the send: they are sent as copies."""


class Message:
    """A value, or its gradient (`backward`), that travels once in a step."""

    __slots__ = ("backward", "microbatch", "number", "transfer")

    def __init__(self, microbatch: int, transfer: P2PTransfer, backward: bool) -> None:
        self.microbatch, self.transfer, self.backward = microbatch, transfer, backward
        self.number = (microbatch * TRANSFERS_PER_MICROBATCH + transfer.number) * 2 + backward
        """Its own among the messages of a step; that of a gradient follows that of the value."""

    def __str__(self) -> str:
        kind, value = ("backward", "gradient of ") if self.backward else ("forward", "")
        consumer = f" for `{self.transfer.consumer}`" if self.transfer.consumer else ""
        return f"{kind} of microbatch {self.microbatch} ({value}{self.transfer.spec}{consumer})"

    @property
    def sender(self) -> int:
        return self.transfer.target if self.backward else self.transfer.source

    @property
    def receiver(self) -> int:
        return self.transfer.source if self.backward else self.transfer.target


class Traffic:
    """What travels by the actions of a microbatch: values by FORWARD, gradients by BACKWARD, nothing by WEIGHT."""

    def __init__(self, transfers: Iterable[P2PTransfer]) -> None:
        self._sent: _ByAction = defaultdict(list)
        self._received: _ByAction = defaultdict(list)
        for each in transfers:
            source, target = (each.source, each.source_segment), (each.target, each.target_segment)
            self._sent[Kind.FORWARD, *source].append(each)
            self._received[Kind.FORWARD, *target].append(each)
            if each.spec.requires_grad:
                self._sent[Kind.BACKWARD, *target].append(each)
                self._received[Kind.BACKWARD, *source].append(each)

    def sent(self, rank: int, action: Action) -> list[Message]:
        """Return what an action of a rank sends, in the order of the transfers' numbers."""
        return _messages_of(self._sent, rank, action)

    def received(self, rank: int, action: Action) -> list[Message]:
        """Return what an action of a rank receives, in the same order."""
        return _messages_of(self._received, rank, action)


def _messages_of(transfers: _ByAction, rank: int, action: Action) -> list[Message]:
    key, backward = (action.kind, rank, action.segment), action.kind is Kind.BACKWARD
    return [Message(action.microbatch, each, backward) for each in transfers.get(key, ())]


@dataclass(frozen=True)
class Timetable:
    """What one rank sends and receives in a step."""

    messages: tuple[Message, ...]
    """In the order that all ranks follow."""
    blocks: Mapping[int, int]
    """By number of bytes, the largest number of received values and gradients of that size alive at a time."""


def timetable_of(schedule: Schedule, transfers: Sequence[P2PTransfer], rank: int) -> Timetable:
    """Return what a rank sends and receives in a step that follows a schedule.

    Args:
        transfers: those of one microbatch; all make the same.
    """
    # Of actions that end at the same time, the lower rank's goes first: any rule will do that is the same everywhere.
    ends = sorted(
        (span.end_seconds, place, number)
        for place, spans in enumerate(simulate(schedule).spans)
        for number, span in enumerate(spans)
    )
    traffic = Traffic(transfers)
    messages = [
        message
        for _, sender, number in ends
        for message in traffic.sent(sender, schedule.actions[sender][number])
        if rank in (message.sender, message.receiver)
    ]
    return Timetable(tuple(messages), _blocks(schedule.actions[rank], messages, traffic, rank))


def backward_timetable(transfers: Mapping[int, Sequence[P2PTransfer]], rank: int) -> Timetable:
    """Return the backward of a step whose microbatches run one after the other.

    Args:
        transfers: by microbatch that has a backward, in their order.
    """
    messages = []
    for index, each in transfers.items():
        arrivals: defaultdict[tuple[int, int], list[P2PTransfer]] = defaultdict(list)
        for transfer in each:
            if transfer.spec.requires_grad:
                arrivals[transfer.target, transfer.target_segment].append(transfer)
        # Last segment first. What a segment sends has higher numbers than what it received, so the gradients of all
        # that it has sent come before those that it sends itself.
        for received in sorted(arrivals.values(), key=lambda received: -received[-1].number):
            messages += [
                Message(index, transfer, True) for transfer in received if rank in (transfer.source, transfer.target)
            ]
    return Timetable(tuple(messages), {})


def _blocks(actions: Sequence[Action], messages: Sequence[Message], traffic: Traffic, rank: int) -> dict[int, int]:
    """Simulate the receives of a rank as `Transport` begins them; return the peak number of blocks of each size."""
    positions = {message.number: position for position, message in enumerate(messages)}
    last = {action.microbatch: number for number, action in enumerate(actions)}
    begun = 0
    live: Counter[tuple[int, int]] = Counter()
    most: Counter[int] = Counter()
    for number, action in enumerate(actions):
        own = (*traffic.received(rank, action), *traffic.sent(rank, action))
        until = max((positions[each.number] + 1 for each in own), default=0)
        # Before a message is sent or taken, `Transport` begins all receives that come before it.
        for message in messages[begun:until]:
            size = message.transfer.spec.num_bytes
            if message.receiver == rank and size:
                live[message.microbatch, size] += 1
                in_use = sum(count for (_, num_bytes), count in live.items() if num_bytes == size)
                most[size] = max(most[size], in_use)
        begun = max(begun, until)
        if last[action.microbatch] == number:
            # A value is needed until its microbatch ends on this rank, since autograd may have saved it. So is a
            # gradient: the weight half of a split backward uses it later.
            for key in [key for key in live if key[0] == action.microbatch]:
                del live[key]
    return dict(most)
