"""The planner's form of a graph with costs: the actions of one microbatch as numbers, so that planning is fast.

Every microbatch has the same tasks 0 .. n-1. `Links` says when a message that one of them sends arrives; the planner
and the simulator ask the same object, so they agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from smpkit.plan.schedule.actions import Action, Costs
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer

__all__ = ["Feed", "Links", "Task", "tasks_of"]

_PRIORITY: Final = {Kind.BACKWARD: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}
"""What a rank does first of what it could do now: backward frees memory, weights only fill gaps."""


@dataclass(frozen=True)
class Feed:
    """What the end of a task gives to another one, directly or as a message."""

    target: int
    transfer: Transfer | None


@dataclass(frozen=True)
class Task:
    """One action of every microbatch."""

    kind: Kind
    segment: Segment
    seconds: float
    num_needs: int
    feeds: tuple[Feed, ...]
    priority: int
    """Smaller goes first of what a rank could do now."""

    @property
    def fills_gaps(self) -> bool:
        """Whether nobody waits for it: WEIGHT, and in a split schedule a whole backward that sends no gradient."""
        return self.priority == _PRIORITY[Kind.WEIGHT]

    def action(self, microbatch: int) -> Action:
        """Return the entry for a rank's list."""
        return Action(self.kind, self.segment.index, microbatch)


def tasks_of(graph: SegmentGraph, costs: Costs, split_backward: bool) -> tuple[Task, ...]:
    """Return the tasks of one microbatch; messages of one task are listed in the order of sending."""
    nodes = [
        (kind, segment)
        for kind in Kind
        for segment in graph.topological
        if kind in graph.kinds(segment, split_backward)
    ]
    numbers = {node: number for number, node in enumerate(nodes)}
    needs = [graph.needs(*node) for node in nodes]
    feeds: list[list[Feed]] = [[] for _ in nodes]
    for number, wanted in enumerate(needs):
        for need in wanted:
            feeds[numbers[need.kind, need.segment]].append(Feed(number, need.transfer))
    return tuple(
        Task(
            *node,
            costs.seconds(*node, split_backward and graph.splits(node[1])),
            len(needs[number]),
            _in_sending_order(graph, node, feeds[number]),
            _priority(graph, *node, split_backward),
        )
        for number, node in enumerate(nodes)
    )


def _priority(graph: SegmentGraph, kind: Kind, segment: Segment, split_backward: bool) -> int:
    feeds_nobody = split_backward and kind is Kind.BACKWARD and not graph.splits(segment)
    return _PRIORITY[Kind.WEIGHT if feeds_nobody else kind]


def _in_sending_order(graph: SegmentGraph, node: tuple[Kind, Segment], feeds: Sequence[Feed]) -> tuple[Feed, ...]:
    order = {id(transfer): place for place, transfer in enumerate(graph.sends(*node))}
    return tuple(sorted(feeds, key=lambda feed: -1 if feed.transfer is None else order[id(feed.transfer)]))


class Links:
    """When messages arrive: those of one ordered pair of ranks one after the other, then the latency."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._free_seconds: dict[tuple[int, int], float] = {}

    def arrival_seconds(self, source: int, target: int, transfer: Transfer | None, now_seconds: float) -> float:
        """Return when what `source` sends now is at `target`; None: nothing has to travel."""
        if transfer is None:
            return now_seconds
        start = max(now_seconds, self._free_seconds.get((source, target), 0.0))
        self._free_seconds[source, target] = end = start + self._costs.occupancy_seconds(transfer)
        return end + self._costs.latency_seconds
