"""What one kind of step does on this rank: the actions of the schedule, with what each receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer
from smpkit.torch.pipeline.message_order import P2PTransfer, Timetable, TransferRecord, timetable_of
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.transport import ActionKey

__all__ = ["StepPlan", "graph_of"]


@dataclass(frozen=True)
class StepPlan:
    """What one kind of step does on this rank."""

    schedule: Schedule
    actions: tuple[Action, ...]
    has_revisits: bool
    """Whether some rank is visited more than once: then microbatches must be able to wait for one another."""
    forward_receives: Mapping[int, tuple[P2PTransfer, ...]]
    """What arrives in forward, by segment of this rank."""
    backward_receives: Mapping[int, tuple[P2PTransfer, ...]]
    """The transfers whose gradients are received in backward, by segment."""
    record: TransferRecord
    unsplit: frozenset[int]
    """Segments of this rank whose backward is never split, whatever the schedule says."""
    split: frozenset[int]
    """Segments of this rank whose backward runs in two halves."""
    action_indices: Mapping[ActionKey, int]
    """The index in its rank's list of each action that sends or receives."""
    receives: tuple[tuple[P2PTransfer, ...], ...]
    """What each action receives: transfers, or their gradients."""
    rank: int
    """This one."""

    @cached_property
    def timetable(self) -> Timetable:
        """What this rank sends and receives, in the order that all ranks follow."""
        return timetable_of(self.schedule, self.record.transfers, self.rank)

    @classmethod
    def of(cls, microbatch: Microbatch, schedule: Schedule) -> StepPlan:
        """Return the plan of a step that goes as its first microbatch, which has run forward, in the given order."""
        rank = microbatch.stage.rank
        segments = range(microbatch.num_own_segments)
        with_gradient = [
            transfer for transfer in microbatch.transfers if transfer.spec.requires_grad and microbatch.has_backward
        ]
        unsplit = frozenset(microbatch.unsplittable)
        actions = schedule.actions[rank]
        forward = {
            s: tuple(m for m in microbatch.transfers if (m.target, m.target_segment) == (rank, s)) for s in segments
        }
        backward = {s: tuple(m for m in with_gradient if (m.source, m.source_segment) == (rank, s)) for s in segments}
        return cls(
            schedule,
            actions,
            max(microbatch.num_segments) > 1,
            forward,
            backward,
            microbatch.make_record(),
            unsplit,
            _split(actions, unsplit),
            _action_indices(schedule),
            _receives(actions, forward, backward),
            rank,
        )

    def follow(self, schedule: Schedule, rank: int) -> StepPlan:
        """Return the plan of the same step in another order."""
        actions = schedule.actions[rank]
        return replace(
            self,
            schedule=schedule,
            actions=actions,
            split=_split(actions, self.unsplit),
            action_indices=_action_indices(schedule),
            receives=_receives(actions, self.forward_receives, self.backward_receives),
        )


def _split(actions: tuple[Action, ...], unsplit: frozenset[int]) -> frozenset[int]:
    return frozenset(action.segment for action in actions if action.kind is Kind.WEIGHT) - unsplit


def _receives(
    actions: tuple[Action, ...],
    forward: Mapping[int, tuple[P2PTransfer, ...]],
    backward: Mapping[int, tuple[P2PTransfer, ...]],
) -> tuple[tuple[P2PTransfer, ...], ...]:
    of_kind = {Kind.FORWARD: forward, Kind.BACKWARD: backward}  # weight halves receive nothing
    return tuple(of_kind.get(action.kind, {}).get(action.segment, ()) for action in actions)


def _action_indices(schedule: Schedule) -> dict[ActionKey, int]:
    return {
        (rank, action.kind is not Kind.FORWARD, action.segment, action.microbatch): index
        for rank, actions in enumerate(schedule.actions)
        for index, action in enumerate(actions)
        if action.kind is not Kind.WEIGHT  # nothing travels by it
    }


def graph_of(microbatch: Microbatch) -> SegmentGraph:
    """Return the segments of a recorded microbatch and what travels between them."""
    size, counts = microbatch.stage.size, microbatch.num_segments
    segments = [Segment(rank, index) for rank in range(size) for index in range(counts[rank])]
    edges = [
        Transfer(
            Segment(transfer.source, transfer.source_segment),
            Segment(transfer.target, transfer.target_segment),
            transfer.spec.num_bytes,
            transfer.spec.requires_grad and microbatch.has_backward,
        )
        for transfer in microbatch.transfers
    ]
    kept = [Transfer(Segment(s.rank, s.index - 1), s) for s in segments if s.index > 0]
    return SegmentGraph(size, tuple(segments), tuple(edges + kept), microbatch.has_backward)
