"""`decide` plans the schedule that a run follows, and takes one that ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.decide import Policy, decide
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.schedule.actions import check
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.recorded_graph import RecordedGraph, SentValue
from smpkit.plan.speed import Speed
from tests.plan.graphs import carrying
from tests.plan.tune.models import gpt

SPEED = Speed(1e14, LinkSpeed(2e10, 2e10), 1e-5, 1e-10)
SIMPLE: dict[str, Any] = {"pipeline": "simple", "active_microbatches": 8}
EVEN = gpt(11)
"""Four stages of three layers, or two and the head."""


def config(**values: Any) -> ModelParallelConfig:
    made, _ = ModelParallelConfig.from_sources({"pipeline_parallel_degree": 4, "microbatches": 8, **values}, None)
    return made


@pytest.mark.parametrize(
    ("degree", "active", "live"),
    [(2, 4, (3, 1)), (4, 6, (5, 4, 3, 1)), (4, 4, (4, 4, 3, 1)), (4, 2, (2, 2, 2, 1))],
    ids=["two ranks", "four ranks", "no room on the first", "less than 1F1B"],
)
def test_ranks_hold_one_microbatch_more_than_1f1b_where_there_is_room(
    degree: int, active: int, live: tuple[int, ...]
) -> None:
    schedule = Policy("interleaved", active).schedule(carrying(8, SegmentGraph.chain(degree)), 16)
    check(schedule)
    assert schedule.peak_live_microbatches == live
    plan = decide(config(pipeline_parallel_degree=degree, active_microbatches=active, microbatches=16), degree)
    assert plan.timeline.schedule.actions == schedule.actions


def test_an_evaluation_holds_no_more_than_it_may() -> None:
    # All forwards in a row would hold every microbatch between the two visits to a rank.
    schedule = Policy("interleaved", 3).schedule(SegmentGraph.loop(2, 2, has_backward=False), 8)
    check(schedule)
    assert max(schedule.peak_live_microbatches) <= 3


def test_copies_of_received_values_are_memory_of_the_rank_that_has_them() -> None:
    size = 2**20
    names = [each.name for each in EVEN.costs]
    places = [Segment(rank, 0) for rank in range(len(names))]
    recorded = RecordedGraph(
        units=tuple((name, rank) for rank, name in enumerate(names)),
        segments=tuple((place, (name,)) for place, name in zip(places, names, strict=True)),
        values=tuple(
            SentValue(places[rank - 1], places[rank], (size,), "uint8", size, True, names[rank], rank)
            for rank in range(1, len(names))
        ),
    )

    def activations(unsaved: int) -> list[int]:
        units = [replace(each, cost=replace(each.cost, unsaved_input_bytes=unsaved)) for each in EVEN.units]
        plan = decide(config(**SIMPLE), 4, replace(EVEN, units=tuple(units), recorded=recorded), SPEED)
        return [each.activations_bytes or 0 for each in plan.memory]

    # Eight microbatches are live; the first stage receives nothing.
    more = [after - before for before, after in zip(activations(0), activations(size), strict=True)]
    assert more == [0, *[8 * size] * 3]
