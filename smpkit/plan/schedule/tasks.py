"""A graph with costs, as the planner uses it: the actions of one microbatch, numbered, so that planning is fast.

Every microbatch has the same tasks 0 .. n-1. `LinkModel` says when a message that one of them sends arrives; the
planner and the simulator use the same model, so their times are equal to the last bit.
"""

from __future__ import annotations

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
    # What needs no message comes first. The executor sends in the order of the graph's transfers.
    order = {id(transfer): number for number, transfer in enumerate((None, *graph.transfers))}
    nodes: list[tuple[Kind, Segment]] = []
    for kind in Kind:
        nodes += [(kind, segment) for segment in graph.topological if kind in graph.kinds(segment, split_backward)]
    numbers = {node: number for number, node in enumerate(nodes)}
    needs = [graph.needs(*node) for node in nodes]
    edges: list[list[Edge]] = [[] for _ in nodes]
    for number, wanted in enumerate(needs):
        for need in wanted:
            edges[numbers[need.kind, need.segment]].append(Edge(number, need.transfer))
    tasks = []
    for (kind, segment), wanted, leading in zip(nodes, needs, edges, strict=True):
        is_split = split_backward and graph.splits(segment)
        # In a split schedule a backward that stays whole sends no gradient, so no task waits for it.
        fills_gaps = split_backward and kind is Kind.BACKWARD and not is_split
        in_order = tuple(sorted(leading, key=lambda edge: order[id(edge.transfer)]))
        seconds, priority = costs.seconds(kind, segment, is_split), _PRIORITY[Kind.WEIGHT if fills_gaps else kind]
        tasks.append(Task(kind, segment, seconds, len(wanted), in_order, priority))
    return tuple(tasks)


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
