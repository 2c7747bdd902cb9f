"""The plan of a step: in which order a rank runs its actions, and what each of them receives.

The first microbatch of a kind of step makes transfers. They cut its work into segments, and the segments and what
travels between them are a graph (`graph_of`). `smpkit.plan.decide.Policy` makes a schedule of it: the same on all
ranks, since all have the same graph. A `StepPlan` is what one rank needs to run its list of actions in that schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer
from smpkit.plan.schedule.receives import LOOKAHEAD, num_ahead
from smpkit.torch.pipeline.message_order import P2PTransfer, Timetable, TransferRecord, timetable_of
from smpkit.torch.pipeline.messages import Message
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.transport import MessageKey

__all__ = ["PlannedAction", "StepPlan", "graph_of"]


class PlannedAction(NamedTuple):
    """An action of this rank."""

    kind: Kind
    segment: int
    microbatch: int
    is_split: bool
    """Whether the backward of its segment runs in two halves."""
    receives: bool
    """Whether it needs anything of other ranks."""
    ahead: tuple[Message, ...]
    """What a later action receives; it is posted before this one runs."""
    is_posted_ahead: bool
    """Whether that is among what is posted before the first wait."""


@dataclass(frozen=True)
class StepPlan:
    """What one kind of step does on this rank; `dataclasses.replace` its schedule to run it in another order."""

    schedule: Schedule
    rank: int
    """This one."""
    has_revisits: bool
    """Whether some rank is visited more than once: then microbatches must be able to wait for one another."""
    forward_receives: Mapping[int, tuple[P2PTransfer, ...]]
    """What arrives in forward, by segment of this rank."""
    backward_receives: Mapping[int, tuple[P2PTransfer, ...]]
    """The transfers whose gradients are received in backward, by segment."""
    record: TransferRecord
    unsplit: frozenset[int]
    """Segments of this rank whose backward is never split, whatever the schedule says."""

    @classmethod
    def of(cls, microbatch: Microbatch, schedule: Schedule) -> StepPlan:
        """Return the plan of a step like its first microbatch, which has run forward, in the order of a schedule."""
        rank = microbatch.stage.rank
        forward: dict[int, list[P2PTransfer]] = {segment: [] for segment in range(microbatch.num_own_segments)}
        backward: dict[int, list[P2PTransfer]] = {segment: [] for segment in forward}
        for transfer in microbatch.transfers:
            if transfer.target == rank:
                forward[transfer.target_segment].append(transfer)
            if transfer.source == rank and transfer.spec.requires_grad and microbatch.has_backward:
                backward[transfer.source_segment].append(transfer)
        return cls(
            schedule=schedule,
            rank=rank,
            has_revisits=max(microbatch.num_segments) > 1,
            forward_receives={segment: tuple(received) for segment, received in forward.items()},
            backward_receives={segment: tuple(received) for segment, received in backward.items()},
            record=microbatch.make_record(),
            unsplit=frozenset(microbatch.unsplittable),
        )

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The actions of this rank, in order."""
        return self.schedule.actions[self.rank]

    @cached_property
    def receives(self) -> tuple[tuple[P2PTransfer, ...], ...]:
        """What each action receives: transfers, or their gradients."""
        of_kind = {Kind.FORWARD: self.forward_receives, Kind.BACKWARD: self.backward_receives}
        # A weight half receives nothing.
        return tuple(of_kind.get(action.kind, {}).get(action.segment, ()) for action in self.actions)

    @cached_property
    def arrivals(self) -> tuple[tuple[Message, ...], ...]:
        """The messages that each action receives."""
        return tuple(
            tuple([self.messages[action.microbatch, each.number, action.kind is Kind.BACKWARD] for each in received])
            for action, received in zip(self.actions, self.receives, strict=True)
        )

    @cached_property
    def planned(self) -> tuple[PlannedAction, ...]:
        """The actions of this rank, in order, each with what it and the executor need."""
        later = [(received, index < self.num_ahead) for index, received in enumerate(self.arrivals)]
        padded = [*later[LOOKAHEAD:], *[((), False)] * LOOKAHEAD]
        return tuple(
            PlannedAction(
                action.kind, action.segment, action.microbatch, action.segment in self.split, bool(received), *ahead
            )
            for action, received, ahead in zip(self.actions, self.receives, padded, strict=False)
        )

    @cached_property
    def num_ahead(self) -> int:
        """For how many of the first actions all receives are posted before the first wait."""
        return num_ahead([sum(transfer.spec.num_bytes for transfer in received) for received in self.receives])

    @cached_property
    def split(self) -> frozenset[int]:
        """Segments of this rank whose backward runs in two halves."""
        return _split(self.actions, self.unsplit)

    @cached_property
    def messages(self) -> dict[MessageKey, Message]:
        """All that this rank sends and receives."""
        return _messages(self.schedule, self.record.transfers, self.rank)

    @cached_property
    def timetable(self) -> Timetable:
        """What this rank sends and receives, in the order that all ranks follow."""
        return timetable_of(self.schedule, self.record.transfers, self.rank)


def _split(actions: tuple[Action, ...], unsplit: frozenset[int]) -> frozenset[int]:
    return frozenset(action.segment for action in actions if action.kind is Kind.WEIGHT) - unsplit


def _messages(schedule: Schedule, transfers: Sequence[P2PTransfer], rank: int) -> dict[MessageKey, Message]:
    """Return what a rank sends and receives, each with the place of the action that takes or sends it elsewhere."""
    actions: defaultdict[tuple[int, int], list[tuple[int, bool, int]]] = defaultdict(list)
    for (peer, backward, segment, microbatch), index in _action_indices(schedule).items():
        actions[peer, segment].append((microbatch, backward, index))
    found = {}
    for transfer in transfers:
        if rank in (transfer.source, transfer.target):
            ends = (transfer.source, transfer.source_segment), (transfer.target, transfer.target_segment)
            for microbatch, backward, index in actions[ends[rank == transfer.source]]:
                found[microbatch, transfer.number, backward] = Message(rank, microbatch, transfer, backward, index)
    return found


def _action_indices(schedule: Schedule) -> dict[tuple[int, bool, int, int], int]:
    """Return the index in its rank's list of each action that sends or receives.

    By rank, whether it is a backward, segment and microbatch.
    """
    found = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            # A weight half sends nothing. If one counted, a rank would believe that its peer has taken more by then
            # than it has, and would wait for a send whose receiver waits for this rank.
            if action.kind is not Kind.WEIGHT:
                found[rank, action.kind is not Kind.FORWARD, action.segment, action.microbatch] = index
    return found


def graph_of(microbatch: Microbatch) -> SegmentGraph:
    """Return the segments of a recorded microbatch and what travels between them."""
    messages = [
        Transfer(
            Segment(transfer.source, transfer.source_segment),
            Segment(transfer.target, transfer.target_segment),
            transfer.spec.num_bytes,
            transfer.spec.requires_grad and microbatch.has_backward,
        )
        for transfer in microbatch.transfers
    ]
    return SegmentGraph.of(microbatch.num_segments, messages, microbatch.has_backward)
