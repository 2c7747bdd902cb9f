"""Decide the order: `simple`, `interleaved` and its split form `zero_bubble`, for any segment graph.

Three ranks, four microbatches, every action one unit of time (right; a dot is idle), drawn by
`smpkit.plan.schedule.draw`. `simple` (GPipe)::

    stage 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    stage 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    stage 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

`interleaved` (1F1B), which holds three microbatches on rank 0 instead of four::

    stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from smpkit.errors import UsageError
from smpkit.plan.schedule.actions import Costs, Schedule
from smpkit.plan.schedule.graph import ScheduleError, SegmentGraph
from smpkit.plan.schedule.list_scheduler import list_schedule
from smpkit.plan.schedule.simulate import simulate
from smpkit.plan.schedule.tasks import Feed, Task, tasks_of
from smpkit.plan.schedule.templates import looped

__all__ = ["Bounds", "bounds_of", "interleaved", "simple"]

_WORTH: Final = 0.002
"""A deeper schedule, which holds more microbatches, must be faster by this share to be worth its memory."""


def simple(graph: SegmentGraph, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Run all forwards of a rank, then all its backwards; every microbatch is live at once (GPipe)."""
    _require_positive(num_microbatches, "num_microbatches")
    caps = (num_microbatches,) * graph.num_ranks
    actions, _ = list_schedule(graph, num_microbatches, caps, costs or Costs(), forwards_first=graph.has_backward)
    return Schedule("simple", graph, num_microbatches, actions, caps)


def interleaved(
    graph: SegmentGraph,
    num_microbatches: int,
    active_microbatches: int,
    costs: Costs | None = None,
    *,
    split_backward: bool = False,
) -> Schedule:
    """Run backward first, and choose by simulation how many microbatches each rank holds.

    A rank with few live microbatches waits for slow links; one with many needs memory. Tried are, from little memory
    to much: `depth` (on a chain `P - rank`, which is 1F1B), `depth + 1` and so on, `2 * depth - 1`, multiples of how
    long a microbatch stays on a rank, and the same number for every rank. The fastest wins; of equals (within 0.2 %)
    the one with the fewest live microbatches. Of a loop (virtual stages) interleaved 1F1B is tried first.

    Args:
        active_microbatches: no rank ever holds more (SMP v1's parameter).
        split_backward: also try to split the backward into input and weight halves (zero bubble; our extension).
    """
    _require_positive(num_microbatches, "num_microbatches")
    _require_positive(active_microbatches, "active_microbatches")
    search = _Search(graph, num_microbatches, min(active_microbatches, num_microbatches), costs or Costs())
    return search.best((False, True) if split_backward and graph.has_backward else (False,))


@dataclass(frozen=True)
class _Found:
    """A schedule that was tried."""

    schedule: Schedule
    seconds: float

    @property
    def order(self) -> tuple[int, int, bool, float]:
        """Among schedules of the same speed, smaller is better: fewer live microbatches, then fewer actions."""
        live = sum(self.schedule.peak_live_microbatches), sum(self.schedule.peak_live_segments)
        return *live, self.schedule.splits_backward, self.seconds


