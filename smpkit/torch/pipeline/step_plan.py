"""The plan of a step: in which order a rank runs its actions, and what each of them receives.

The first microbatch of a kind of step makes transfers. They cut its work into segments, and the segments and what
travels between them are a graph (`graph_of`). `smpkit.plan.decide.Policy` makes a schedule of it: the same on all
ranks, since all have the same graph. A `StepPlan` is what one rank needs to run its list of actions in that schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer
from smpkit.torch.pipeline.messages import Message, P2PTransfer, TransferRecord
from smpkit.torch.pipeline.microbatch import Microbatch

_LOOKAHEAD: Final = 2
"""For how many of the actions after the current one receives are posted."""
_AHEAD_BYTES: Final = 1 << 20
"""Bytes of receives that are posted before the first wait."""


class PlannedAction(NamedTuple):
    """An action of this rank."""

    posts: tuple[Message, ...]
    """The receives to start before it, its own or those of later actions: gloo sends data only to a posted receive."""
    kind: Kind
    segment: int
    microbatch: int
    is_split: bool
    """Whether the backward of its segment runs in two halves."""


@dataclass(frozen=True)
class StepPlan:
    """What one kind of step does on this rank."""

    schedule: Schedule
    rank: int
    """This one."""
    record: TransferRecord
    split: frozenset[int]
    """Segments of this rank whose backward runs in two halves."""
    actions: tuple[PlannedAction, ...]
    """Those of this rank, in order."""

    @classmethod
    def of(cls, microbatch: Microbatch, schedule: Schedule) -> StepPlan:
        """Return the plan of a step like its first microbatch, which has run forward, in the order of a schedule."""
        rank, record = microbatch.stage.rank, microbatch.make_record()
        actions = schedule.actions[rank]
        split = frozenset(action.segment for action in actions if action.kind is Kind.WEIGHT) - microbatch.unsplittable
        arrivals: defaultdict[tuple[Kind, int], list[P2PTransfer]] = defaultdict(list)
        for transfer in record.transfers:
            if transfer.target == rank:
                arrivals[Kind.FORWARD, transfer.target_segment].append(transfer)
            if transfer.source == rank and transfer.spec.requires_grad:
                arrivals[Kind.BACKWARD, transfer.source_segment].append(transfer)
        receives = [
            [
                Message(action.microbatch, transfer, action.kind is Kind.BACKWARD)
                for transfer in arrivals.get((action.kind, action.segment), ())
            ]
            for action in actions
        ]
        return cls(schedule, rank, record, split, tuple(_planned(actions, receives, split)))

    @property
    def has_revisits(self) -> bool:
        """Whether some rank is visited more than once: then microbatches must be able to wait for one another."""
        return max(self.schedule.graph.counts) > 1


def _planned(
    actions: Sequence[Action], receives: Sequence[Sequence[Message]], split: frozenset[int]
) -> Iterator[PlannedAction]:
    ahead = num_ahead([sum(each.transfer.spec.num_bytes for each in group) for group in receives])
    posted = 0
    for number, action in enumerate(actions):
        # A rank that is about to wait has the time for more.
        until = max(posted, number + 1 + _LOOKAHEAD, ahead if receives[number] else 0)
        posts = tuple(message for group in receives[posted:until] for message in group)
        posted = until
        yield PlannedAction(posts, action.kind, action.segment, action.microbatch, action.segment in split)


def num_ahead(received_bytes: Sequence[int]) -> int:
    """Return for how many of a rank's first actions, which receive so many bytes, receives precede its first wait."""
    return max(1, sum(num_bytes <= _AHEAD_BYTES for num_bytes in accumulate(received_bytes)))


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
