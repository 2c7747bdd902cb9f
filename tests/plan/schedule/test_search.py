from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.schedule import search
from smpkit.plan.schedule.actions import Costs, Schedule, check
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph, Transfer
from smpkit.plan.schedule.list_scheduler import list_schedule
from smpkit.plan.schedule.search import bounds_of, interleaved, simple
from smpkit.plan.schedule.simulate import simulate
from smpkit.plan.schedule.templates import one_f_one_b
from tests.plan.counted import lines_of
from tests.plan.graphs import NAMED, TIED_HEAD, costs_of, graphs


def test_one_f_one_b_prints_its_known_order_one_line_per_rank() -> None:
    assert str(one_f_one_b(3, 4)).splitlines() == [
        "rank 0: F0 F1 F2 B0 F3 B1 B2 B3",
        "rank 1: F0 F1 B0 F2 B1 F3 B2 B3",
        "rank 2: F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_simple_runs_all_forwards_before_any_backward() -> None:
    for actions in simple(TIED_HEAD, 3).actions:
        kinds = [action.kind for action in actions]
        assert kinds == sorted(kinds, key=lambda kind: kind is Kind.BACKWARD)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 1), (2, 8), (4, 2), (4, 16), (8, 32)])
def test_without_link_time_interleaved_is_1f1b(num_ranks: int, num_microbatches: int) -> None:
    found = interleaved(SegmentGraph.chain(num_ranks), num_microbatches, num_ranks + 2)
    assert found.actions == one_f_one_b(num_ranks, num_microbatches).actions


# Simulated in the design: link time a quarter of a forward, 8 ranks, 32 microbatches (ideal without links 117).
@pytest.mark.parametrize(
    ("caps", "seconds", "live"),
    [
        ([8 - rank for rank in range(8)], 134.0, 36),
        ([8 - rank + 1 for rank in range(8)], 129.5, 43),
        ([2 * (8 - rank) - 1 for rank in range(8)], 120.5, 64),
        ([8 + 2] * 8, 135.0, 65),
    ],
    ids=["P-r", "P-r+1", "2(P-r)-1", "P+2"],
)
def test_depth_hides_links(caps: list[int], seconds: float, live: int) -> None:
    graph, costs = SegmentGraph.chain(8), Costs(latency_seconds=0.25)
    actions, makespan = list_schedule(graph, 32, caps, costs)
    assert makespan == seconds
    assert sum(Schedule("", graph, 32, actions, tuple(caps)).peak_live_microbatches) == live


def test_the_search_finds_the_best_depth_within_its_limit() -> None:
    graph, costs = SegmentGraph.chain(8), Costs(latency_seconds=0.25)
    free, default = interleaved(graph, 32, 32, costs), interleaved(graph, 32, 10, costs)
    assert simulate(free, costs).makespan_seconds == 120.5
    assert sum(free.peak_live_microbatches) <= 64
    assert simulate(default, costs).makespan_seconds == 127.0
    assert max(default.peak_live_microbatches) <= 10


