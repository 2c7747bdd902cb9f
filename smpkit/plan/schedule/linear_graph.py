"""The segment graph of an assignment before anything has run: every unit hands its output to the next one.

For a model that is not a row of units this is a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise, takewhile

from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer

__all__ = ["linear_graph", "peaks", "runs_of"]


def runs_of(units: Sequence[UnitCost], assignment: Assignment) -> dict[Segment, list[UnitCost]]:
    """Return the units of every segment: a run of neighbours on one partition; in the order of execution."""
    runs: dict[Segment, list[UnitCost]] = {}
    for rank, run in groupby(units, lambda unit: assignment.partition_of[unit.name]):
        num_earlier = sum(segment.rank == rank for segment in runs)
        runs[Segment(rank, num_earlier)] = list(run)
    return runs


def linear_graph(
    runs: Mapping[Segment, Sequence[UnitCost]], num_partitions: int, has_backward: bool = True
) -> SegmentGraph:
    """Return the graph in which every segment hands the output of its last unit to the next one."""
    transfers = tuple(Transfer(source, target, runs[source][-1].output_bytes) for source, target in pairwise(runs))
    return SegmentGraph(num_partitions, tuple(runs), transfers, has_backward)


def peaks(
    schedule: Schedule, runs: Mapping[Segment, Sequence[UnitCost]], copies: Mapping[Segment, int] | None = None
) -> list[float]:
    """Return for each rank how many microbatches it holds at its peak.

    Microbatches are counted by what their live segments keep. A segment counts as the part of its rank's activations
    that it makes; with a segment per rank these are whole microbatches. From the first half of a split backward until
    the second, the gradients that wait for the second half count, too, and not what lies above them in the autograd
    graph: it has been freed. The backward of a recomputed segment is not split, so the segment ends with it.

    Args:
        copies: bytes that segments keep beside what their units keep.
    """
    found = []
    for rank, live in enumerate(_live_bytes(schedule, runs, copies or {})):
        of_rank = sum(unit.activation_bytes for segment, run in runs.items() if segment.rank == rank for unit in run)
        found.append(max(live, default=0) / of_rank if of_rank else float(schedule.peak_live_microbatches[rank]))
    return found


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
