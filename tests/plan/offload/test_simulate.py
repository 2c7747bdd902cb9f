"""The three streams of offloading: known tables, what each rule means, and what holds for any costs."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.offload.simulate import ON_A_GPU, Copy, Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, auto_window, layer_tasks, needs_back
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind, SegmentGraph
from smpkit.plan.schedule.search import interleaved
from smpkit.plan.schedule.templates import one_f_one_b

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
_LAYER = LayerCost(1.0, 2.0, 100, recompute_seconds=1.0)


def _work(labels: str, num_layers: int = 1, backward: float = 2.0) -> tuple[LayerTask, ...]:
    """Return the tasks of layers of 10 bytes whose forward takes 1."""
    return layer_tasks([Action.parse(label) for label in labels.split()], [[LayerCost(1.0, backward, 10)] * num_layers])


def _stage() -> tuple[LayerTask, ...]:
    return layer_tasks(one_f_one_b(8, 16).actions[0], [[_LAYER] * 8])


def _link(copy_seconds: float) -> LinkSpeed:
    return LinkSpeed(100 / copy_seconds, 100 / copy_seconds)


def _spans(copies: tuple[Copy, ...]) -> list[tuple[str, float, float]]:
    return [(f"{copy.task.action}.{copy.task.layer}", copy.start_seconds, copy.end_seconds) for copy in copies]


def _row(copy_seconds: float, rules: Rules) -> list[tuple[float, int]]:
    timelines = [simulate_offload(_stage(), _link(copy_seconds), window, rules=rules) for window in _WINDOWS]
    assert [timeline.makespan_seconds for timeline in timelines] == pytest.approx(
        [512 + timeline.stall_seconds for timeline in timelines]
    )
    return [(round(100 * timeline.stall_seconds / 512, 1), timeline.peak_bytes // 100) for timeline in timelines]


@pytest.mark.parametrize("copy_seconds", _TABLE)
def test_first_stage_of_eight_as_in_the_known_tables(copy_seconds: float) -> None:
    assert _row(copy_seconds, Rules()) == _TABLE[copy_seconds]


def test_the_page_says_what_long_copies_cost() -> None:
    """`docs/explanation/offload.md`: with a copy of two forwards, 17 to 22 % of a step on that stage."""
    stalls = [stall for stall, _ in _row(2.0, ON_A_GPU)]
    assert (round(min(stalls)), round(max(stalls))) == (17, 22)


@pytest.mark.parametrize(("copy_seconds", "lead", "peak"), [(0.1, 1, 2), (1.0, 1, 2), (2.0, 2, 35), (3.0, 3, 47)])
def test_auto_window_is_the_smallest_of_the_table_without_a_stall(copy_seconds: float, lead: int, peak: int) -> None:
    window = auto_window(_stage(), _link(copy_seconds), horizon=9)
    timeline = simulate_offload(_stage(), _link(copy_seconds), window)
    assert window == Window(lead, 9)
    assert (timeline.stall_seconds, timeline.peak_bytes) == (0, 100 * peak)
    assert auto_window(_stage(), _link(99)).lead == 16


def test_copies_and_waits_of_a_small_step_are_these() -> None:
    timeline = simulate_offload(_work("F0 F1 B0 B1"), LinkSpeed(20, 5, latency_seconds=0.5), Window(lead=1))
    assert _spans(timeline.outs) == [("F0.0", 0, 1), ("F1.0", 1, 2)]
    # B0 is in the window when F1 begins, at 1; B1 when B0's turn comes, at 2, and waits for the stream.
    assert _spans(timeline.loads) == [("B0.0", 1, 3.5), ("B1.0", 3.5, 6)]
    assert (timeline.start_seconds, timeline.makespan_seconds) == ((0, 1, 3.5, 6), 8)
    assert (timeline.stall_seconds, timeline.peak_bytes, timeline.out_bytes) == (2, 20, 20)


def test_what_never_left_takes_no_memory_of_the_host() -> None:
    timeline = simulate_offload(_work("F0 B0 F1 F2 B1 B2"), LinkSpeed(10, 10), Window(lead=1))
    assert (timeline.out_bytes, timeline.host_peak_bytes) == (20, 20)


def test_within_an_action_memory_is_given_back_before_loads_are_issued() -> None:
    layers = [LayerCost(0.0, 2.0, 10), LayerCost(1.0, 2.0, 10), LayerCost(2.0, 2.0, 0)]
    work = layer_tasks([Action.parse("F0"), Action.parse("B0")], [layers])
    # Before the last forward ends, what the first layer needs is copied out, and within the window: it stays.
    assert simulate_offload(work, LinkSpeed(40, 20), Window(lead=4)).back_bytes == 0


def test_without_a_plan_the_latest_are_copied_and_held() -> None:
    timeline = simulate_offload(_work("F0 B0", 5), LinkSpeed(100, 100), Window(lead=2), rules=Rules(is_planned=False))
    assert (timeline.out_bytes, timeline.peak_bytes) == (50, 30)
    assert _spans(timeline.loads) == [("B0.2", 5, 5.1), ("B0.1", 7, 7.1), ("B0.0", 9, 9.1)]


def test_boundaries_without_a_backward_are_gone_after_the_forward() -> None:
    timeline = simulate_offload(_work("F0 F1"), LinkSpeed(1, 1), Window(1))
    assert (timeline.outs, timeline.peak_bytes, timeline.makespan_seconds) == ((), 10, 2.0)


def test_segments_have_layers_of_their_own_and_weight_actions_need_nothing_back() -> None:
    actions = [Action.parse(label) for label in ("F0", "F0.1", "B0.1", "W0.1", "B0")]
    work = layer_tasks(actions, [[LayerCost(1.0, 2.0, 10)] * 2, [LayerCost(3.0, 4.0, 20)]])
    assert [(str(task.action), task.layer) for task in work[:4]] == [("F0", 0), ("F0", 1), ("F0.1", 0), ("B0.1", 0)]
    assert [(task.layer, task.seconds) for task in work[3:]] == [(0, 4), (0, 0), (1, 2), (0, 2)]
    assert simulate_offload(work, LinkSpeed(100, 100), Window(lead=1)).back_bytes == 20


def test_waits_for_other_ranks_give_loads_time() -> None:
    work, link = _work("F0 B0", 2), LinkSpeed(20, 2)
    assert simulate_offload(work, link, Window(lead=1)).stall_seconds == 3
    timeline = simulate_offload(work, link, Window(lead=1), [0, 4])
    assert (timeline.start_seconds[2], timeline.stall_seconds) == (4, 1)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[tuple[LayerTask, ...], LinkSpeed]:
    """A rank of a pipeline with random layers and a random link."""
    num_ranks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    schedule = interleaved(SegmentGraph.chain(num_ranks), num_microbatches, num_microbatches)
    seconds, num_bytes = st.integers(0, 6).map(float), st.integers(0, 40)
    layers = draw(st.lists(st.builds(LayerCost, seconds, seconds, num_bytes, seconds), min_size=1, max_size=5))
    rate = st.sampled_from([1.0, 4.0, 20.0])
    link = draw(st.builds(LinkSpeed, rate, rate, st.sampled_from([0.0, 0.5])))
    return layer_tasks(schedule.actions[draw(st.integers(0, num_ranks - 1))], [layers]), link


@given(
    _steps(),
    st.builds(Window, st.none() | st.integers(1, 12), st.none() | st.integers(1, 5)),
    st.sampled_from([Rules(), Rules(is_planned=False), Rules(ring=2), Rules(False, ring=3)]),
)
def test_any_step_obeys_the_rules(step: tuple[tuple[LayerTask, ...], LinkSpeed], window: Window, rules: Rules) -> None:
    work, link = step
    timeline = simulate_offload(work, link, window, rules=rules)
    starts, outs, loads = timeline.start_seconds, timeline.outs, timeline.loads
    ends = [start + task.seconds for start, task in zip(starts, work, strict=True)]
    assert timeline.makespan_seconds == pytest.approx(sum(task.seconds for task in work) + timeline.stall_seconds)
    free = simulate_offload(work, LinkSpeed(1e18, 1e18), window, rules=rules)
    assert free.stall_seconds == pytest.approx(0, abs=1e-9)
    # No stream does two things at a time, nothing is read before it is there, and nothing waits in vain.
    left = {copy.task.boundary: copy.end_seconds for copy in outs}
    needs = {task.boundary: task.index for task in work if needs_back(task)}
    begins = [max(end, starts[copy.task.index]) for end, copy in zip([0.0, *left.values()], outs, strict=False)]
    assert begins == [copy.start_seconds for copy in outs]
    assert all(first.end_seconds <= second.start_seconds for first, second in pairwise(loads))
    for load in loads:
        assert left[load.task.boundary] <= load.start_seconds
        assert load.end_seconds <= starts[load.task.index]
    assert {*starts, *(load.start_seconds for load in loads)} <= {
        0.0,
        *ends,
        *(copy.end_seconds for copy in outs + loads),
    }
    if rules.is_planned:  # all leave whose backward is beyond the window
        backward = {task.boundary: task for task in work if needs_back(task)}
        forwards = [task for task in work if task.action.kind is Kind.FORWARD and task.boundary in backward]
        leaving = [task for task in forwards if not window.reaches(task, backward[task.boundary])]
        assert [copy.task for copy in outs] == leaving
    else:
        assert all(load.start_seconds >= ends[min(needs.values()) - 1] for load in loads)
    if rules.ring is not None:
        assert all(starts[needs[boundary]] >= end for boundary, end in left.items())
    # Each is on the host from its forward to its backward.
    held = [[copy for copy in outs if copy.task.index <= i <= needs[copy.task.boundary]] for i in range(len(work))]
    assert timeline.host_peak_bytes == max(sum(copy.task.num_bytes for copy in copies) for copies in held)
    resident = accumulate(task.num_bytes if task.action.kind is Kind.FORWARD else -task.num_bytes for task in work)
    assert timeline.peak_bytes <= max(resident)
