from __future__ import annotations

import json
from typing import Any

import pytest

from smpkit.plan.schedule.actions import Action, Costs, Schedule, check, from_json, to_json
from smpkit.plan.schedule.graph import Kind, ScheduleError, Segment, SegmentGraph
from smpkit.plan.schedule.search import interleaved
from smpkit.plan.schedule.templates import one_f_one_b
from tests.plan.graphs import NAMED


@pytest.mark.parametrize(
    ("action", "label"),
    [(Action(Kind.FORWARD, 0, 3), "F3"), (Action(Kind.BACKWARD, 1, 3), "B3.1"), (Action(Kind.WEIGHT, 0, 12), "W12")],
    ids=["first segment", "second segment", "weight"],
)
def test_labels_are_short_and_read_back(action: Action, label: str) -> None:
    assert str(action) == label
    assert Action.parse(label) == action


@pytest.mark.parametrize("label", ["", "F", "X1", "F1.", "F-1", "f1", "F1 B1"])
def test_anything_else_is_no_action(label: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(label)


def test_costs_are_given_for_all_segments_or_for_each() -> None:
    segment = Segment(1, 0)
    costs = Costs(forward_seconds={segment: 3.0}, backward_seconds=5.0)
    assert costs.seconds(Kind.FORWARD, segment) == 3
    assert costs.seconds(Kind.BACKWARD, segment) == 5


@pytest.mark.parametrize(("weight", "halves"), [(None, (2, 2)), (1.0, (3, 1)), (5.0, (0, 5))])
def test_a_split_backward_is_input_and_weight_part(weight: float | None, halves: tuple[float, float]) -> None:
    costs = Costs(backward_seconds=4.0, weight_seconds=weight)
    assert costs.seconds(Kind.BACKWARD, Segment(0, 0), split_backward=True) == halves[0]
    assert costs.seconds(Kind.WEIGHT, Segment(0, 0), split_backward=True) == halves[1]


def test_a_microbatch_is_live_from_its_first_action_to_its_last() -> None:
    actions = tuple(map(Action.parse, ["F0", "F1", "F0.1", "B0.1", "B0", "F1.1", "B1.1", "B1"]))
    schedule = Schedule("test", SegmentGraph.path([Segment(0, 0), Segment(0, 1)]), 2, (actions,), (2,))
    assert schedule.peak_live_microbatches == (2,)
    check(schedule)


@pytest.mark.parametrize("graph", NAMED.values(), ids=NAMED)
def test_json_gives_the_same_schedule_back(graph: SegmentGraph) -> None:
    schedule = interleaved(graph, 5, 3, split_backward=True)
    assert from_json(to_json(schedule)) == schedule
    assert to_json(from_json(to_json(schedule))) == to_json(schedule)


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(to_json(one_f_one_b(2, 2))), **values})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        changed(actions=["F0 F1 X0"]),
        changed(graph={"num_ranks": 2, "segments": [[0, 1]]}),
        changed(num_microbatches=None),
    ],
    ids=["empty", "list", "no keys", "action", "graph", "microbatches"],
)
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        from_json(text)
