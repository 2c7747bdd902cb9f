from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.schedule.actions import Costs, Schedule, check, live_microbatches
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer
from smpkit.plan.schedule.list_scheduler import list_schedule
from smpkit.plan.schedule.simulate import simulate
from smpkit.plan.schedule.templates import looped
from tests.plan.counted import lines_of
from tests.plan.graphs import TIED_HEAD, carrying, costs_of, graphs


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_caps_of_p_minus_rank_are_1f1b_exactly(num_ranks: int, num_microbatches: int) -> None:
    caps = [num_ranks - rank for rank in range(num_ranks)]
    graph, num_groups = SegmentGraph.chain(num_ranks), max(1, num_microbatches // num_ranks)
    actions, _ = list_schedule(graph, num_microbatches, caps, Costs())
    assert actions == looped(graph, num_microbatches, num_groups, warmup_per_rank=1).actions


@given(data=st.data(), graph=graphs(), num_microbatches=st.integers(1, 6), split=st.booleans(), first=st.booleans())
def test_any_graph_with_any_caps_runs_and_keeps_to_them(
    data: st.DataObject, graph: SegmentGraph, num_microbatches: int, split: bool, first: bool
) -> None:
    costs = data.draw(costs_of(graph))
    # Holding back backwards needs room for every microbatch.
    least = num_microbatches if first else 1
    caps = tuple(data.draw(st.lists(st.integers(least, 7), min_size=graph.num_ranks, max_size=graph.num_ranks)))
    actions, seconds = list_schedule(graph, num_microbatches, caps, costs, split_backward=split, forwards_first=first)
    schedule = Schedule("any", graph, num_microbatches, actions, caps)
    check(schedule)
    assert all(live <= cap for live, cap in zip(schedule.peak_live_microbatches, caps, strict=True))
    assert simulate(schedule, costs).makespan_seconds == seconds


@given(data=st.data(), graph=graphs(), num_microbatches=st.integers(1, 6))
def test_microbatches_that_wait_for_weights_alone_leave_room_for_others(
    data: st.DataObject, graph: SegmentGraph, num_microbatches: int
) -> None:
    costs = data.draw(costs_of(graph))
    limits = st.lists(st.integers(1, 5), min_size=graph.num_ranks, max_size=graph.num_ranks)
    depths, caps = data.draw(limits), tuple(data.draw(limits))
    actions, _ = list_schedule(graph, num_microbatches, caps, costs, split_backward=True, depths=depths)
    check(Schedule("any", graph, num_microbatches, actions, caps))
    for rank, own in enumerate(actions):
        waited_for = {Segment(rank, each.segment) for each in own if each.kind is Kind.WEIGHT}
        inside = [
            each
            for each in own
            if each.kind is Kind.FORWARD or (each.kind is Kind.BACKWARD and Segment(rank, each.segment) in waited_for)
        ]
        assert max(live_microbatches(tuple(inside)), default=0) <= depths[rank]


@pytest.mark.parametrize(("cap", "seconds"), [(4, 77.0), (6, 69.0), (8, 60.5), (16, 56.0)])
def test_a_rank_that_is_visited_twice_needs_more_microbatches(cap: int, seconds: float) -> None:
    # Head and first layers take half a stage each, so that rank 0 works as long as the others.
    forward = {segment: 0.5 if segment.rank == 0 else 1.0 for segment in TIED_HEAD.segments}
    costs = Costs(forward, {segment: 2 * value for segment, value in forward.items()})
    assert list_schedule(TIED_HEAD, 16, [cap] * 4, costs)[1] == seconds


def test_messages_of_one_link_follow_each_other() -> None:
    graph = carrying(4, SegmentGraph.chain(2, has_backward=False))
    _, seconds = list_schedule(graph, 3, [3, 3], Costs(1, 2, latency_seconds=0.5, seconds_per_byte=1))
    assert seconds == 1 + 3 * 4 + 0.5 + 1


def test_a_link_carries_messages_in_the_order_of_the_graph() -> None:
    first, second, third = Segment(0, 0), Segment(1, 0), Segment(1, 1)
    transfers = (Transfer(first, third, 4), Transfer(first, second, 1))
    graph = SegmentGraph(2, (first, second, third), transfers, has_backward=False)
    _, seconds = list_schedule(graph, 1, [1, 1], Costs(seconds_per_byte=1))
    assert seconds == 1 + 4 + 1 + 1 + 1


def test_planning_takes_the_same_work_for_every_action() -> None:
    caps = [16 - rank for rank in range(16)]
    lines = lines_of(lambda: list_schedule(SegmentGraph.chain(16), 32, caps, Costs()))
    assert lines < 125 * (2 * 16 * 32)  # 77 for each forward and backward
