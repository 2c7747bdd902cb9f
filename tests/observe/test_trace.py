"""The trace of a run: processes, tracks, arrows and counters for Perfetto, and torch's own profiles beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smpkit.observe.events import EventsError, MessageSpan, RankLog
from smpkit.observe.merge import merge
from smpkit.observe.profiles import steps_of
from smpkit.observe.trace import chrome_trace, profiles_of
from tests.observe.logs import chain, logs_of
from tests.observe.trace_problems import trace_problems

Events = list[dict[str, Any]]


def trace(steps: list[int] | None = None) -> Events:
    events: Events = json.loads(chrome_trace(merge(logs_of(chain(3, 4), num_steps=2)), steps))["traceEvents"]
    return events


def test_a_trace_is_sound_and_names_its_processes_and_tracks() -> None:
    events = trace()
    assert trace_problems(json.dumps({"traceEvents": events})) == []
    names = {(e["pid"], e["args"].get("name")) for e in events if e["ph"] == "M"}
    assert (2, "rank 2 · stage 2") in names
    assert {"steps", "compute", "sends", "receives"} <= {name for _, name in names}
    spans = [e for e in events if e["ph"] == "X" and e["name"] == "F0" and e["pid"] == 0]
    assert [span["dur"] for span in spans] == [1000.0, 1000.0], "microseconds"


def test_one_step_can_be_chosen_and_its_messages_have_arrows_forward_in_time() -> None:
    events = trace(steps=[1])
    assert {e["name"] for e in events if e.get("cat") == "steps"} == {"train_step 1"}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in ("s", "f"))
    assert len(starts) == 2 * 2 * 4
    assert starts.keys() == ends.keys()
    assert all(starts[name]["ts"] <= ends[name]["ts"] for name in starts)
    assert all(abs(starts[name]["pid"] - ends[name]["pid"]) == 1 for name in starts)


def test_counters_are_memory_and_live_microbatches() -> None:
    def values(name: str, rank: int) -> list[int]:
        return [e["args"]["value"] for e in trace() if e["ph"] == "C" and e["pid"] == rank and name in e["name"]]

    assert values("memory", 1) == [1000, 1001]
    live = values("live microbatches", 0)
    assert (max(live), live[-1]) == (3, 0)


def test_spans_that_overlap_get_tracks_of_their_own() -> None:
    logs = logs_of(chain(2, 2))
    sends = tuple(MessageSpan(0, "send", 1, 100 + i, 8, i * 10, 1000 + i * 10) for i in range(3))
    logs[0] = RankLog(logs[0].header, (*sends, *logs[0].events), truncated=False)
    text = chrome_trace(merge(logs))
    assert trace_problems(text) == []
    names = {e["args"].get("name") for e in json.loads(text)["traceEvents"] if e["ph"] == "M" and e["pid"] == 0}
    assert {"sends", "sends 2", "sends 3"} <= names


# --- profiles ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
import smpkit.torch as smp

smp.init()
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)))

@smp.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for _ in range(6):
    step(model, torch.randn(4, 8))
"""


@pytest.mark.slow
def test_chosen_steps_are_profiled_beside_the_events(tmp_path: Path) -> None:
    """Steps 2 and 3, of a pipeline over gloo: what torch saw of each lies inside of our own span of it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--ranks", "2", "-p", "pipeline_parallel_degree=2", "-p", "microbatches=2", "--profile-steps", "2:3"]
    command = [str(Path(sys.executable).with_name("smpkit")), "run", "train.py", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (tmp_path / "runs").glob("*-*")
    assert f"trace: runs/{run.name}/trace.json; open it at https://ui.perfetto.dev" in done.stderr
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        mine = [each for each in events if each["pid"] == rank]
        ours = {each["name"]: each for each in mine if each.get("cat") == "steps"}
        spans = [each for each in mine if each.get("tid", 0) >= 10_000 and each["ph"] == "X"]
        marks = {each["name"]: each for each in spans if each["name"].startswith("smpkit step")}
        assert set(marks) == {"smpkit step 2", "smpkit step 3"}
        for number in (2, 3):
            own = ours[f"step {number}"]
            assert abs(marks[f"smpkit step {number}"]["ts"] - own["ts"]) < 5_000  # microseconds; of the first one none
            inside = [each for each in spans if own["ts"] <= each["ts"] <= own["ts"] + own["dur"]]
            assert {"aten::linear", "aten::tanh"} & {each["name"] for each in inside}
        names = [each["args"]["name"] for each in mine if each["name"] == "thread_name"]
        assert any(name.startswith("torch: ") for name in names)
        assert len([each["name"] for each in mine if each["name"] == "process_name"]) == 1


@pytest.mark.parametrize("text", ["", "a", "3:2", "1:2:3", "-1:2"])
def test_what_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no steps"):
        steps_of(text)


def test_a_damaged_profile_is_named(tmp_path: Path) -> None:
    assert profiles_of(tmp_path) == {}
    (tmp_path / "profile_0.json").write_text('{"traceEvents": [')
    with pytest.raises(EventsError, match=r"profile_0\.json is no profile"):
        profiles_of(tmp_path)
