"""What a rank runs of a schedule, and where in the others' lists it believes their messages to be."""

from __future__ import annotations

import pytest

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind, SegmentGraph
from smpkit.plan.schedule.search import interleaved
from smpkit.torch.pipeline.step_plan import _action_indices, _split
from tests.plan.graphs import TIED_HEAD


@pytest.mark.parametrize(
    "schedule",
    [
        interleaved(SegmentGraph.chain(4), 6, 4, split_backward=True),
        interleaved(TIED_HEAD, 4, 4, split_backward=True),
        interleaved(SegmentGraph.chain(3, has_backward=False), 2, 2),
    ],
    ids=["chain", "tied head", "evaluation"],
)
def test_messages_travel_by_forwards_and_backwards_and_not_by_weights(schedule: Schedule) -> None:
    # Who takes the place of a WEIGHT for that of its BACKWARD believes that more has been taken by then than has, and
    # waits for a send to a rank that waits for this one.
    assert schedule.splits_backward is schedule.graph.has_backward
    action_indices = _action_indices(schedule)
    for (rank, backward, segment, microbatch), place in action_indices.items():
        kind = Kind.BACKWARD if backward else Kind.FORWARD
        assert schedule.actions[rank][place] == Action(kind, segment, microbatch)
    travelling = [each for actions in schedule.actions for each in actions if each.kind is not Kind.WEIGHT]
    assert len(action_indices) == len(travelling)


def test_segments_that_cannot_be_split_run_whole() -> None:
    actions = tuple(map(Action.parse, ["F0", "F0.1", "B0.1", "B0", "W0.1", "W0"]))
    assert _split(actions, frozenset()) == {0, 1}
    assert _split(actions, frozenset({1})) == {0}
