"""What one kind of step does on this rank: the actions of the schedule, with what each receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer
from smpkit.torch.pipeline.microbatch import Microbatch
from smpkit.torch.pipeline.record import Move, Record
from smpkit.torch.pipeline.timetable import Timetable, timetable_of
from smpkit.torch.pipeline.transport import Place

__all__ = ["Plan", "graph_of"]


@dataclass(frozen=True)
class Plan:
    """What one kind of step does on this rank."""

    schedule: Schedule
    actions: tuple[Action, ...]
    revisited: bool
    """Whether some rank is visited more than once: then microbatches must be able to wait for one another."""
    forward_receives: Mapping[int, tuple[Move, ...]]
    """What arrives in forward, by segment of this rank."""
    backward_receives: Mapping[int, tuple[Move, ...]]
    """The moves whose gradients arrive in backward, by segment."""
    record: Record
    whole: frozenset[int]
    """Segments of this rank whose backward runs in one, whatever the schedule says."""
    split: frozenset[int]
    """Segments of this rank whose backward runs in two halves."""
    places: Mapping[Place, int]
    """Where in its rank's list an action stands by which something travels."""
    receives: tuple[tuple[Move, ...], ...]
    """What each action receives: moves, or the gradients of moves."""
    rank: int
    """This one."""

    @cached_property
    def timetable(self) -> Timetable:
        """What this rank sends and receives, in the order that all ranks follow."""
        return timetable_of(self.schedule, self.record.moves, self.rank)

    @classmethod
    def of(cls, microbatch: Microbatch, schedule: Schedule) -> Plan:
        """Return the plan of a step that goes as its first microbatch, which has run forward, in the given order."""
        rank = microbatch.stage.rank
        segments = range(microbatch.num_own_segments)
        returning = [move for move in microbatch.moves if move.spec.requires_grad and microbatch.has_backward]
        whole = frozenset(microbatch.unsplittable)
        actions = schedule.actions[rank]
        forward = {s: tuple(m for m in microbatch.moves if (m.target, m.target_segment) == (rank, s)) for s in segments}
        backward = {s: tuple(m for m in returning if (m.source, m.source_segment) == (rank, s)) for s in segments}
        return cls(
            schedule,
            actions,
            max(microbatch.num_segments) > 1,
            forward,
            backward,
            microbatch.recorded(),
            whole,
            _split(actions, whole),
            _places(schedule),
            _receives(actions, forward, backward),
            rank,
        )

    def follow(self, schedule: Schedule, rank: int) -> Plan:
        """Return the plan of the same step in another order."""
        actions = schedule.actions[rank]
        return replace(
            self,
            schedule=schedule,
            actions=actions,
            split=_split(actions, self.whole),
            places=_places(schedule),
            receives=_receives(actions, self.forward_receives, self.backward_receives),
        )


def _split(actions: tuple[Action, ...], whole: frozenset[int]) -> frozenset[int]:
    return frozenset(action.segment for action in actions if action.kind is Kind.WEIGHT) - whole


def _receives(
    actions: tuple[Action, ...], forward: Mapping[int, tuple[Move, ...]], backward: Mapping[int, tuple[Move, ...]]
) -> tuple[tuple[Move, ...], ...]:
    of_kind = {Kind.FORWARD: forward, Kind.BACKWARD: backward}  # weight halves receive nothing
    return tuple(of_kind.get(action.kind, {}).get(action.segment, ()) for action in actions)


def _places(schedule: Schedule) -> dict[Place, int]:
    return {
        (rank, action.kind is not Kind.FORWARD, action.segment, action.microbatch): place
        for rank, actions in enumerate(schedule.actions)
        for place, action in enumerate(actions)
        if action.kind is not Kind.WEIGHT  # nothing travels by it
    }


def graph_of(microbatch: Microbatch) -> SegmentGraph:
    """Return the segments of a recorded microbatch and what travels between them."""
    size, counts = microbatch.stage.size, microbatch.num_segments
    segments = [Segment(rank, index) for rank in range(size) for index in range(counts[rank])]
    transfers = [
        Transfer(
            Segment(move.source, move.source_segment),
            Segment(move.target, move.target_segment),
            move.spec.num_bytes,
            move.spec.requires_grad and microbatch.has_backward,
        )
        for move in microbatch.moves
    ]
    kept = [Transfer(Segment(s.rank, s.index - 1), s) for s in segments if s.index > 0]
    return SegmentGraph(size, tuple(segments), tuple(transfers + kept), microbatch.has_backward)