@pytest.mark.parametrize(
    ("name", "num_microbatches", "active", "latency_seconds", "split", "live"),
    [
        ("tied head", 6, 4, 0.01, False, ((4, 4, 3, 2), (5, 4, 3, 2))),
        ("chain of 4", 6, 4, 0.003, True, ((4, 3, 3, 2), (4, 3, 3, 2))),
        ("U-Net", 8, 6, 0.0, False, ((5, 4, 3), (5, 6, 3))),  # as many microbatches as (4, 4, 4), and fewer segments
    ],
    ids=["others win 0.1 %", "split", "fewer segments"],
)
def test_of_schedules_as_fast_the_one_that_holds_least_is_taken(
    name: str,
    num_microbatches: int,
    active: int,
    latency_seconds: float,
    split: bool,
    live: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    found = interleaved(
        NAMED[name], num_microbatches, active, Costs(latency_seconds=latency_seconds), split_backward=split
    )
    assert (found.peak_live_microbatches, found.peak_live_segments) == live


@pytest.mark.parametrize(("has_backward", "active", "seconds"), [(True, 2, 50.0), (False, 3, 16.5)])
def test_few_live_microbatches_go_round_a_loop_in_groups(has_backward: bool, active: int, seconds: float) -> None:
    costs = Costs(latency_seconds=0.5)
    found = interleaved(SegmentGraph.loop(2, 2, has_backward=has_backward), 6 + (not has_backward), active, costs)
    assert simulate(found, costs).makespan_seconds == seconds  # one by one 54 and 17.5


def test_the_work_of_the_search_grows_no_faster_than_the_microbatches() -> None:
    def lines(num_microbatches: int) -> int:
        return lines_of(lambda: interleaved(SegmentGraph.chain(4), num_microbatches, 6, Costs(latency_seconds=0.25)))

    assert lines(16) < 5000 * (4 * 16)
    assert lines(32) < 2.2 * lines(16)


def test_a_long_chain_tries_no_caps_that_must_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return list_schedule(*args, **options)

    monkeypatch.setattr(search, "list_schedule", counted)
    assert interleaved(SegmentGraph.chain(16), 64, 64).caps == tuple(range(16, 0, -1))
    assert calls == 2  # 1F1B, for a time that can be had, and again in its turn
    assert len(search._cap_choices(range(1024, 0, -1), [1.0] * 1024, 512)) < 200


def test_a_microbatch_stays_less_long_where_backwards_are_split() -> None:
    found = interleaved(SegmentGraph.chain(6), 48, 6, Costs(1, 2, 1.9), split_backward=True)
    assert found.caps == (5, 4, 4, 3, 3, 2)  # as fast as with 6 on rank 0


@given(st.data(), graphs(), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_caps_that_are_not_tried_would_not_be_chosen(
    data: st.DataObject, graph: SegmentGraph, num_microbatches: int, active: int, split: bool
) -> None:
    costs = data.draw(costs_of(graph))
    found = interleaved(graph, num_microbatches, active, costs, split_backward=split)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search._Search, "_can_be_fast", lambda *_: True)
        assert interleaved(graph, num_microbatches, active, costs, split_backward=split) == found


@pytest.mark.parametrize("latency_seconds", [0.0, 0.5, 1.0, 2.0])
def test_with_enough_memory_a_chain_loses_one_round_of_links_only(latency_seconds: float) -> None:
    graph, costs = SegmentGraph.chain(8), Costs(latency_seconds=latency_seconds)
    seconds = simulate(interleaved(graph, 32, 32, costs), costs).makespan_seconds
    assert seconds == (32 + 7) * 3 + 14 * latency_seconds == bounds_of(graph, 32, costs).step_seconds


def test_the_loop_template_hides_links() -> None:
    costs = Costs(0.5, 1.0, latency_seconds=0.1)
    found = interleaved(SegmentGraph.loop(4, 2), 16, 8, costs)
    assert simulate(found, costs).makespan_seconds == pytest.approx(52.5 + 14 * 0.1)


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 2), (2, 3), (4, 2), (4, 3), (8, 2)])
@pytest.mark.parametrize("rest", [0, 1, 2, 3])
def test_any_number_of_microbatches_fills_a_loop_sooner(num_ranks: int, num_chunks: int, rest: int) -> None:
    num_microbatches = 2 * num_ranks + rest
    costs = Costs(1.0, 2.0)  # of a chunk; a whole stage takes as many times as much
    found = interleaved(SegmentGraph.loop(num_ranks, num_chunks), num_microbatches, num_microbatches, costs)
    check(found)
    assert simulate(found, costs).makespan_seconds == 3 * (num_chunks * num_microbatches + num_ranks - 1)


@pytest.mark.parametrize("num_microbatches", range(1, 10))
@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 2), (3, 2), (4, 3)])
def test_virtual_stages_are_never_slower_than_a_chain(num_ranks: int, num_chunks: int, num_microbatches: int) -> None:
    costs = Costs(1.0, 2.0)
    found = interleaved(SegmentGraph.loop(num_ranks, num_chunks), num_microbatches, 2 * num_microbatches, costs)
    chain = 3 * num_chunks * (num_microbatches + num_ranks - 1)
    assert simulate(found, costs).makespan_seconds <= chain


