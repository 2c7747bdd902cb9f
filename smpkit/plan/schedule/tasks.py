"""A graph with costs, as the planner uses it: the actions of one microbatch, numbered, so that planning is fast.

Every microbatch has the same tasks 0 .. n-1. `LinkModel` says when a message that one of them sends arrives; the
planner and the simulator use the same model, so their times are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from smpkit.plan.schedule.actions import Action, Costs
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer

_PRIORITY: Final = {Kind.BACKWARD: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}
"""What a rank runs first of what it could run now: backward frees memory, weights only fill gaps."""


@dataclass(frozen=True)
class Edge:
    """From a task to one that waits for its end, directly or for a message that it sends."""

    target: int
    """Number of the task that waits."""
    transfer: Transfer | None
    """The message; None where nothing travels."""


@dataclass(frozen=True)
class Task:
    """One action of every microbatch."""

    kind: Kind
    segment: Segment
    seconds: float
    num_needs: int
    edges: tuple[Edge, ...]
    priority: int
    """Of what a rank could run now, the smallest number goes first."""

    @property
    def fills_gaps(self) -> bool:
        """Whether no task waits for it: WEIGHT, and in a split schedule a whole backward that sends no gradient."""
        return self.priority == _PRIORITY[Kind.WEIGHT]

    def action(self, microbatch: int) -> Action:
        return Action(self.kind, self.segment.index, microbatch)


def tasks_of(graph: SegmentGraph, costs: Costs, split_backward: bool) -> tuple[Task, ...]:
    """Return the tasks of one microbatch; messages of one task are listed in the order of sending."""
    nodes: list[tuple[Kind, Segment]] = []
    for kind in Kind:
        nodes += [(kind, segment) for segment in graph.topological if kind in graph.kinds(segment, split_backward)]
    numbers = {node: number for number, node in enumerate(nodes)}
    needs = [graph.needs(*node) for node in nodes]
    edges: list[list[Edge]] = [[] for _ in nodes]
    for number, wanted in enumerate(needs):
        for need in wanted:
            edges[numbers[need.kind, need.segment]].append(Edge(number, need.transfer))
    return tuple(
        Task(
            kind=kind,
            segment=segment,
            seconds=costs.seconds(kind, segment, split_backward and graph.splits(segment)),
            num_needs=len(needs[number]),
            edges=_in_sending_order(graph, kind, segment, edges[number]),
            priority=_priority(graph, kind, segment, split_backward),
        )
        for number, (kind, segment) in enumerate(nodes)
    )


def _priority(graph: SegmentGraph, kind: Kind, segment: Segment, split_backward: bool) -> int:
    if split_backward and kind is Kind.BACKWARD and not graph.splits(segment):
        return _PRIORITY[Kind.WEIGHT]  # it sends no gradient, so no task waits for it
    return _PRIORITY[kind]


def _in_sending_order(graph: SegmentGraph, kind: Kind, segment: Segment, edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """Return the edges without a message first, then those with one, as the executor sends them."""
    order = {id(transfer): position for position, transfer in enumerate(graph.sends(kind, segment))}
    return tuple(sorted(edges, key=lambda edge: -1 if edge.transfer is None else order[id(edge.transfer)]))


class LinkModel:
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
