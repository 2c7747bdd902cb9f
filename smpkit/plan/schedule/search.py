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
from functools import cached_property
from math import ceil, inf
from typing import Any, Final

from smpkit.plan.schedule.actions import Costs, Schedule
from smpkit.plan.schedule.graph import Kind, ScheduleError, Segment, SegmentGraph
from smpkit.plan.schedule.list_scheduler import list_schedule
from smpkit.plan.schedule.simulate import simulate
from smpkit.plan.schedule.tasks import Edge, tasks_of
from smpkit.plan.schedule.templates import looped

_WORTH: Final = 0.002
"""A deeper schedule holds more microbatches; it must be faster by this share to be worth its memory."""


def simple(graph: SegmentGraph, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Run all forwards of a rank, then all its backwards; every microbatch is live at once (GPipe)."""
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
    to much: `depth` (on a chain `P - rank`, which is 1F1B), `depth + 1` and so on, multiples of how long a microbatch
    stays on a rank, and the same number for every rank. The fastest wins; of equals (within 0.2 %) the one with the
    fewest live microbatches. Of a loop (virtual stages) interleaved 1F1B is tried first.

    Args:
        active_microbatches: no rank ever holds more (SMP v1's parameter).
        split_backward: also try to split the backward into input and weight halves (zero bubble; our extension).
    """
    limit = min(active_microbatches, num_microbatches)
    return _Search(graph, num_microbatches, limit, costs or Costs()).best(split_backward and graph.has_backward)


@dataclass(frozen=True)
class _Candidate:
    """A schedule that was tried, and how long it takes."""

    schedule: Schedule
    seconds: float

    @property
    def order(self) -> tuple[int, int, bool, float]:
        """Among schedules of the same speed, smaller is better: fewer live microbatches, then fewer actions."""
        live_microbatches = sum(self.schedule.peak_live_microbatches)
        live_segments = sum(self.schedule.peak_live_segments)
        return live_microbatches, live_segments, self.schedule.splits_backward, self.seconds


@dataclass(frozen=True)
class _Search:
    """The search for the depth of `interleaved`."""

    graph: SegmentGraph
    num_microbatches: int
    limit: int
    """The most microbatches that any rank may hold."""
    costs: Costs

    def best(self, split_backward: bool) -> Schedule:
        """Return the fastest schedule; of those as fast, the one that holds least."""
        candidates = list(self._tried(split=False))
        if split_backward:
            candidates += self._tried(split=True)
        fastest = min(candidate.seconds for candidate in candidates)
        equals = [candidate for candidate in candidates if candidate.seconds <= fastest * (1 + _WORTH)]
        return min(equals, key=lambda candidate: candidate.order).schedule

    def _tried(self, split: bool) -> Iterator[_Candidate]:
        """Yield candidates, until no further one can be faster by enough."""
        bounds = bounds_of(self.graph, self.num_microbatches, self.costs, split)
        enough = bounds.step_seconds * (1 + _WORTH)
        for candidate in self._split(bounds) if split else self._whole(bounds):
            yield candidate
            if candidate.seconds <= enough:
                return

    def _whole(self, bounds: Bounds) -> Iterator[_Candidate]:
        """Yield schedules with whole backwards: templates, then caps from few live microbatches to many."""
        yield from self._looped()
        groups = (1, self.graph.num_ranks) if self.graph.loop_chunks > 1 else (1,)  # that go round a loop together
        for caps in _cap_choices(self.graph.depths, bounds.full_pipe, self.limit):
            if self._can_be_fast(caps, bounds):
                yield from (self._listed("interleaved", caps, group=group) for group in groups)
        if self.graph.has_backward and self.limit >= self.num_microbatches:
            # Where a microbatch comes back to ranks, an early backward can delay the last forward.
            all_forwards = simple(self.graph, self.num_microbatches, self.costs)
            yield from _simulated(replace(all_forwards, name="interleaved"), self.costs)

    def _split(self, bounds: Bounds) -> Iterator[_Candidate]:
        """Yield schedules with backwards in two halves, from few live microbatches to many."""
        choices: list[tuple[tuple[int, ...], Sequence[int] | None]] = list(self._postponing())
        choices += [(caps, None) for caps in _cap_choices(self.graph.depths, bounds.full_pipe, self.limit)]
        for caps, depths in sorted(choices, key=lambda choice: sum(choice[0])):
            if self._can_be_fast(caps, bounds):
                yield self._listed("zero_bubble", caps, split_backward=True, depths=depths)

    def _can_be_fast(self, caps: Sequence[int], bounds: Bounds) -> bool:
        """Tell whether a schedule with these caps may be chosen; of a long chain hundreds of others may not.

        Each microbatch takes one of the places that the cap of rank 0 allows, for as long as it stays there.
        """
        return self.num_microbatches * bounds.stay_seconds <= self._too_slow_seconds * caps[0]

    @cached_property
    def _too_slow_seconds(self) -> float:
        """How long a step takes that is not chosen."""
        depths = tuple(max(1, min(depth, self.limit)) for depth in self.graph.depths)
        return self._listed("interleaved", depths).seconds * (1 + _WORTH) ** 2

    def _listed(self, name: str, caps: tuple[int, ...], **options: Any) -> _Candidate:
        """Make a schedule with the list scheduler."""
        actions, seconds = list_schedule(self.graph, self.num_microbatches, caps, self.costs, **options)
        return _Candidate(Schedule(name, self.graph, self.num_microbatches, actions, caps), seconds)

    def _postponing(self) -> Iterator[tuple[tuple[int, ...], Sequence[int]]]:
        """Yield caps that leave room to postpone WEIGHT, and depths that keep forwards in step with 1F1B.

        Of a chain, P and `P - rank` make ZB-H1: no rank holds more than rank 0 does in 1F1B.
        """
        deepest = max(1, *self.graph.depths)
        for room in range(max(self.limit - deepest, 0) + 1):
            caps = (min(deepest + room, self.limit),) * self.graph.num_ranks
            yield caps, tuple(max(1, depth) for depth in self.graph.depths)
            if room:
                yield caps, tuple(max(1, depth + 1) for depth in self.graph.depths)

    def _looped(self) -> Iterator[_Candidate]:
        """Yield the templates for virtual stages if the graph is a loop, as far as the caps allow it."""
        if self.graph.loop_chunks < 2 or not self.graph.has_backward:
            return
        num_groups = max(1, self.num_microbatches // self.graph.num_ranks)
        for groups in (num_groups, min(num_groups + 1, self.num_microbatches)):
            for warmup_per_rank in (1, 2):
                schedule = looped(self.graph, self.num_microbatches, groups, warmup_per_rank)
                if max(schedule.caps) <= self.limit:
                    yield from _simulated(replace(schedule, name="interleaved"), self.costs)


def _simulated(schedule: Schedule, costs: Costs) -> Iterator[_Candidate]:
    """Yield the schedule with its time; nothing if it deadlocks, as some with uneven groups do."""
    with suppress(ScheduleError):
        yield _Candidate(schedule, simulate(schedule, costs).makespan_seconds)


def _cap_choices(depths: Sequence[int], full_pipe: Sequence[float], limit: int) -> list[tuple[int, ...]]:
    """Return the caps to try, from few live microbatches to many."""
    deepest = max(1, *depths)
    step = 1 + deepest // 64  # of hundreds of ranks not every number, each of which takes seconds to try
    shapes = [[depth + more for depth in depths] for more in range(0, deepest + 1, step)]
    shapes += [[ceil(live * factor / 4) for live in full_pipe] for factor in range(4, 13)]
    shapes += [[same] * len(depths) for same in (*range(1, 2 * deepest + 1, step), limit)]
    choices = {tuple(max(1, min(cap, limit)) for cap in shape) for shape in shapes}
    return sorted(choices, key=lambda caps: (sum(caps), caps))


@dataclass(frozen=True)
class Bounds:
    """What one microbatch that has all ranks to itself says about a step."""

    step_seconds: float
    """A time that no schedule can be faster than."""
    stay_seconds: float
    """How long a microbatch stays at least on rank 0, from its first action there on."""
    full_pipe: tuple[float, ...]
    """How many microbatches each rank must hold so that the busiest rank is never idle, if nothing ever queued."""


def bounds_of(graph: SegmentGraph, num_microbatches: int, costs: Costs, split_backward: bool = False) -> Bounds:
    """Follow one microbatch through the graph.

    A step takes at least, for each rank: what comes before its first action can start, all of its work, and what is
    left after its last one. Of a chain with equal stages that is the ideal `(M + P - 1) * (forward + backward)` plus
    one round of link time.
    """
    tasks = tasks_of(graph, costs, split_backward)
    # An order in which tasks can run: they are numbered as forwards can; backwards run the other way round.
    numbers = {kind: [number for number, task in enumerate(tasks) if task.kind is kind] for kind in Kind}
    order = [*numbers[Kind.FORWARD], *reversed(numbers[Kind.BACKWARD]), *numbers[Kind.WEIGHT]]
    heads, tails = [0.0] * len(tasks), [0.0] * len(tasks)  # before a task can start, and from its end to that of all
    waits = [-inf] * len(tasks)  # from the begin of rank 0's first task; those that do not wait for it have none
    for number in order:
        task = tasks[number]
        if task.kind is Kind.FORWARD and task.segment == Segment(0, 0):
            waits[number] = 0.0
        for edge in task.edges:
            for begins in (heads, waits):
                begin = begins[number] + task.seconds + _link_seconds(edge, costs)
                begins[edge.target] = max(begins[edge.target], begin)
    for number in reversed(order):
        for edge in tasks[number].edges:
            tail = _link_seconds(edge, costs) + tasks[edge.target].seconds + tails[edge.target]
            tails[number] = max(tails[number], tail)
    stays = [wait + task.seconds for wait, task in zip(waits, tasks, strict=True) if task.segment.rank == 0]
    ends = [head + task.seconds for head, task in zip(heads, tasks, strict=True)]
    step_seconds, work, live = max(ends, default=0.0), [], []
    for rank in range(graph.num_ranks):
        own = [number for number, task in enumerate(tasks) if task.segment.rank == rank]
        head = min((heads[number] for number in own), default=0.0)
        tail = min((tails[number] for number in own), default=0.0)
        work.append(sum(tasks[number].seconds for number in own))
        live.append(max((ends[number] for number in own), default=0.0) - head)
        step_seconds = max(step_seconds, head + num_microbatches * work[-1] + tail)
    period = max(work)
    return Bounds(step_seconds, max([0.0, *stays]), tuple(seconds / period if period else 0.0 for seconds in live))


def _link_seconds(edge: Edge, costs: Costs) -> float:
    return 0.0 if edge.transfer is None else costs.latency_seconds + costs.occupancy_seconds(edge.transfer)