@pytest.mark.parametrize("num_microbatches", [4, 8, 16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_zero_bubble_holds_no_more_than_1f1b_does_at_its_peak(num_ranks: int, num_microbatches: int) -> None:
    graph = SegmentGraph.chain(num_ranks)
    found = interleaved(graph, num_microbatches, num_ranks, split_backward=True)
    check(found)
    assert found.name == "zero_bubble"
    assert max(found.peak_live_microbatches) <= max(one_f_one_b(num_ranks, num_microbatches).peak_live_microbatches)
    ideal = 3 * num_microbatches + num_ranks - 1  # one more with three ranks, whose first one splits nothing
    assert simulate(found).makespan_seconds <= ideal + (num_ranks == 3)


@given(data=st.data(), graph=graphs(), num_microbatches=st.integers(1, 5), active=st.integers(1, 6))
def test_zero_bubble_is_never_slower_than_interleaved_and_that_not_than_simple(
    data: st.DataObject, graph: SegmentGraph, num_microbatches: int, active: int
) -> None:
    costs = data.draw(costs_of(graph))
    split, whole = (interleaved(graph, num_microbatches, active, costs, split_backward=each) for each in (True, False))
    seconds, whole_seconds = (simulate(each, costs).makespan_seconds for each in (split, whole))
    assert seconds <= whole_seconds * 1.002  # of equals within 0.2 % the one that holds less is taken
    if active >= num_microbatches:
        all_forwards = simulate(simple(graph, num_microbatches, costs), costs).makespan_seconds
        assert whole_seconds <= all_forwards * 1.002


def test_all_forwards_come_first_where_that_is_faster() -> None:
    forward = [0.5, 0.0, 0.0, 0.0, 0.5, 3.0, 3.0]
    backward = [0.0, 0.0, 0.0, 0.0, 1.25, 3.0, 3.0]
    places = [Segment(1, 0), Segment(0, 0), Segment(0, 1), Segment(0, 2), Segment(1, 1), Segment(1, 2), Segment(1, 3)]
    graph = SegmentGraph(2, tuple(places), (Transfer(places[0], places[1], 4, True),), True)
    costs = Costs(
        dict(zip(places, forward, strict=True)), dict(zip(places, backward, strict=True)), seconds_per_byte=1.75
    )
    found = interleaved(graph, 2, 2, costs)
    assert simulate(found, costs).makespan_seconds == simulate(simple(graph, 2, costs), costs).makespan_seconds == 28.5


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 4), (2, 8), (4, 8), (4, 16), (8, 32)])
def test_a_split_backward_fills_the_bubble_with_weights(num_ranks: int, num_microbatches: int) -> None:
    found = interleaved(SegmentGraph.chain(num_ranks), num_microbatches, num_ranks + 2, split_backward=True)
    check(found)
    assert found.splits_backward == (num_ranks > 1)  # of one rank it would gain nothing
    assert simulate(found).makespan_seconds == 3 * num_microbatches + num_ranks - 1


def test_an_evaluation_has_forwards_only() -> None:
    found = interleaved(SegmentGraph.chain(3, has_backward=False), 4, 5, split_backward=True)
    assert [str(action) for action in found.actions[1]] == ["F0", "F1", "F2", "F3"]
    assert found.peak_live_microbatches == (1, 1, 1)


@pytest.mark.parametrize("graph", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_common_graphs_run_with_every_policy(graph: SegmentGraph, num_microbatches: int) -> None:
    check(simple(graph, num_microbatches))
    for active in (1, 2, 6):
        found = interleaved(graph, num_microbatches, active)
        check(found)
        assert max(found.peak_live_microbatches) <= active


@given(data=st.data(), graph=graphs(), num_microbatches=st.integers(1, 5), active=st.integers(1, 6))
def test_any_schedule_is_proven(data: st.DataObject, graph: SegmentGraph, num_microbatches: int, active: int) -> None:
    costs = data.draw(costs_of(graph))
    found = interleaved(graph, num_microbatches, active, costs, split_backward=data.draw(st.booleans()))
    check(found)
    assert max(found.peak_live_microbatches) <= active
    bound = bounds_of(graph, num_microbatches, costs, found.splits_backward).step_seconds
    assert simulate(found, costs).makespan_seconds >= bound


@given(data=st.data(), graph=graphs())
def test_the_same_question_gets_the_same_answer(data: st.DataObject, graph: SegmentGraph) -> None:
    costs = data.draw(costs_of(graph))
    again = SegmentGraph(graph.num_ranks, tuple(sorted(graph.segments)), graph.transfers, graph.has_backward)
    assert interleaved(graph, 3, 2, costs).actions == interleaved(again, 3, 2, costs).actions
