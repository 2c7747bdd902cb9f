"""What a report shows of a run is what its files say; of what is missing or damaged, the rest is shown."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from smpkit.errors import SmpkitError
from smpkit.observe.events import Event, MessageSpan
from smpkit.observe.merge import Run, read_run
from smpkit.observe.report import data
from smpkit.observe.report.data import Content, Curve, StepTimes, content_of, first_last_and_busiest
from smpkit.observe.runs import ENVIRONMENT, EVENTS, SUMMARY, VALUES, open_run
from smpkit.observe.summary import RunSummary, write_summary
from smpkit.observe.values import Logged, ValueWriter
from smpkit.plan.mesh import Mesh
from tests.observe.report.folders import MIB, STEPS, write_events, write_run


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Content:
    return content_of(write_run(tmp_path_factory.mktemp("job"), "20260102-030405"))


def test_steps_and_their_pace(content: Content) -> None:
    [times] = content.times
    assert (times.name, times.trains, times.numbers) == ("train_step", True, tuple(range(STEPS)))
    length = times.begin_s[1] - times.begin_s[0]
    assert times.per_second[:-1] == pytest.approx([1 / length] * (STEPS - 1))
    assert times.per_second[-1] is None


def test_a_step_is_no_longer_where_a_replica_runs_ahead(tmp_path: Path) -> None:
    run = read_run(write_events(tmp_path))
    mesh = Mesh(1, 1, 2)
    alone = [replace(log.header, pp=0, rdp=log.header.rank, pp_size=1, rdp_size=2) for log in run.logs]
    late = [replace(log, header=one) for log, one in zip(run.logs, alone, strict=True)]
    late[1] = replace(late[1], events=tuple(_later(event) for event in late[1].events))
    [together], [ahead] = (data._step_times(Run(mesh, tuple(logs))) for logs in (run.logs, late))
    assert ahead.seconds == together.seconds
    assert ahead.begin_s == together.begin_s


def _later(event: Event) -> Event:
    return replace(event, **{name: value + 10**9 for name, value in vars(event).items() if name.endswith("_ns")})


def test_the_function_that_trains_is_the_main_one() -> None:
    evaluates = StepTimes("evaluate", False, (0, 1), (0.0, 1.0), (9.0, 9.0), (0, 1))
    trains = StepTimes("train", True, (2,), (2.0,), (1.0,), (0,))
    assert [data._main_step(times) for times in ([evaluates, trains], [evaluates], [])] == [trains, evaluates, None]


def test_a_typical_step_is_shown_first_and_none_twice() -> None:
    seconds = (9.0, 5.0, 5.0, 1.0, 2.0, 4.0)
    times = StepTimes("train", True, tuple(range(6)), tuple(map(float, range(6))), seconds, tuple(range(6)))
    assert list(data._chosen_steps(times).items()) == [(4, "typical"), (5, "slowest"), (0, "first")]
    assert data._chosen_steps(StepTimes("train", True, (7,), (0.0,), (1.0,), (7,))) == {7: "typical"}


def test_of_many_the_first_the_last_and_the_busiest_are_shown() -> None:
    busy = [0.0] * 100
    busy[40], busy[70] = 2.0, 1.0
    assert first_last_and_busiest(busy, 4) == [0, 40, 70, 99]
    assert first_last_and_busiest(busy[:4], 4) == [0, 1, 2, 3]
    assert len(first_last_and_busiest(busy[:17])) == 16


def test_the_links_of_a_step_add_up_to_its_messages(content: Content, tmp_path: Path) -> None:
    run = read_run(write_events(tmp_path))
    events = [event for log in run.logs for event in log.events if isinstance(event, MessageSpan)]
    sent = [event for event in events if event.direction == "send" and event.step == content.steps[0].number]
    assert sum(link.num_messages for link in content.links) == len(sent) > 0
    assert sum(link.num_bytes for link in content.links) == sum(message.num_bytes for message in sent)
    assert {(link.sender, link.receiver) for link in content.links} == {(0, 1), (1, 0)}


def test_memory_over_a_step_is_what_was_held(content: Content) -> None:
    view = content.steps[0].memory[0]
    # 1F1B over two stages: two forwards, then one backward for each forward.
    live = [0, 1, 2, 1, 2, 1, 2, 1, 0]
    assert view.bytes["activations"] == tuple(3 * MIB * count for count in live)
    assert view.bytes["offloaded"] == tuple(MIB * count for count in live)
    assert view.out[-1] == view.back[-1] == 4 * MIB
    assert list(view.at_seconds) == sorted(view.at_seconds)
    assert view.at_seconds[0] == 0.0


def test_stalls_are_summed_by_layer(content: Content) -> None:
    stalls = content.stalls
    assert [(stall.rank, stall.layer, stall.steps) for stall in stalls] == [(0, "blocks.0", 8), (1, "blocks.0", 8)]
    assert stalls[0].seconds == pytest.approx(8 * 250e-6)


def test_a_long_curve_keeps_its_ends_and_extremes_and_a_short_one_its_gap() -> None:
    values = [1.0] * 10_000
    values[3333], values[7777] = 50.0, -50.0
    thinned = data._thinned(Curve("loss", tuple(range(10_000)), tuple(values)))
    assert len(thinned.steps) <= 2002
    assert {50.0, -50.0} <= set(thinned.values)
    assert (thinned.steps[0], thinned.steps[-1]) == (0, 9999)
    short = Curve("loss", (0, 1, 2), (1.0, None, 2.0))
    assert data._thinned(short) is short


def test_a_value_that_was_not_finite_is_none_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path, "20260102-030405")
    writer = ValueWriter(run.path)
    writer.write(Logged(STEPS, 0.0, {"loss": math.nan}))
    writer.write(Logged(STEPS + 1, 0.0, {"loss": math.inf}))
    writer.close()
    curve = content_of(run).curves[0]
    assert (curve.name, curve.values[-3:]) == ("loss", (0.5, None, None))
    assert curve.broken == f"NaN or infinite 2 times, first at step {STEPS}"


# --- what is missing or damaged -----------------------------------------------------------------------------------


def test_a_run_whose_ranks_told_nothing_at_their_end_shows_its_events_and_how_it_ended(tmp_path: Path) -> None:
    run = write_run(tmp_path, "20260102-030405")
    write_summary(run.path, RunSummary("odd", 1.7e9, 12.0, 0, "killed"))
    content = content_of(run)
    assert (content.summary and content.summary.exit_reason, len(content.steps)) == ("killed", 3)
    assert content.degrees == (2, 1, 1)  # not those of the summary, which nobody knew when it was written


def test_the_last_lines_of_the_rank_that_failed_are_shown_without_secrets(tmp_path: Path) -> None:
    run = write_run(tmp_path, "20260102-030405", failed=True)
    (run.path / "logs" / "rank-1.log").write_text("Traceback (most recent call last):\nAPI_TOKEN=hunter2secret\n")
    reason = "failed: OperationalError: cannot reach postgres://me:hunter2secret@db, rank 1"
    write_summary(run.path, RunSummary("odd", 1.7e9, 12.0, 0, reason))
    content = content_of(run)
    [log] = content.logs
    assert log.name == "rank-1"
    assert "hunter2secret" not in log.lines[1]
    assert content.summary is not None
    assert content.summary.exit_reason.startswith("failed: OperationalError: cannot reach postgres://**")


@pytest.mark.parametrize(
    ("name", "section"),
    [(SUMMARY, "summary"), (ENVIRONMENT, "settings"), (VALUES, "values"), (f"{EVENTS}/events_1.jsonl", "events")],
)
def test_damaged_files_leave_the_rest(tmp_path: Path, name: str, section: str) -> None:
    run = write_run(tmp_path, "20260102-030405")
    (run.path / name).write_bytes(b"{\xff\x00[\n")
    content = content_of(run)
    assert section in content.missing
    assert section != "events" or "events_1.jsonl" in content.missing["events"]
    assert section == "events" or content.steps


def test_a_folder_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SmpkitError, match="no events"):
        content_of(open_run(str(tmp_path)))


def test_steps_that_were_not_recorded_count_in_the_pace_and_evaluation_does_not() -> None:
    times = StepTimes("train_step", True, (0, 1, 21), (0.0, 1.0, 6.0), (0.5, 0.5, 0.5), (0, 1, 11))
    assert times.per_second == (1.0, 2.0, None)
