"""The segment graph of an assignment as the model's own code makes it, recorded on tensors without data.

A search for an assignment cannot record each of them. It has one record, in which every unit has a rank of its own, and
joins ranks: a value then travels where its source and a consumer are apart, once to each rank. Where nothing was
recorded, every unit is assumed to hand its output to the next one; for a model that is not a row of units this is a
guess. `peaks` tells what ranks hold while a schedule of the graph runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Final

from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer


@dataclass(frozen=True)
class SentValue:
    """A value that one microbatch sends from a rank to another."""

    source: Segment
    target: Segment
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    differentiable: bool
    """Whether its gradient, of as many bytes, travels back."""
    consumer: str
    """The module or operation that needs it."""
    number: int = 0
    """The same for all sends of one value to several ranks."""
    fixed: float = 0.0
    """The share of its bytes that does not grow with the samples of a microbatch: 1 of a mask for all of them."""


@dataclass(frozen=True)
class RecordedGraph:
    """What one microbatch runs and sends under one assignment."""

    units: tuple[tuple[str, int], ...]
    """The assignment: name and rank of each unit, in execution order."""
    segments: tuple[tuple[Segment, tuple[str, ...]], ...]
    """The segments by rank, each with the units that it calls, in order; a unit that it calls twice is there twice."""
    values: tuple[SentValue, ...]
    """In the order of sending."""

    @classmethod
    def assumed(cls, costs: Sequence[UnitCost], assignment: Assignment) -> RecordedGraph:
        """Return what an assignment runs and sends if every unit hands its output to the next one."""
        places = [Segment(rank, 0) for rank in range(len(costs))]
        apart = cls(
            units=tuple((cost.name, rank) for rank, cost in enumerate(costs)),
            segments=tuple((place, (cost.name,)) for place, cost in zip(places, costs, strict=True)),
            values=tuple(
                SentValue(source, target, (), "", costs[source.rank].output_bytes, True, "", source.rank)
                for source, target in pairwise(places)
            ),
        )
        return _joined(apart, assignment.units, assignment.num_partitions)

    def under(self, assignment: Assignment) -> RecordedGraph | None:
        """Return what the microbatch would run and send under another assignment; None if this record cannot tell.

        It can if each unit has a rank of its own here. Operations between units then stay with the unit by which they
        ran; a job looks where most bytes are, which makes a difference where branches meet that end on several ranks.
        """
        if self.units == assignment.units:
            return self
        names = [name for name, _ in assignment.units]
        if self.units != tuple((name, rank) for rank, name in enumerate(names)):
            return None
        return _joined(self, assignment.units, assignment.num_partitions)

    def with_samples(self, factor: float) -> RecordedGraph:
        """Return the record of a microbatch with `factor` times the samples."""
        values = []
        for value in self.values:
            size = grown(factor, value.fixed)
            values.append(replace(value, num_bytes=round(size * value.num_bytes), fixed=value.fixed / size))
        return replace(self, values=tuple(values))

    def graph(self, num_ranks: int, has_backward: bool) -> SegmentGraph:
        """Return the graph that a schedule is made for."""
        counts = Counter(segment.rank for segment, _ in self.segments)
        messages = [
            Transfer(value.source, value.target, value.num_bytes, value.differentiable and has_backward)
            for value in self.values
        ]
        return SegmentGraph.of([counts[rank] for rank in range(num_ranks)], messages, has_backward)

    def runs(self, costs: Sequence[UnitCost]) -> dict[Segment, list[UnitCost]]:
        """Return the units of each segment; of one that is called several times, each call has its part of the costs.

        Units that the recorded microbatch has not called count in their rank's first segment.
        """
        of_unit = {cost.name: cost for cost in costs}
        num_calls = Counter(name for _, names in self.segments for name in names)
        runs = {segment: [_share(of_unit[name], num_calls[name]) for name in names] for segment, names in self.segments}
        for name, rank in self.units:
            if not num_calls[name]:
                runs[Segment(rank, 0)].append(of_unit[name])
        return runs

    def copies(self, costs: Sequence[UnitCost]) -> dict[Segment, int]:
        """Return for each segment the bytes that it receives and keeps beside what its units keep anyway."""
        unsaved = {cost.name: cost.unsaved_input_bytes for cost in costs}
        received: Counter[tuple[Segment, str]] = Counter()
        for value in self.values:
            unit = value.consumer
            while unit and unit not in unsaved:
                unit = unit.rpartition(".")[0]
            if unit and value.differentiable:
                received[value.target, unit] += value.num_bytes
        copies: Counter[Segment] = Counter()
        for (segment, unit), num_bytes in received.items():
            copies[segment] += min(num_bytes, unsaved[unit])
        return copies


def grown(factor: float, fixed: float) -> float:
    """Return by how much something grows with `factor` times the samples if a share of it does not grow."""
    return fixed + (1 - fixed) * factor


@lru_cache(maxsize=512)
def _joined(apart: RecordedGraph, units: tuple[tuple[str, int], ...], num_ranks: int) -> RecordedGraph:
    """Return the record of a microbatch whose units share ranks, from one in which unit `i` is alone on rank `i`.

    Segments begin as in a job: where a rank receives after it has sent.
    """
    rank_of = [rank for _, rank in units]
    current, has_sent = [0] * num_ranks, [False] * num_ranks
    place: dict[Segment, Segment] = {}
    values: list[SentValue] = []
    sent: set[tuple[int, int]] = set()
    """Numbers of values, each with a rank that has them."""
    for value in apart.values:
        source, target = rank_of[value.source.rank], rank_of[value.target.rank]
        place.setdefault(value.source, Segment(source, current[source]))
        if source != target and (value.number, target) not in sent:
            sent.add((value.number, target))
            current[target] += has_sent[target]
            has_sent[source], has_sent[target] = True, False
            ends = Segment(source, current[source]), Segment(target, current[target])
            values.append(replace(value, source=ends[0], target=ends[1]))
        place[value.target] = Segment(target, current[target])  # where the last of its inputs is
    called: dict[Segment, list[str]] = {
        Segment(rank, index): [] for rank in range(num_ranks) for index in range(current[rank] + 1)
    }
    for segment, names in apart.segments:
        called[place.get(segment, Segment(rank_of[segment.rank], 0))].extend(names)
    return RecordedGraph(units, tuple((segment, tuple(names)) for segment, names in called.items()), tuple(values))


_OF_EACH_CALL: Final = (
    *("flops", "recomputed_flops", "activation_bytes", "boundary_bytes", "moved_bytes", "spared_bytes"),
    *("postponed_bytes", "unsaved_input_bytes", "operations", "weight_products"),
)
"""The costs of a unit that are divided among its calls."""


def _share(cost: UnitCost, num_calls: int) -> UnitCost:
    """Return what one of several calls costs."""
    if num_calls == 1:
        return cost
    parts = {}
    for name in _OF_EACH_CALL:
        whole = getattr(cost, name)
        parts[name] = whole / num_calls if name.endswith("flops") else whole // num_calls
    return replace(cost, **parts)


def peaks(schedule: Schedule, runs: Mapping[Segment, Sequence[UnitCost]], copies: Mapping[Segment, int]) -> list[float]:
    """Return for each rank how many microbatches it holds at its peak.

    Microbatches are counted by what their live segments keep. A segment counts as the part of its rank's activations
    that it makes; with a segment per rank these are whole microbatches. From the first half of a split backward until
    the second, the gradients that wait for the second half count, too, and not what lies above them in the autograd
    graph: it has been freed. The backward of a recomputed segment is not split, so the segment ends with it.

    Args:
        copies: bytes that segments keep beside what their units keep.
    """
    most = []
    for rank, live in enumerate(_live_bytes(schedule, runs, copies)):
        of_rank = sum(unit.activation_bytes for segment, run in runs.items() if segment.rank == rank for unit in run)
        most.append(max(live, default=0) / of_rank if of_rank else float(schedule.peak_live_microbatches[rank]))
    return most


def _live_bytes(
    schedule: Schedule, runs: Mapping[Segment, Sequence[UnitCost]], copies: Mapping[Segment, int]
) -> Iterator[list[int]]:
    """Yield for each rank what it holds during each of its actions: activations, and gradients that wait."""
    kept = {
        segment: sum(unit.activation_bytes for unit in run) + copies.get(segment, 0) for segment, run in runs.items()
    }
    postponed = {segment: sum(unit.postponed_bytes for unit in run) - _freed(run) for segment, run in runs.items()}
    whole = {segment for segment, run in runs.items() if any(unit.recomputed_flops for unit in run)}
    for rank, actions in enumerate(schedule.actions):
        last: dict[tuple[int, int], Action] = {}
        for action in actions:
            if action.kind is not Kind.WEIGHT or Segment(rank, action.segment) not in whole:
                last[action.segment, action.microbatch] = action
        now, live, begun = 0, [], set()
        for action in actions:
            segment, key = Segment(rank, action.segment), (action.segment, action.microbatch)
            waits = last[key].kind is Kind.WEIGHT
            if key not in begun:
                begun.add(key)
                now += kept[segment]
            if action.kind is Kind.BACKWARD and waits:
                now += postponed[segment]
            live.append(now)
            if action == last[key]:
                now -= kept[segment] + (postponed[segment] if waits else 0)
        yield live


def _freed(run: Sequence[UnitCost]) -> int:
    """Return what the first half of a split backward frees: what units keep behind the last product with a weight."""
    behind = takewhile(lambda unit: not unit.weight_products, reversed(run))
    return sum(unit.activation_bytes for unit in behind)
