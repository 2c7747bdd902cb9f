"""The plan of a step: in which order a rank runs its actions, and what each of them receives.

The first microbatch of a kind of step makes transfers. They cut its work into segments, and the segments and what
travels between them are a graph (`graph_of`). `smpkit.plan.decide.Policy` makes a schedule of it: the same on all
ranks, since all have the same graph. A `StepPlan` is what one rank needs to run its list of actions in that schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from smpkit.plan.schedule.actions import Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer
from smpkit.plan.schedule.receives import num_ahead
from smpkit.torch.pipeline.message_order import Message, Timetable, TransferRecord, timetable_of
from smpkit.torch.pipeline.microbatch import Microbatch

__all__ = ["PlannedAction", "StepPlan", "graph_of"]


class PlannedAction(NamedTuple):
    """An action of this rank."""

    kind: Kind
    segment: int
    microbatch: int
    is_split: bool
    """Whether the backward of its segment runs in two halves."""
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class StepPlan:
    """What one kind of step does on this rank."""

    schedule: Schedule
    rank: int
    """This one."""
    record: TransferRecord
    actions: tuple[PlannedAction, ...]
    """Those of this rank, in order."""

    @classmethod
    def of(cls, microbatch: Microbatch, schedule: Schedule) -> StepPlan:
        """Return the plan of a step like its first microbatch, which has run forward, in the order of a schedule."""
        rank, record = microbatch.stage.rank, microbatch.make_record()
        actions = schedule.actions[rank]
        split = {action.segment for action in actions if action.kind is Kind.WEIGHT} - microbatch.unsplittable
        forward = [each for each in record.transfers if each.target == rank]
        backward = [each for each in record.transfers if each.source == rank and each.spec.requires_grad]
        planned = []
        for kind, segment, index in [(action.kind, action.segment, action.microbatch) for action in actions]:
            receives = []
            if kind is Kind.FORWARD:
                receives = [Message(index, each, False) for each in forward if each.target_segment == segment]
            elif kind is Kind.BACKWARD:  # a weight half receives nothing
                receives = [Message(index, each, True) for each in backward if each.source_segment == segment]
            planned.append(PlannedAction(kind, segment, index, segment in split, tuple(receives)))
        return cls(schedule, rank, record, tuple(planned))

    @property
    def has_revisits(self) -> bool:
        """Whether some rank is visited more than once: then microbatches must be able to wait for one another."""
        return max(self.schedule.graph.counts) > 1

    @cached_property
    def split(self) -> frozenset[int]:
        """Segments of this rank whose backward runs in two halves."""
        return frozenset(action.segment for action in self.actions if action.is_split)

    @cached_property
    def num_ahead(self) -> int:
        """For how many of the first actions all receives are posted before the first wait."""
        return num_ahead([sum(each.transfer.spec.num_bytes for each in action.receives) for action in self.actions])

    @cached_property
    def timetable(self) -> Timetable:
        """What this rank sends and receives, in the order that all ranks follow."""
        return timetable_of(self.schedule, self.record.transfers, self.rank)


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
