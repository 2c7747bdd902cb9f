"""Decide the order: `simple` and `interleaved` for any segment graph, and the templates that they are measured against.

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
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from typing import Final

from smpkit.errors import UsageError
from smpkit.plan.actions import Action, Costs, Message, Schedule, from_json, message_order, to_json
from smpkit.plan.bounds import bounds_of
from smpkit.plan.listing import list_schedule
from smpkit.plan.proof import check
from smpkit.plan.segments import Kind, Need, ScheduleError, Segment, SegmentGraph, Transfer
from smpkit.plan.simulate import simulate

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
    max_live: Sequence[int] | None = None,
    split_backward: bool = False,
) -> Schedule:
    """Run backward first, and choose by simulation how many microbatches each rank holds.

    A rank with few live microbatches waits for slow links; one with many needs memory. Tried are, from little memory
    to much: `depth` (on a chain `P - rank`, which is 1F1B), `depth + 1` and so on, `2 * depth - 1`, multiples of how
    long a microbatch stays on a rank, and the same number for every rank. The fastest wins; of equals (within 0.2 %)
    the one with the fewest live microbatches.

    Args:
        active_microbatches: no rank ever holds more (SMP v1's parameter).
        max_live: for each rank, how many fit its memory.
        split_backward: also try to split the backward into input and weight halves (zero bubble; our extension).
    """
    _require_positive(num_microbatches, "num_microbatches")
    _require_positive(active_microbatches, "active_microbatches")
    if max_live is not None and (len(max_live) != graph.num_ranks or min(max_live) < 1):
        raise UsageError(f"`max_live` {list(max_live)} is not a positive number for each of {graph.num_ranks} ranks")
    limit = min(active_microbatches, num_microbatches)
    limits = [min(limit, fitting) for fitting in max_live or [limit] * graph.num_ranks]
    search = _Search(graph, num_microbatches, limits, costs or Costs())
    return search.best((False, True) if split_backward and graph.has_backward else (False,))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Write 1F1B of a chain down directly: warm up with `P - 1 - rank` forwards, then alternate."""
    _require_positive(num_microbatches, "num_microbatches")
    actions = tuple(
        tuple(_alternate(min(num_ranks - 1 - rank, num_microbatches), [(0, m) for m in range(num_microbatches)]))
        for rank in range(num_ranks)
    )
    caps = tuple(min(num_ranks - rank, num_microbatches) for rank in range(num_ranks))
    return Schedule("1f1b", SegmentGraph.chain(num_ranks), num_microbatches, actions, caps)


def looped(graph: SegmentGraph, num_microbatches: int) -> Schedule:
    """Write interleaved 1F1B of a loop down.

    A rank holds several chunks of the model, so filling the pipe takes a part of the time. Microbatches go round in
    groups of P; raises UsageError unless the graph is a loop, has a backward, and P divides their number.
    """
    num_ranks, num_chunks = graph.num_ranks, graph.loop_chunks
    if not num_chunks or not graph.has_backward or num_microbatches % num_ranks or num_microbatches < 1:
        raise UsageError(f"{num_microbatches} microbatches cannot go round this graph of {num_ranks} ranks in groups")
    rounds = [
        (chunk, group + microbatch)
        for group in range(0, num_microbatches, num_ranks)
        for chunk in range(num_chunks)
        for microbatch in range(num_ranks)
    ]
    actions = []
    for rank in range(num_ranks):
        warmup = (num_ranks - 1 - rank) * (2 if num_chunks > 1 else 1) + (num_chunks - 1) * num_ranks
        actions.append(tuple(_alternate(min(warmup, len(rounds)), rounds, num_chunks)))
    draft = Schedule("looped", graph, num_microbatches, tuple(actions), (num_microbatches,) * num_ranks)
    return replace(draft, caps=draft.peak_live_microbatches)


def _alternate(warmup: int, rounds: Sequence[tuple[int, int]], num_chunks: int = 1) -> Iterator[Action]:
    """Yield `warmup` forwards, then forward and backward in turn; backward takes the chunks in reverse order."""
    forwards = iter(rounds)
    yield from (Action(Kind.FORWARD, *place) for place in islice(forwards, warmup))
    for chunk, microbatch in rounds:
        yield from (Action(Kind.FORWARD, *place) for place in islice(forwards, 1))
        yield Action(Kind.BACKWARD, num_chunks - 1 - chunk, microbatch)


@dataclass(frozen=True)
class _Found:
    """A schedule that was tried."""

    schedule: Schedule
    seconds: float

    @property
    def order(self) -> tuple[int, bool, float]:
        """Among schedules of the same speed, smaller is better: fewer live microbatches, then fewer actions."""
        return sum(self.schedule.peak_live_microbatches), self.schedule.splits_backward, self.seconds


@dataclass(frozen=True)
class _Search:
    """The search for the depth of `interleaved`."""

    graph: SegmentGraph
    num_microbatches: int
    limits: Sequence[int]
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
        if not split and (template := self._looped()):
            yield template
        for caps in _cap_choices(self.graph.depths, bounds.full_pipe, self.limits):
            actions, seconds = list_schedule(self.graph, self.num_microbatches, caps, self.costs, split_backward=split)
            yield _Found(Schedule("interleaved", self.graph, self.num_microbatches, actions, caps), seconds)
            if seconds <= enough:
                return

    def _looped(self) -> _Found | None:
        """Return the template for virtual stages if the graph is one and the caps allow it."""
        if self.graph.loop_chunks < 2 or not self.graph.has_backward or self.num_microbatches % self.graph.num_ranks:
            return None
        schedule = replace(looped(self.graph, self.num_microbatches), name="interleaved")
        if any(live > limit for live, limit in zip(schedule.caps, self.limits, strict=True)):
            return None
        return _Found(schedule, simulate(schedule, self.costs).makespan_seconds)


def _cap_choices(depths: Sequence[int], full_pipe: Sequence[float], limits: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the caps to try, from few live microbatches to many."""
    deepest = max(1, *depths)
    shapes = [[depth + more for depth in depths] for more in range(deepest + 1)]
    shapes += [[2 * depth - 1 for depth in depths]]
    shapes += [[ceil(live * factor / 4) for live in full_pipe] for factor in range(4, 13)]
    shapes += [[same] * len(depths) for same in (*range(1, 2 * deepest + 1), max(limits))]
    choices = {tuple(max(1, min(cap, limit)) for cap, limit in zip(shape, limits, strict=True)) for shape in shapes}
    return sorted(choices, key=lambda caps: (sum(caps), caps))


def _require_positive(value: int, name: str) -> None:
    if value < 1:
        raise UsageError(f"`{name}` is {value}", hint="use 1 or more")
