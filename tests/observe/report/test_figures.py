"""The figures of a report are those of the events."""

from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.observe.events import MessageSpan
from smpkit.observe.merge import Run, merge, read_run
from smpkit.observe.report import figures
from smpkit.observe.report.content import content_of
from smpkit.observe.report.folder import Curve, Material
from tests.observe.logs import chain, logs_of
from tests.observe.report.folders import MIB, RANKS, STEPS, write_events

BYTES = 1024


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(write_events(tmp_path_factory.mktemp("events")))


def test_steps_and_their_pace(run: Run) -> None:
    [times] = figures.step_times(run)
    assert (times.name, times.trains, times.numbers) == ("train_step", True, tuple(range(STEPS)))
    length = times.begin_s[1] - times.begin_s[0]
    assert times.per_second[:-1] == pytest.approx([1 / length] * (STEPS - 1))
    assert times.per_second[-1] is None


def test_steps_that_were_not_recorded_count_in_the_pace() -> None:
    times = figures.StepTimes("train_step", True, (0, 1, 11), (0.0, 1.0, 6.0), (0.5, 0.5, 0.5))
    assert times.per_second == (1.0, 2.0, None)


def test_the_function_that_trains_is_the_main_one() -> None:
    evaluates = figures.StepTimes("evaluate", False, (0, 1), (0.0, 1.0), (9.0, 9.0))
    trains = figures.StepTimes("train", True, (2,), (2.0,), (1.0,))
    assert figures.main_step([evaluates, trains]) is trains
    assert figures.main_step([evaluates]) is evaluates
    assert figures.main_step([]) is None


def test_a_typical_step_is_shown_first_and_none_twice() -> None:
    times = figures.StepTimes(
        "train", True, tuple(range(6)), tuple(map(float, range(6))), (9.0, 5.0, 5.0, 1.0, 2.0, 4.0)
    )
    assert [(each.why, each.number) for each in figures.chosen_steps(times)] == [
        ("typical", 4),
        ("slowest", 5),
        ("first", 0),
    ]
    one = figures.StepTimes("train", True, (7,), (0.0,), (1.0,))
    assert [(each.why, each.number) for each in figures.chosen_steps(one)] == [("typical", 7)]


def test_the_matrix_adds_up_to_the_messages(run: Run) -> None:
    found = figures.matrix(run, run.steps)
    sent = [
        event
        for log in run.logs
        for event in log.events
        if isinstance(event, MessageSpan) and event.direction == "send"
    ]
    assert sum(map(sum, found.num_bytes)) == sum(message.num_bytes for message in sent) > 0
    assert sum(map(sum, found.num_messages)) == len(sent)
    assert found.num_bytes[0][0] == found.num_bytes[1][1] == 0
    assert found.waited_ms[1][0] > 0


def test_memory_over_a_step_is_what_was_held(run: Run) -> None:
    view = figures.memory_view(run, 2, 0)
    assert view is not None
    # 1F1B over two stages: two forwards, then one backward for each forward.
    live = [0, 1, 2, 1, 2, 1, 2, 1, 0]
    assert view.bytes["activations"] == tuple(3 * MIB * count for count in live)
    assert view.offloaded == tuple(MIB * count for count in live)
    assert view.out[-1] == view.back[-1] == 4 * MIB
    assert list(view.at_ms) == sorted(view.at_ms)
    assert view.at_ms[0] == 0.0


def test_memory_that_was_not_recorded_is_none() -> None:
    bare = merge(logs_of(chain(2, 4)))
    assert figures.memory_view(bare, 0, 0) is None
    assert figures.peaks(bare, 0) is None


def test_peaks(run: Run) -> None:
    kinds, at_once = figures.peaks(run, 0) or (None, 0)
    assert kinds is not None
    assert (kinds.activations, kinds.parked, kinds.offloaded) == (6 * MIB, MIB, 2 * MIB)
    assert at_once == (8 + 8 + 16 + 6 + 1 + 100) * MIB


def test_stalls_are_summed_by_layer(run: Run) -> None:
    stalls = figures.layer_stalls(run)
    assert [(stall.rank, stall.layer, stall.steps) for stall in stalls] == [(0, "blocks.0", 8), (1, "blocks.0", 8)]
    assert stalls[0].seconds == pytest.approx(8 * 250e-6)


def test_the_split_of_a_step_adds_up(run: Run) -> None:
    summary = figures.summary_of_events(run, "odd")
    [times] = figures.step_times(run)
    assert summary.steps == STEPS
    for rank in summary.ranks:
        assert rank.split.total == pytest.approx(1 / (summary.steps_per_s or 1), rel=0.02)
        assert rank.split.compute == pytest.approx(4 * 3e-3, rel=0.01)
    assert len(summary.ranks) == RANKS
    assert times.trains


def test_the_schedule_has_each_action_once_and_what_it_waits_for(run: Run) -> None:
    view = figures.pipeline_view(run, 1, 0)
    assert view.planned is not None
    for rows in (view.planned, view.executed):
        assert [[f"{a[0]}{a[2]}" for a in row.actions] for row in rows] == [
            ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
            ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
        ]
    assert {cause for cause, *_ in view.executed[1].idle} >= {"fill", "drain"}
    assert view.executed[0].works[0][0] == "reduce gradients"
    assert view.planned_bubble == pytest.approx(0.2)


def test_a_long_curve_keeps_its_ends_and_extremes() -> None:
    values = [1.0] * 10_000
    values[3333], values[7777] = 50.0, -50.0
    curve = Curve("loss", tuple(map(float, range(10_000))), tuple(values))
    [thinned] = content_of(Material("job", "job-1", curves=(curve,))).curves
    assert len(thinned.steps) <= 2002
    assert {50.0, -50.0} <= set(thinned.values)
    assert (thinned.steps[0], thinned.steps[-1]) == (0.0, 9999.0)


def test_a_gap_in_a_curve_stays(tmp_path: Path) -> None:
    curve = Curve("loss", (0.0, 1.0, 2.0), (1.0, None, 2.0))
    assert content_of(Material("job", "job-1", curves=(curve,))).curves == (curve,)
