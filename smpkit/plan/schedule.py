"""Decide the order: `simple`, `interleaved` and its split form `zero_bubble`, for any segment graph.

Three ranks, four microbatches, every action one unit of time (right; a dot is idle), drawn by `smpkit.plan.draw`.
`simple` (GPipe)::

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
from smpkit.plan.actions import Action, Costs, Message, Schedule, from_json, message_order, to_json
from smpkit.plan.bounds import bounds_of
from smpkit.plan.listing import list_schedule
from smpkit.plan.proof import check
from smpkit.plan.segments import Kind, Need, ScheduleError, Segment, SegmentGraph, Transfer
from smpkit.plan.simulate import simulate
from smpkit.plan.templates import looped, one_f_one_b

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Message",
    "Need",
    "Schedule",
    "ScheduleError",
    "Segment",
    "SegmentGraph",
    "Transfer",
    "check",
    "from_json",
    "interleaved",
    "looped",
    "message_order",
    "one_f_one_b",
    "simple",
    "to_json",
]

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