@dataclass(frozen=True)
class _Search:
    """The search for the depth of `interleaved`."""

    graph: SegmentGraph
    num_microbatches: int
    limit: int
    """The most microbatches that any rank may hold."""
    costs: Costs

    def best(self, splits: Sequence[bool]) -> Schedule:
        """Return the fastest schedule, or the one that holds least of those as fast."""
        found = [found for split in splits for found in self._tried(split)]
        fastest = min(each.seconds for each in found)
        equals = [each for each in found if each.seconds <= fastest * (1 + _WORTH)]
        return min(equals, key=lambda each: each.order).schedule

    def _tried(self, split: bool) -> Iterator[_Found]:
        """Try caps from few live microbatches to many, until nothing can be faster by enough."""
        bounds = bounds_of(self.graph, self.costs, split)
        enough = bounds.lower_bound_seconds(self.num_microbatches) * (1 + _WORTH)
        for template in () if split else self._looped():
            yield template
            if template.seconds <= enough:
                return
        name = "zero_bubble" if split else "interleaved"
        choices: list[tuple[tuple[int, ...], Sequence[int] | None]] = [
            (caps, None) for caps in _cap_choices(self.graph.depths, bounds.full_pipe, self.limit)
        ]
        if split:
            choices = sorted([*self._postponing(), *choices], key=lambda choice: sum(choice[0]))
        for caps, depths in choices:
            for group in (1,) if split else self._group_sizes():
                actions, seconds = list_schedule(
                    self.graph,
                    self.num_microbatches,
                    caps,
                    self.costs,
                    split_backward=split,
                    group=group,
                    depths=depths,
                )
                yield _Found(Schedule(name, self.graph, self.num_microbatches, actions, caps), seconds)
                if seconds <= enough:
                    return
        if not split and self.graph.has_backward and self.limit >= self.num_microbatches:
            # Where a microbatch comes back to ranks, an early backward can be in the way of the last forward.
            all_forwards = simple(self.graph, self.num_microbatches, self.costs)
            yield from _played(replace(all_forwards, name=name), self.costs)

    def _postponing(self) -> Iterator[tuple[tuple[int, ...], Sequence[int]]]:
        """Yield caps that leave room to postpone WEIGHT, and depths that keep forwards in step with 1F1B.

        Of a chain, P and `P - rank` make ZB-H1: no rank holds more than rank 0 does in 1F1B.
        """
        deepest = max(1, *self.graph.depths)
        for room in range(max(self.limit - deepest, 0) + 1):
            caps = (min(deepest + room, self.limit),) * self.graph.num_ranks
            for more in {0, min(1, room)}:
                yield caps, tuple(max(1, depth + more) for depth in self.graph.depths)

    def _group_sizes(self) -> tuple[int, ...]:
        """Say how many microbatches may go round together; only in a loop it makes a difference worth trying."""
        return (1, self.graph.num_ranks) if self.graph.loop_chunks > 1 else (1,)

    def _looped(self) -> Iterator[_Found]:
        """Yield the templates for virtual stages if the graph is a loop, as far as the caps allow it."""
        if self.graph.loop_chunks < 2 or not self.graph.has_backward:
            return
        num_groups = max(1, self.num_microbatches // self.graph.num_ranks)
        for groups in (num_groups, min(num_groups + 1, self.num_microbatches)):
            for warmup_per_rank in (1, 2):
                schedule = replace(
                    looped(self.graph, self.num_microbatches, groups, warmup_per_rank), name="interleaved"
                )
                if max(schedule.caps) <= self.limit:
                    yield from _played(schedule, self.costs)


def _played(schedule: Schedule, costs: Costs) -> Iterator[_Found]:
    """Yield the schedule with its time; nothing if it stands still, as some with uneven groups would."""
    with suppress(ScheduleError):
        yield _Found(schedule, simulate(schedule, costs).makespan_seconds)


def _cap_choices(depths: Sequence[int], full_pipe: Sequence[float], limit: int) -> list[tuple[int, ...]]:
    """Return the caps to try, from few live microbatches to many."""
    deepest = max(1, *depths)
    shapes = [[depth + more for depth in depths] for more in range(deepest + 1)]
    shapes += [[2 * depth - 1 for depth in depths]]
    shapes += [[ceil(live * factor / 4) for live in full_pipe] for factor in range(4, 13)]
    shapes += [[same] * len(depths) for same in (*range(1, 2 * deepest + 1), limit)]
    choices = {tuple(max(1, min(cap, limit)) for cap in shape) for shape in shapes}
    return sorted(choices, key=lambda caps: (sum(caps), caps))


def _require_positive(value: int, name: str) -> None:
    if value < 1:
        raise UsageError(f"`{name}` is {value}", hint="use 1 or more")


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
