"""Profiles of torch's profiler in the trace of a run: on the same axis of time, of the ranks' own processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from smpkit.observe.events import EventsError
from smpkit.observe.profiles import steps_of
from smpkit.observe.trace import profiles_of

SCRIPT = """
import torch
import smpkit.torch as smp

smp.init()
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for _ in range(6):
    optimizer.zero_grad()
    step(model, torch.randn(4, 8))
    optimizer.step()
"""

JOB = """
entry_point: train.py
distribution:
  torch_distributed: {enabled: true, processes_per_host: 2}
  smdistributed: {modelparallel: {enabled: true, parameters: {pipeline_parallel_degree: 2, microbatches: 2, ddp: true}}}
"""


@pytest.mark.slow
def test_chosen_steps_are_profiled_beside_the_events(tmp_path: Path) -> None:
    """Steps 2 and 3, of a pipeline over gloo: what torch saw of each lies inside of our own span of it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(JOB)
    command = [str(Path(sys.executable).with_name("smpkit")), "run", "job.yaml", "--profile", "2:3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (tmp_path / "runs").glob("*-*")
    assert f"trace: runs/{run.name}/trace.json; open it at https://ui.perfetto.dev" in done.stderr
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        mine = [each for each in events if each["pid"] == rank]
        ours = {each["name"]: each for each in mine if each.get("cat") == "steps"}
        spans = [each for each in mine if each.get("tid", 0) >= 10_000 and each["ph"] == "X"]
        assert {each["name"] for each in spans if each["name"].startswith("smpkit step")} == {
            "smpkit step 2",
            "smpkit step 3",
        }
        for number in (2, 3):
            own = ours[f"step {number}"]
            [mark] = [each for each in spans if each["name"] == f"smpkit step {number}"]
            assert abs(mark["ts"] - own["ts"]) < 5_000  # microseconds, of which the first step has none by definition
            inside = [each for each in spans if own["ts"] <= each["ts"] <= own["ts"] + own["dur"]]
            assert {"aten::linear", "aten::tanh"} & {each["name"] for each in inside}
        names = [each["args"]["name"] for each in mine if each["name"] == "thread_name"]
        assert any(name.startswith("torch: ") for name in names)
        assert len([each["name"] for each in mine if each["name"] == "process_name"]) == 1


@pytest.mark.parametrize(("text", "steps"), [("10:12", [10, 11, 12]), ("3", [3]), (" 0:0 ", [0])])
def test_steps(text: str, steps: list[int]) -> None:
    assert [*steps_of(text)] == steps


@pytest.mark.parametrize("text", ["", "a", "3:2", "1:2:3", "-1:2"])
def test_what_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no steps"):
        steps_of(text)


def test_a_damaged_profile_is_named(tmp_path: Path) -> None:
    assert profiles_of(tmp_path) == {}
    (tmp_path / "profile_0.json").write_text('{"traceEvents": [')
    with pytest.raises(EventsError, match=r"profile_0\.json is no profile"):
        profiles_of(tmp_path)
