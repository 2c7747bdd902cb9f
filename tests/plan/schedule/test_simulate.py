from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.schedule.actions import Costs, Schedule
from smpkit.plan.schedule.graph import ScheduleError, Segment, SegmentGraph, Transfer
from smpkit.plan.schedule.search import simple
from smpkit.plan.schedule.simulate import Cause, IdleInterval, simulate
from smpkit.plan.schedule.templates import one_f_one_b
from tests.plan.graphs import IDLE_RANK, costs_of, graphs


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 3), (2, 8), (4, 8), (8, 16), (8, 32), (4, 2)])
def test_the_bubble_of_simple_and_of_1f1b_is_the_known_share(num_ranks: int, num_microbatches: int) -> None:
    graph, share = SegmentGraph.chain(num_ranks), (num_ranks - 1) / (num_microbatches + num_ranks - 1)
    for schedule in (simple(graph, num_microbatches), one_f_one_b(num_ranks, num_microbatches)):
        timeline = simulate(schedule)
        assert timeline.bubble == pytest.approx(share)
        assert timeline.makespan_seconds == (num_microbatches + num_ranks - 1) * 3


def test_stalls_name_what_was_waited_for() -> None:
    timeline = simulate(one_f_one_b(2, 2), Costs(latency_seconds=0.5))
    assert timeline.stalls == (
        (
            IdleInterval(Cause.BACKWARD, 2.0, 4.5, 1),
            IdleInterval(Cause.LINK, 4.5, 5.0, 1),
            IdleInterval(Cause.BACKWARD, 7.0, 7.5, 1),
            IdleInterval(Cause.LINK, 7.5, 8.0, 1),
        ),
        (
            IdleInterval(Cause.FILL, 0.0, 1.0, 0),
            IdleInterval(Cause.LINK, 1.0, 1.5, 0),
            IdleInterval(Cause.DRAIN, 7.5, 10.0, None),
        ),
    )


def test_a_slow_forward_shows_as_waiting_for_forward() -> None:
    graph = SegmentGraph.chain(2, has_backward=False)
    costs = Costs({graph.segments[0]: 3.0, graph.segments[1]: 1.0})
    assert simulate(simple(graph, 3), costs).stall_seconds(1) == {
        Cause.FILL: 3.0,
        Cause.FORWARD: 4.0,
        Cause.BACKWARD: 0.0,
        Cause.LINK: 0.0,
        Cause.DRAIN: 0.0,
    }


def test_a_rank_without_segments_is_idle_all_the_time() -> None:
    timeline = simulate(simple(IDLE_RANK, 2))
    assert timeline.spans[1] == ()
    assert timeline.idle_seconds[1] == timeline.makespan_seconds == timeline.stall_seconds(1)[Cause.DRAIN]


def test_a_step_without_segments_takes_no_time() -> None:
    timeline = simulate(simple(SegmentGraph(2, ()), 2))
    assert (timeline.makespan_seconds, timeline.bubble) == (0, 0)


def test_a_schedule_that_stands_still_is_refused() -> None:
    schedule = one_f_one_b(2, 1)
    wrong = replace(schedule, actions=(schedule.actions[0][::-1], schedule.actions[1]))
    with pytest.raises(ScheduleError, match="rank 0 stands still before B0"):
        simulate(wrong)


@given(data=st.data(), graph=graphs(), num_microbatches=st.integers(1, 5))
def test_spans_follow_the_list_without_overlap_and_idle_time_adds_up(
    data: st.DataObject, graph: SegmentGraph, num_microbatches: int
) -> None:
    costs = data.draw(costs_of(graph))
    schedule: Schedule = simple(graph, num_microbatches, costs)
    timeline = simulate(schedule, costs)
    for rank, spans in enumerate(timeline.spans):
        assert tuple(span.action for span in spans) == schedule.actions[rank]
        assert all(one.end_seconds <= two.start_seconds for one, two in pairwise(spans))
        assert sum(timeline.stall_seconds(rank).values()) == timeline.idle_seconds[rank]


def test_a_segment_waits_for_the_message_that_arrives_last_whichever_was_sent_first() -> None:
    last = Segment(2, 0)
    messages = [Transfer(Segment(0, 0), last, num_bytes=10), Transfer(Segment(1, 0), last)]
    graph = SegmentGraph.of((1, 1, 1), messages, has_backward=False)
    assert simulate(simple(graph, 1), Costs(seconds_per_byte=1.0)).spans[2][0].start_seconds == 11.0
