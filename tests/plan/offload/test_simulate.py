"""The three lanes of offloading: the known table, what must hold for any costs, and what each rule means."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.errors import UsageError
from smpkit.plan.offload.simulate import OffloadTimeline, Rules, peak_without_offloading, simulate_offload
from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, auto_window, layer_tasks, needs_back
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind, SegmentGraph
from smpkit.plan.schedule.search import interleaved
from smpkit.plan.schedule.templates import one_f_one_b
from tests.plan.graphs import SETTINGS

_WINDOWS = [Window(horizon=1), Window(horizon=4), Window(horizon=8), Window(1), Window(2), Window(4), Window(8)]
_TABLE = {
    # Copy time over forward time: (stall in % of the time without copies, peak in boundaries) for each window. First
    # stage of 8 in 1F1B order, 16 microbatches, 8 layers, a backward three times a forward; 64 without offloading.
    0.1: [(0, 17), (0, 41), (0, 64), (0, 2), (0, 3), (0, 5), (0, 9)],
    1.0: [(0, 17), (0, 41), (0, 64), (0, 2), (0, 3), (0, 5), (0, 9)],
    2.0: [(0, 41), (0, 57), (0, 64), (1.8, 34), (0, 35), (0, 37), (0, 41)],
    3.0: [(0, 51), (0, 64), (0, 64), (3.5, 45), (1.8, 46), (0, 48), (0, 51)],
    4.0: [(16.2, 59), (0, 64), (0, 64), (28.5, 50), (26.8, 51), (23.2, 53), (16.2, 57)],
}


def _labels(text: str) -> list[Action]:
    return [Action.parse(label) for label in text.split()]


def _first_stage(num_layers: int = 8) -> tuple[LayerTask, ...]:
    return layer_tasks(one_f_one_b(8, 16).actions[0], [[LayerCost(1.0, 2.0, 100, recompute_seconds=1.0)] * num_layers])


def _link(copy_seconds: float) -> LinkSpeed:
    return LinkSpeed(100 / copy_seconds, 100 / copy_seconds)


@pytest.mark.parametrize("copy_seconds", _TABLE)
def test_first_stage_of_eight_as_in_the_known_table(copy_seconds: float) -> None:
    work = _first_stage()
    found = []
    for window in _WINDOWS:
        timeline = simulate_offload(work, _link(copy_seconds), window)
        assert timeline.makespan_seconds == pytest.approx(512 + timeline.stall_seconds)
        found.append((round(100 * timeline.stall_seconds / 512, 1), timeline.peak_bytes // 100))
    assert found == _TABLE[copy_seconds]
    assert peak_without_offloading(work) == 6400


@pytest.mark.parametrize(("copy_seconds", "lead", "peak"), [(0.1, 1, 2), (1.0, 1, 2), (2.0, 2, 35), (3.0, 3, 47)])
def test_auto_window_is_the_smallest_of_the_table_without_a_stall(copy_seconds: float, lead: int, peak: int) -> None:
    work, link = _first_stage(), _link(copy_seconds)
    window = auto_window(work, link)
    timeline = simulate_offload(work, link, window)
    assert (window.lead, timeline.stall_seconds, timeline.peak_bytes) == (lead, 0, 100 * peak)


def test_copies_and_waits_of_a_small_step_are_these() -> None:
    work = layer_tasks(_labels("F0 F1 B0 B1"), [[LayerCost(1.0, 2.0, 10)]])
    timeline = simulate_offload(work, LinkSpeed(10, 5), Window(lead=1))
    assert [(str(each.task), each.start_seconds, each.end_seconds) for each in timeline.outs] == [
        ("F0 layer 0", 0.0, 1.0),
        ("F1 layer 0", 1.0, 2.0),
    ]
    # B0 is in the window when F1 begins, at 1; B1 when B0's turn comes, at 2, and waits for the lane.
    assert [(str(each.task), each.start_seconds, each.end_seconds) for each in timeline.loads] == [
        ("B0 layer 0", 1.0, 3.0),
        ("B1 layer 0", 3.0, 5.0),
    ]
    assert [(str(each.task), each.start_seconds, each.end_seconds) for each in timeline.stalls] == [
        ("B0 layer 0", 2.0, 3.0)
    ]
    assert timeline.start_seconds == (0.0, 1.0, 3.0, 5.0)
    assert timeline.end_seconds == (1.0, 2.0, 5.0, 7.0)
    assert (timeline.peak_bytes, timeline.host_peak_bytes, timeline.out_bytes) == (20, 20, 20)


def test_directions_that_share_the_link_slow_each_other_while_both_copy() -> None:
    work = layer_tasks(_labels("F0 F1 F2 B0 B1 B2"), [[LayerCost(1.0, 2.0, 10)]])
    alone = simulate_offload(work, LinkSpeed(10, 10), Window(lead=1))
    both = simulate_offload(work, LinkSpeed(10, 10, both_bytes_per_second=10), Window(lead=1))
    assert _spans(alone) == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (2.0, 3.0), (3.0, 4.0), (5.0, 6.0)]
    assert _spans(both) == [(0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (2.0, 4.0), (4.0, 5.0), (6.0, 7.0)]
    assert (alone.stall_seconds, both.stall_seconds) == (0.0, 1.0)


def _spans(timeline: OffloadTimeline) -> list[tuple[float, float]]:
    return [(copy.start_seconds, copy.end_seconds) for copy in (*timeline.outs, *timeline.loads)]


def test_device_memory_is_given_back_when_the_next_layer_begins() -> None:
    work = layer_tasks(_labels("F0 F1 F2 B0 B1 B2"), [[LayerCost(1.0, 2.0, 10)]])
    timeline = simulate_offload(work, LinkSpeed(20, 20), Window(lead=1))
    assert _spans(timeline) == [(0.0, 0.5), (1.0, 1.5), (2.0, 2.5), (2.0, 2.5), (3.0, 3.5), (5.0, 5.5)]
    # At 1 and at 2 the boundary before is given back; the load for B0 is issued at 2 beside the boundary of F2, which
    # is given back at 3, when the load for B1 comes beside that of B0.
    assert (timeline.peak_bytes, timeline.host_peak_bytes) == (20, 30)


def test_what_is_still_on_the_device_is_not_loaded() -> None:
    work = layer_tasks(_labels("F0 B0"), [[LayerCost(1.0, 1.0, 10)] * 3])
    timeline = simulate_offload(work, LinkSpeed(3, 3), Window(lead=1))
    assert [str(copy.task) for copy in timeline.outs] == ["F0 layer 0", "F0 layer 1"]
    assert [str(copy.task) for copy in timeline.loads] == ["B0 layer 0"]
    assert (timeline.out_bytes, timeline.back_bytes, timeline.peak_bytes) == (20, 10, 30)


def test_without_a_plan_the_latest_are_copied_and_held() -> None:
    work = layer_tasks(_labels("F0 B0"), [[LayerCost(1.0, 2.0, 10)] * 5])
    timeline = simulate_offload(work, LinkSpeed(100, 100), Window(lead=2), rules=Rules(is_planned=False))
    assert (timeline.out_bytes, timeline.kept) == (50, ())
    assert [copy.task.layer for copy in timeline.loads] == [2, 1, 0]
    assert [copy.start_seconds for copy in timeline.loads] == [5.0, 7.0, 9.0]
    assert timeline.peak_bytes == 30


def test_a_ring_lets_compute_wait_for_the_link_instead_of_memory() -> None:
    work = layer_tasks(_labels("F0 B0"), [[LayerCost(1.0, 8.0, 10)] * 6])
    link = LinkSpeed(5, 5)
    piled_up = simulate_offload(work, link, Window(lead=1))
    ring = simulate_offload(work, link, Window(lead=1), rules=Rules(ring=2))
    assert (piled_up.stall_seconds, piled_up.peak_bytes) == (0.0, 40)
    assert [str(stall.task) for stall in ring.stalls] == ["F0 layer 3", "F0 layer 4", "F0 layer 5"]
    assert ring.peak_bytes == 20


def test_a_boundary_that_is_needed_within_the_window_stays() -> None:
    work = layer_tasks(_labels("F0 B0"), [[LayerCost(1.0, 2.0, 10)] * 4])
    timeline = simulate_offload(work, LinkSpeed(10, 10), Window(lead=3))
    assert [str(each) for each in timeline.kept] == ["F0 layer 2", "F0 layer 3"]
    assert timeline.out_bytes == 20
    assert simulate_offload(work, LinkSpeed(10, 10), Window(horizon=1)).out_bytes == 0


def test_boundaries_without_a_backward_are_gone_after_the_forward() -> None:
    timeline = simulate_offload(layer_tasks(_labels("F0 F1"), [[LayerCost(1.0, 2.0, 10)]]), LinkSpeed(1, 1), Window(1))
    assert (timeline.outs, timeline.peak_bytes, timeline.makespan_seconds) == ((), 10, 2.0)


def test_weight_actions_need_nothing_back() -> None:
    costs = [[LayerCost(1.0, 2.0, 10, weight_seconds=1.0)]]
    work = layer_tasks(_labels("F0 B0 W0"), costs)
    assert [each.seconds for each in work] == [1.0, 1.0, 1.0]
    assert len(simulate_offload(work, LinkSpeed(10, 10), Window(lead=1)).loads) == 0
    assert [needs_back(each) for each in work] == [False, True, False]


def test_segments_have_layers_of_their_own() -> None:
    actions = [Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 1, 0)]
    actions.append(Action(Kind.BACKWARD, 0, 0))
    work = layer_tasks(actions, [[LayerCost(1.0, 2.0, 10)] * 2, [LayerCost(3.0, 4.0, 20)]])
    assert list(map(str, work)) == [
        "F0 layer 0",
        "F0 layer 1",
        "F0.1 layer 0",
        "B0.1 layer 0",
        "B0 layer 1",
        "B0 layer 0",
    ]
    assert [each.seconds for each in work] == [1.0, 1.0, 3.0, 4.0, 2.0, 2.0]
    assert simulate_offload(work, LinkSpeed(100, 100), Window(lead=1)).out_bytes == 20


def test_waits_for_other_ranks_give_loads_time() -> None:
    work = layer_tasks(_labels("F0 B0"), [[LayerCost(1.0, 2.0, 10)] * 2])
    link = LinkSpeed(20, 2)
    assert simulate_offload(work, link, Window(lead=1)).stall_seconds == 3.0
    timeline = simulate_offload(work, link, Window(lead=1), [0.0, 4.0])
    assert (timeline.start_seconds[2], timeline.stall_seconds) == (4.0, 1.0)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(UsageError, match="1 start times do not belong to 2 actions"):
        simulate_offload(layer_tasks(_labels("F0 B0"), [[LayerCost(1, 1, 1)]]), LinkSpeed(1, 1), Window(1), [0.0])
    with pytest.raises(UsageError, match="a horizon of 0 loads nothing"):
        Window(horizon=0)
    with pytest.raises(UsageError, match="`out_bytes_per_second` of the link is 0"):
        LinkSpeed(0, 1)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[tuple[LayerTask, ...], LinkSpeed]:
    """A rank of a pipeline with random layers and a random link."""
    num_ranks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    schedule = interleaved(SegmentGraph.chain(num_ranks), num_microbatches, num_microbatches)
    seconds, num_bytes = st.integers(0, 6).map(float), st.integers(0, 40)
    layer = st.builds(LayerCost, seconds, seconds, num_bytes, seconds)
    layers = draw(st.lists(layer, min_size=1, max_size=5))
    rate = st.sampled_from([1.0, 4.0, 20.0])
    link = draw(st.builds(LinkSpeed, rate, rate, st.none() | rate, st.sampled_from([0.0, 0.5])))
    rank = draw(st.integers(0, num_ranks - 1))
    return layer_tasks(schedule.actions[rank], [layers]), link


_ANY_WINDOW = st.builds(Window, st.none() | st.integers(1, 12), st.none() | st.integers(1, 5))


_ANY_RULES = st.sampled_from([Rules(), Rules(is_planned=False), Rules(ring=2), Rules(False, ring=3)])


@given(_steps(), _ANY_WINDOW, _ANY_RULES)
@SETTINGS
def test_any_step_obeys_the_rules(step: tuple[tuple[LayerTask, ...], LinkSpeed], window: Window, rules: Rules) -> None:
    work, link = step
    timeline = simulate_offload(work, link, window, rules=rules)
    _require_order(work, timeline)
    busy = sum(each.seconds for each in work)
    assert timeline.makespan_seconds == pytest.approx(busy + timeline.stall_seconds)
    in_lane = sum(link.back_seconds(copy.task.num_bytes) for copy in timeline.loads)
    assert timeline.makespan_seconds >= max(busy, in_lane) - 1e-9
    made = sum(each.num_bytes for each in work if each.action.kind is Kind.FORWARD)
    assert timeline.out_bytes + sum(each.num_bytes for each in timeline.kept) == made
    assert timeline.back_bytes <= timeline.out_bytes
    assert timeline.peak_bytes <= peak_without_offloading(work)
    assert timeline.host_peak_bytes <= peak_without_offloading(work)


def _require_order(work: tuple[LayerTask, ...], timeline: OffloadTimeline) -> None:
    """Check that nothing is read before it is there and no lane does two things at a time."""
    left = {copy.task.boundary: copy for copy in timeline.outs}
    for load in timeline.loads:
        assert left[load.task.boundary].end_seconds <= load.start_seconds
        assert load.end_seconds <= timeline.start_seconds[load.task.index]
    for copy in timeline.outs:
        assert timeline.start_seconds[copy.task.index] <= copy.start_seconds
    for copies in (timeline.outs, timeline.loads):
        assert all(first.end_seconds <= second.start_seconds for first, second in pairwise(copies))
    assert len(timeline.start_seconds) == len(timeline.end_seconds) == len(work)


@given(_steps(), st.integers(1, 6))
@SETTINGS
def test_a_link_that_takes_no_time_never_stalls(step: tuple[tuple[LayerTask, ...], LinkSpeed], lead: int) -> None:
    work, _ = step
    timeline = simulate_offload(work, LinkSpeed(1e18, 1e18), Window(lead))
    assert timeline.stall_seconds == pytest.approx(0, abs=1e-9)
