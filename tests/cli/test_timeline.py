from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from smpkit.plan.schedule.simulate import simulate
from tests.cli.conftest import Smpkit
from tests.observe.logs import COSTS, chain, logs_of, write_log
from tests.observe.trace_problems import trace_problems

REPORT = """\
step 1 of 0 to 1, `train_step`: 15.4 ms, 4 microbatches
2 ranks: pipeline 2 × tensor 1 × data 1

planned   15.0 ms, bubble 20.0%
stage 0  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
stage 1  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .

executed  15.4 ms, bubble 22.1%
stage 0  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
stage 1  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .
(a column is 1.0 ms; `.` is idle, `--` goes on with the action before it)

stage rank  busy   idle   fill forward backward   link  drain other live
0        0 77.9% 3.4 ms   0 µs    0 µs   3.1 ms 300 µs   0 µs  0 µs    2
1        1 77.9% 3.4 ms 1.0 ms  100 µs     0 µs 200 µs 2.1 ms  0 µs    1

link   messages    bytes  waited
0 → 1         4  4.0 KiB  1.3 ms
1 → 0         4  4.0 KiB  3.4 ms
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The events of two steps of two ranks, which ran as simulated."""
    for log in logs_of(chain(2, 4), num_steps=2):
        write_log(tmp_path / "output" / "data" / "events", log)
    return tmp_path


def test_the_report_shows_plan_and_execution_to_one_scale(folder: Path, smpkit: Smpkit) -> None:
    result = smpkit("timeline", str(folder))
    assert (result.exit_code, result.stdout, result.stderr) == (0, REPORT, "")


def test_json_holds_the_numbers(folder: Path, smpkit: Smpkit) -> None:
    result = smpkit("timeline", str(folder), "--json", "--step", "0")
    content = json.loads(result.stdout)
    simulated = simulate(chain(2, 4), COSTS)
    assert (content["step"], content["steps"], content["follows_plan"]) == (0, [0, 1], True)
    assert content["executed"]["bubble"] == pytest.approx(simulated.bubble)
    assert content["planned"]["bubble"] == pytest.approx(1 / 5)
    assert content["executed"]["peak_live_microbatches"] == [2, 1]
    assert [span[0] for span in content["executed"]["spans"][1]] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    assert content["links"][0]["num_messages"] == 4


def test_the_trace_is_written_and_sound(folder: Path, smpkit: Smpkit) -> None:
    result = smpkit("timeline", str(folder), "--perfetto", str(folder / "trace.json"))
    text = (folder / "trace.json").read_text()
    assert result.exit_code == 0
    assert result.stderr == f"trace: {folder / 'trace.json'}; open it at https://ui.perfetto.dev\n"
    assert trace_problems(text) == []
    assert "train_step 0" in text


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        (["--step", "9"], "error: there is no step 9 that all ranks finished\nhint: use 0 to 1\n", 2),
        (["--pipeline", "1"], "error: there is no pipeline 1\nhint: use 0\n", 2),
        (["--perfetto", "no/where.json"], "error: the trace cannot be written to `no/where.json`: No such file", 1),
    ],
    ids=["step", "pipeline", "trace"],
)
def test_what_cannot_be_is_said(arguments: list[str], error: str, code: int, folder: Path, smpkit: Smpkit) -> None:
    result = smpkit("timeline", str(folder), *arguments, code=code)
    assert result.stderr.startswith(error)


def test_a_file_that_breaks_off_is_a_warning(folder: Path, smpkit: Smpkit) -> None:
    path = folder / "output" / "data" / "events" / "events_1.jsonl"
    path.write_text(path.read_text()[:-20])
    result = smpkit("timeline", str(folder), code=0)
    assert result.stderr.startswith("warning: the events of rank 1 break off")
    assert result.stdout.startswith("step 0 of 0, ")


def test_a_picture_has_both_timelines(folder: Path, smpkit: Smpkit, tmp_path: Path) -> None:
    result = smpkit("timeline", str(folder), "--svg", str(tmp_path / "step.svg"))
    assert (result.exit_code, result.stdout) == (0, REPORT)
    picture = (tmp_path / "step.svg").read_text(encoding="utf-8")
    assert ">planned: 15.0 ms, bubble 20.0%<" in picture
    assert ">executed: 15.4 ms, bubble 22.1%<" in picture


def test_an_evaluation_at_the_end_is_not_the_step_that_is_shown(tmp_path: Path, smpkit: Smpkit) -> None:
    for log in logs_of(chain(2, 4), num_steps=2):
        kept = [each for each in log.events if (vars(each).get("step"), vars(each).get("kind")) != (1, "B")]
        write_log(tmp_path, replace(log, events=tuple(kept)))
    assert json.loads(smpkit("timeline", str(tmp_path), "--json").stdout)["step"] == 0
