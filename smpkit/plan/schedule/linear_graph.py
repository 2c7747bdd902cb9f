"""The segment graph of an assignment before anything has run: every unit hands its output to the next one.

For a model that is not a row of units this is a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.schedule.actions import Action, Schedule, live_segments
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer

__all__ = ["linear_graph", "peak_live_shares", "runs_of"]


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


def peak_live_shares(schedule: Schedule, runs: Mapping[Segment, Sequence[UnitCost]]) -> list[float]:
    """Return for each rank how many microbatches it holds at its peak, by what their live segments keep.

    A segment counts as the part of its rank's activations that it makes; with a segment per rank these are whole
    microbatches. From the first half of a split backward until the second, the gradients that wait for the second half
    count, too. The backward of a recomputed segment is not split, so the segment ends with it.
    """
    kept = {segment: sum(unit.activation_bytes for unit in run) for segment, run in runs.items()}
    postponed = {segment: sum(unit.postponed_bytes for unit in run) for segment, run in runs.items()}
    whole = {segment for segment, run in runs.items() if any(unit.recomputed_flops for unit in run)}
    shares = []
    for rank, actions in enumerate(schedule.actions):
        of_rank = sum(num_bytes for segment, num_bytes in kept.items() if segment.rank == rank)
        ends = [each for each in actions if each.kind is not Kind.WEIGHT or Segment(rank, each.segment) not in whole]
        halves = [each for each in ends if each.kind is Kind.WEIGHT]
        if not schedule.splits_backward and schedule.graph.counts[rank] == 1:
            shares.append(float(schedule.peak_live_microbatches[rank]))
            continue
        peak = 0
        for live, waiting in _held(ends, halves):
            held = sum(kept[Segment(rank, index)] for index in live)
            peak = max(peak, held + sum(postponed[Segment(rank, index)] for index in waiting))
        shares.append(peak / of_rank if of_rank else float(schedule.peak_live_microbatches[rank]))
    return shares


def _held(actions: Sequence[Action], halves: Sequence[Action]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each action of a rank the segments, by index, of which it holds activations, and waiting gradients."""
    split = {(each.segment, each.microbatch) for each in halves}
    waiting: set[tuple[int, int]] = set()
    for action, live in zip(actions, live_segments(tuple(actions)), strict=True):
        key = (action.segment, action.microbatch)
        if action.kind is Kind.BACKWARD and key in split:
            waiting.add(key)
        yield [index for index, _ in live], [index for index, _ in waiting]
        if action.kind is Kind.WEIGHT:
            waiting.discard(key)
