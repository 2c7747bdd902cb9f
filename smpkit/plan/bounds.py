"""What one microbatch alone tells about all schedules: a time that none can beat, and how many a rank has to hold."""

from __future__ import annotations

from dataclasses import dataclass

from smpkit.plan.actions import Costs
from smpkit.plan.segments import SegmentGraph
from smpkit.plan.tasks import Feed, Task, tasks_of

__all__ = ["Bounds", "bounds_of"]


@dataclass(frozen=True)
class Bounds:
    """What one microbatch that has all ranks to itself takes; ranks without a segment have zeros."""

    way_seconds: float
    """From its start to its end."""
    head_seconds: tuple[float, ...]
    """From its start until it reaches each rank."""
    work_seconds: tuple[float, ...]
    """How long each rank computes for it."""
    tail_seconds: tuple[float, ...]
    """At least this long other ranks go on after the last action of each rank."""
    stay_seconds: tuple[float, ...]
    """From the start of each rank's first action to the end of its last: how long it is live there."""

    def lower_bound_seconds(self, num_microbatches: int) -> float:
        """Return a time that no schedule can be faster than.

        For each rank: what comes before its first action can start, all of its work, and what is left after its last
        one. Of a chain with equal stages: the ideal `(M + P - 1) * (forward + backward)` plus one round of link time.
        """
        parts = zip(self.head_seconds, self.work_seconds, self.tail_seconds, strict=True)
        return max(self.way_seconds, *(head + num_microbatches * work + tail for head, work, tail in parts))

    @property
    def full_pipe(self) -> tuple[float, ...]:
        """How many microbatches each rank has to hold for the busiest rank to be never idle, if nothing ever queued."""
        period = max(self.work_seconds)
        return tuple(stay / period if period else 0.0 for stay in self.stay_seconds)


def bounds_of(graph: SegmentGraph, costs: Costs, split_backward: bool = False) -> Bounds:
    """Follow one microbatch through the graph."""
    tasks = tasks_of(graph, costs, split_backward)
    heads, tails = _heads_and_tails(tasks, costs)
    own = [[n for n, task in enumerate(tasks) if task.segment.rank == rank] for rank in range(graph.num_ranks)]
    ends = [head + task.seconds for head, task in zip(heads, tasks, strict=True)]
    return Bounds(
        way_seconds=max(ends, default=0.0),
        head_seconds=tuple(min((heads[n] for n in numbers), default=0.0) for numbers in own),
        work_seconds=tuple(sum(tasks[n].seconds for n in numbers) for numbers in own),
        tail_seconds=tuple(min((tails[n] for n in numbers), default=0.0) for numbers in own),
        stay_seconds=tuple(
            max((ends[n] for n in numbers), default=0.0) - min((heads[n] for n in numbers), default=0.0)
            for numbers in own
        ),
    )


def _heads_and_tails(tasks: tuple[Task, ...], costs: Costs) -> tuple[list[float], list[float]]:
    """Return for each task: the time before it can start, and the time from its end until everything has ended."""
    heads, tails = [0.0] * len(tasks), [0.0] * len(tasks)
    order = _topological(tasks)
    for number in order:
        for feed in tasks[number].feeds:
            way = heads[number] + tasks[number].seconds + _link_seconds(feed, costs)
            heads[feed.target] = max(heads[feed.target], way)
    for number in reversed(order):
        for feed in tasks[number].feeds:
            way = _link_seconds(feed, costs) + tasks[feed.target].seconds + tails[feed.target]
            tails[number] = max(tails[number], way)
    return heads, tails


def _topological(tasks: tuple[Task, ...]) -> list[int]:
    missing = [task.num_needs for task in tasks]
    order = [number for number, count in enumerate(missing) if not count]
    for number in order:
        for feed in tasks[number].feeds:
            missing[feed.target] -= 1
            if not missing[feed.target]:
                order.append(feed.target)
    return order


def _link_seconds(feed: Feed, costs: Costs) -> float:
    return 0.0 if feed.transfer is None else costs.latency_seconds + costs.occupancy_seconds(feed.transfer)
