from __future__ import annotations

import json
from dataclasses import asdict

from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.schedule.graph import Segment, Transfer
from smpkit.plan.schedule.recorded_graph import RecordedGraph, SentValue

HERE, THERE, BACK = Segment(0, 0), Segment(1, 0), Segment(0, 1)
THERE_AND_BACK = RecordedGraph(
    units=(("embed", 0), ("block", 1), ("head", 0), ("spare", 1)),
    segments=((HERE, ("embed", "block")), (BACK, ("head", "embed")), (THERE, ("block",))),
    values=(
        SentValue(HERE, THERE, (2, 8), "float32", 64, True, "block"),
        SentValue(THERE, BACK, (2,), "int64", 16, False, "head"),
    ),
)
COSTS = [
    UnitCost("embed", 10, activation_bytes=100, flops=6.0, boundary_bytes=40, recomputed_flops=2.0),
    UnitCost("block", flops=8.0),
    UnitCost("head", flops=1.0),
    UnitCost("spare", flops=3.0),
]


def test_values_are_messages_and_what_a_rank_keeps_orders_its_segments() -> None:
    graph = THERE_AND_BACK.graph(2, has_backward=True)
    assert graph.segments == (HERE, BACK, THERE)
    assert graph.transfers == (
        Transfer(HERE, THERE, 64, True),
        Transfer(THERE, BACK, 16, False),
        Transfer(HERE, BACK),
    )
    assert not any(each.differentiable for each in THERE_AND_BACK.graph(2, has_backward=False).transfers[:2])


def test_each_call_of_a_unit_has_its_part_of_the_costs() -> None:
    runs = THERE_AND_BACK.runs(COSTS)
    embed = UnitCost("embed", 10, activation_bytes=50, flops=3.0, boundary_bytes=20, recomputed_flops=1.0)
    half, spare = UnitCost("block", flops=4.0), COSTS[3]
    assert runs == {HERE: [embed, half], BACK: [COSTS[2], embed], THERE: [half, spare]}
    assert sum(cost.flops for run in runs.values() for cost in run) == sum(cost.flops for cost in COSTS)


def test_it_counts_for_its_assignment_alone() -> None:
    units = THERE_AND_BACK.units
    assert THERE_AND_BACK.fits(Assignment(2, units, ()))
    assert not THERE_AND_BACK.fits(Assignment(2, (*units[:-1], ("spare", 0)), ()))


def test_it_is_read_as_it_was_written() -> None:
    assert RecordedGraph.from_plain(json.loads(json.dumps(asdict(THERE_AND_BACK)))) == THERE_AND_BACK
