"""Improve a partition by simulation: move a boundary by one unit as long as steps get faster or memory smaller.

A cut of even cost is not yet the best pipeline: an early rank holds more microbatches than a late one, and a boundary
after a unit with a small output loads its link less. Here both are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from smpkit.plan.actions import Costs, Schedule
from smpkit.plan.assignment import Assignment, UnitCost, assignment_of
from smpkit.plan.listing import list_schedule
from smpkit.plan.segments import SegmentGraph
from smpkit.plan.walk import runs_of, walk

__all__ = ["Objective", "Prediction", "predict", "refine"]

_WORTH: Final = 1e-6
"""A move must improve the score, which starts at one, by this much; otherwise rounding could go round in circles."""


@dataclass(frozen=True)
class Objective:
    """What a step is like for which a partition is to be good."""

    num_microbatches: int
    active_microbatches: int
    memory_weight: float = 0.0
    """1: only the memory of the fullest rank counts; 0: only the time of a step."""
    seconds_per_flop: float = 1.0
    backward_ratio: float = 2.0
    """Time of a backward in forwards, without what it computes again."""
    latency_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    parameter_copies: float = 4.0
    """Memory per parameter byte: itself, its gradient, and the optimizer's (two for Adam)."""
    memory_limit_bytes: int | None = None
    """What fits a rank; to keep to it comes before everything else."""


@dataclass(frozen=True)
class Prediction:
    """What a step does with an assignment."""

    step_seconds: float
    memory_bytes: tuple[int, ...]
    """The peak of each rank: parameters with copies, activations of its live microbatches, and one recomputation."""


def predict(units: Sequence[UnitCost], assignment: Assignment, objective: Objective) -> Prediction:
    """Simulate a step in which every unit hands its output to the next one."""
    graph, costs = _pipeline(units, assignment, objective)
    caps = [max(1, min(depth, objective.active_microbatches)) for depth in graph.depths]
    actions, seconds = list_schedule(graph, objective.num_microbatches, caps, costs)
    live = Schedule("predicted", graph, objective.num_microbatches, actions, tuple(caps)).peak_live_microbatches
    memory = tuple(
        round(objective.parameter_copies * load.parameters_bytes) + count * load.activation_bytes + again
        for load, count, again in zip(assignment.loads, live, _recomputed_bytes(units, assignment), strict=True)
    )
    return Prediction(seconds, memory)


def _recomputed_bytes(units: Sequence[UnitCost], assignment: Assignment) -> list[int]:
    """Return what the largest recomputation of each rank holds."""
    largest = [0] * assignment.num_partitions
    for unit in units:
        place = assignment.partition_of[unit.name]
        largest[place] = max(largest[place], unit.recomputed_bytes)
    return largest


def _pipeline(units: Sequence[UnitCost], assignment: Assignment, objective: Objective) -> tuple[SegmentGraph, Costs]:
    """Return the segments that an assignment makes, a run of units on one partition each, and their costs."""
    runs = runs_of(units, assignment)
    forward = {segment: objective.seconds_per_flop * sum(unit.flops for unit in run) for segment, run in runs.items()}
    backward = {
        segment: objective.backward_ratio * forward[segment]
        + objective.seconds_per_flop * sum(unit.recomputed_flops for unit in run)
        for segment, run in runs.items()
    }
    costs = Costs(
        forward, backward, latency_seconds=objective.latency_seconds, seconds_per_byte=objective.seconds_per_byte
    )
    return walk(runs, assignment.num_partitions), costs


def refine(
    units: Sequence[UnitCost], assignment: Assignment, objective: Objective, fixed: frozenset[str] = frozenset()
) -> Assignment:
    """Return an assignment at least as good as the given one, which no move of one unit over a boundary improves.

    Args:
        units: in execution order.
        fixed: names of units that may not move, because they are pinned or tied to others.
    """
    first = predict(units, assignment, objective)
    best, best_score = assignment, _score(first, first, objective)
    while True:
        moves = [(_score(predict(units, to, objective), first, objective), to) for to in _moves(units, best, fixed)]
        score, move = min(moves, key=lambda each: each[0], default=(best_score, best))
        if not _is_better(score, best_score):
            return best
        best, best_score = move, score


Score = tuple[float, float]
"""Bytes above the limit, then time and memory by weight, as shares of those of the first assignment."""


def _score(prediction: Prediction, first: Prediction, objective: Objective) -> Score:
    limit = objective.memory_limit_bytes
    excess = 0 if limit is None else sum(max(0, memory - limit) for memory in prediction.memory_bytes)
    seconds = prediction.step_seconds / first.step_seconds if first.step_seconds else 1.0
    memory = max(prediction.memory_bytes) / max(first.memory_bytes) if max(first.memory_bytes) else 1.0
    return excess, objective.memory_weight * memory + (1 - objective.memory_weight) * seconds


def _is_better(score: Score, than: Score) -> bool:
    return score[0] < than[0] or (score[0] == than[0] and score[1] < than[1] - _WORTH)


def _moves(units: Sequence[UnitCost], assignment: Assignment, fixed: frozenset[str]) -> Iterator[Assignment]:
    """Yield the assignments in which one unit at a boundary has changed sides; no partition becomes empty."""
    places = [place for _, place in assignment.units]
    for left, (place, next_place) in enumerate(pairwise(places)):
        for index, target in ((left, next_place), (left + 1, place)):
            leaves = places[index]
            if leaves != target and units[index].name not in fixed and places.count(leaves) > 1:
                moved = {i: target if i == index else each for i, each in enumerate(places)}
                yield assignment_of(units, moved, assignment.num_partitions)
