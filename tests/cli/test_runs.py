"""`smpkit runs` and the logs of a run here."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from smpkit.cli._run import _leave_trace
from smpkit.observe.profiles import profile_name
from smpkit.observe.runs import EVENTS, Run, held, make_run
from smpkit.observe.summary import KindBytes, RankSummary, RunSummary, Split, write_summary
from tests.cli.conftest import Smpkit

NOW = datetime(2026, 11, 25, 19, 15, 2).astimezone()
SPLIT = Split(compute=0.06, bubble=0.03, optimizer=0.01)


@pytest.fixture
def runs(here: Path) -> list[Run]:
    """Three runs: one that finished and logged, a faster one, and one that goes on."""
    made = [make_run(here, name, NOW + timedelta(seconds=i)) for i, name in enumerate(("gpt", "gpt", "t5"))]
    for run, rate in ((made[0], 10.0), (made[1], 12.5)):
        rank = RankSummary(0, "a", SPLIT, KindBytes(weights=2**20), device_peak=3 * 2**20)
        write_summary(run.path, RunSummary("gpt", 0.0, 60.0, 600, "finished", rate, rate * 16, ranks=(rank,)))
    lines = [{"step": step, "time": 0.0, "values": {"loss": 3.0 - step, "norm": "NaN"}} for step in (1, 2)]
    (made[0].path / "values.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"step": 3, "ti')
    logs = made[2].path / "logs"
    logs.mkdir()
    (logs / "launcher.log").write_text("starting\n[rank 0] a 1\n[rank 1] b 2\n[rank 0] c 3\x1b]0;x\n")
    (logs / "rank-0.log").write_text("a 1\nc 3\n")
    (logs / "rank-1.log").write_text("b 2\n")
    return made


def test_runs_are_listed_with_how_they_ended_and_what_they_reached(runs: list[Run], smpkit: Smpkit) -> None:
    assert smpkit("runs").stdout.splitlines() == [
        "run                     ended  steps  loss  steps/s   memory",
        "gpt-20261125-191502  finished    600     1       10  3.0 MiB",
        "gpt-20261125-191503  finished    600     –     12.5  3.0 MiB",
        "t5-20261125-191504       lost      –     –        –        –",
    ]
    with held(runs[2].path):
        assert "t5-20261125-191504    running " in smpkit("runs").stdout
    assert len(smpkit("runs", "-n", "1").stdout.splitlines()) == 2
    plain = json.loads(smpkit("runs", "--json").stdout)
    assert [each["summary"] and each["summary"]["steps"] for each in plain] == [600, 600, None]
    assert plain[0]["values"] == {"loss": 1.0, "norm": "NaN"}  # JSON has no such number


def test_of_a_long_reason_the_class_of_the_error_is_seen(runs: list[Run], smpkit: Smpkit) -> None:
    """`failed: smpkit.errors.R…` told nothing."""
    reason = "failed: smpkit.errors.RemoteError: rank 1 has ended and more than a line can hold"
    write_summary(runs[2].path, RunSummary("t5", 0.0, 1.0, 0, reason))
    assert " failed: RemoteError: ra… " in smpkit("runs").stdout
    wide = smpkit("runs", env={"COLUMNS": "140"}).stdout
    assert " failed: RemoteError: rank 1 has ended and more than a line can hold " in wide


def test_one_run_shows_its_block(runs: list[Run], smpkit: Smpkit) -> None:
    said = smpkit("runs", runs[0].label).stdout.splitlines()
    assert said[0] == "gpt-20261125-191502: finished"
    assert said[1] == "run     600 steps of 100.0 ms: 160 samples/s"
    assert said[-1] == "values  loss 1, norm nan"


@pytest.mark.usefixtures("here")
def test_without_runs_it_says_how_to_make_one(smpkit: Smpkit) -> None:
    done = smpkit("runs", code=0)
    assert (done.stdout, "`smpkit run JOB_FILE` makes one" in done.stderr) == ("", True)
    assert json.loads(smpkit("runs", "--json").stdout) == []
    for command in ("runs", "report", "timeline"):
        smpkit(command, "gpt", code=2)
    # A folder of something else is no run that is "running, or lost".
    assert smpkit("runs", ".").stderr == "error: `.` is not the folder of a run\nhint: `smpkit runs` lists them\n"


def test_the_log_of_the_last_run_is_printed_by_rank_pattern_and_end(runs: list[Run], smpkit: Smpkit) -> None:
    lines = ["starting", "[rank 0] a 1", "[rank 1] b 2", "[rank 0] c 3\\x1b]0;x"]
    assert smpkit("logs").stdout.splitlines() == lines
    assert smpkit("logs", runs[2].label, "--rank", "1").stdout.splitlines() == [lines[2]]
    assert smpkit("logs", "--grep", "^a").stdout.splitlines() == [lines[1]]
    assert smpkit("logs", "--tail", "1").stdout.splitlines() == [lines[3]]
    plain = [json.loads(line) for line in smpkit("logs", "--json").stdout.splitlines()]
    assert plain[:2] == [{"rank": None, "text": "starting"}, {"rank": 0, "text": "a 1"}]


def test_a_followed_line_is_printed_when_it_is_whole(
    runs: list[Run], smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second half had been a line without a rank; and the log of a killed command was followed for ever.

    The summary of rank 0 was taken for the end, while other ranks still printed.
    """
    write_summary(runs[2].path, RunSummary("t5", 0.0, 1.0, 0, "finished"))
    assert len(smpkit("logs", "-f").stdout.splitlines()) == 4  # of a run that is over
    log = runs[2].path / "logs" / "launcher.log"
    log.write_text("[rank 0] one\n[rank 1] tw")
    moments = iter(["o\n[rank 1] thr", "ee"])
    with ExitStack() as command:
        command.enter_context(held(runs[2].path))

        def meanwhile(_: float) -> None:
            text = next(moments)
            with log.open("a") as file:
                file.write(text)
            if text == "ee":
                command.close()  # killed: no summary says that the run is over

        monkeypatch.setattr("smpkit.cli.logs.time.sleep", meanwhile)
        assert smpkit("logs", "-f", "--rank", "1").stdout.splitlines() == ["[rank 1] two", "[rank 1] three"]


def test_what_a_log_here_does_not_have_is_refused(runs: list[Run], smpkit: Smpkit) -> None:
    done = smpkit("logs", "--rank", "7", code=1)
    assert (done.stdout, "has no log of rank 7\nhint: it has logs of ranks 0, 1\n" in done.stderr) == ("", True)
    elsewhere = smpkit("logs", runs[2].label, "--backend", "slurm")
    assert (elsewhere.stdout, f"there is no job `{runs[2].label}`" in elsewhere.stderr) == ("", True)
    assert "without times and hosts" in smpkit("logs", "--since", "1m").stderr
    assert "has no log" in smpkit("logs", str(runs[0].path)).stderr


def test_a_profile_that_a_killed_rank_left_half_written_is_a_warning(
    runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """It had been the error of the whole command, whose exit code is that of the run."""
    events = runs[0].path / EVENTS
    events.mkdir()
    (events / profile_name(0)).write_text('{"traceEvents": [')
    _leave_trace(runs[0])
    assert "warning: no trace of the profiled steps" in capsys.readouterr().err
