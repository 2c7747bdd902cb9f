"""The folder of a run, the block at its end, and what a rank leaves that runs out of memory: with real ranks.

One job runs under torchrun; the others under mpirun, which starts without importing torch.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from smpkit.observe.summary import read_summary
from smpkit.plan.tune.calibration import this_machine
from tests.plan.tune.facts import facts

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_text"
SMALL = ["steps=6", "batch=4", "text-bytes=60000", "write-bytes=1", "save-every=100", "recompute=none"]


def smpkit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "NO_COLOR": "1", "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    environ.pop("SMPKIT_SUMMARY", None)
    (folder / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "smpkit", *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=170, check=False)


def ran(
    folder: Path, parameters: Mapping[str, object], ranks: int, *words: object
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run TRAINING under mpirun; return how it ended, and the folder of the run."""
    distribution = {
        "mpi": {"enabled": True, "processes_per_host": ranks},
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
    }
    (folder / "train.py").write_text(TRAINING)
    (folder / "job.yaml").write_text(yaml.safe_dump({"entry_point": "train.py", "distribution": distribution}))
    done = smpkit(folder, "run", "job.yaml", "--", *map(str, words))
    [run] = [path for path in (folder / "runs").iterdir() if path.is_dir()]
    return done, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example over two pipeline ranks, with no place for checkpoints; its folder, and what it said."""
    folder = tmp_path_factory.mktemp("jobs")
    shutil.copytree(EXAMPLE, folder / "gpt", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    job = folder / "gpt" / "job.yaml"
    job.write_text(
        re.sub(r"(?m)^(checkpoints| *offload_activations| *activation_loading_horizon):.*$", "", job.read_text())
    )
    options = [word for each in SMALL for word in ("-H", each)]
    done = smpkit(folder, "run", "gpt/job.yaml", "--ranks", "2", *options)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout + done.stderr


@pytest.fixture
def run(trained: tuple[Path, str]) -> Path:
    [run] = [path for path in (trained[0] / "gpt" / "runs").iterdir() if path.is_dir()]
    return run


def test_everything_is_in_the_folder_of_the_run_and_nothing_in_the_temporary_one(
    trained: tuple[Path, str], run: Path
) -> None:
    assert re.fullmatch(r"gpt-text-\d{8}-\d{6}", run.name)
    assert {path.name for path in run.iterdir()} == {
        "checkpoints", "environment.json", "events", "job.yaml", "logs", "model", "plan.json", "summary.json",
        "values.jsonl",
    }  # fmt: skip
    left = {path.name for path in (trained[0] / "tmp").iterdir()}
    assert left <= {f"torchinductor_{getpass.getuser()}"}, "torch's own cache is all that may be there"
    assert {path.name for path in (run / "events").iterdir()} == {"events_0.jsonl", "events_1.jsonl"}
    assert "[rank" not in (run / "logs" / "rank-0.log").read_text()
    job = yaml.safe_load((run / "job.yaml").read_text())
    assert job["hyperparameters"]["steps"] == 6
    assert job["distribution"]["smdistributed"]["modelparallel"]["parameters"]["pipeline_parallel_degree"] == 2
    assert json.loads((run / "plan.json").read_text())["mesh"]["pipeline"] == 2
    environment = json.loads((run / "environment.json").read_text())
    assert environment["ranks"] == 2
    assert "torch" in environment["packages"]


def test_the_block_is_printed_once_and_is_the_summary(trained: tuple[Path, str], run: Path) -> None:
    said = trained[1]
    assert len(re.findall(r"(?m)^\[rank 0\] run     6 steps of ", said)) == 1
    assert not re.search(r"(?m)^\[rank 1\] (run|time|memory)  ", said)
    assert all(len(line) <= 80 for line in said.splitlines() if re.match(r"\[rank 0\] (run|time|memory|saved) ", line))
    summary = read_summary(run)
    assert (summary.name, summary.steps, summary.exit_reason) == ("gpt-text", 6, "finished")
    assert list(summary.values) == ["loss", "learning rate", "held_out_loss"]
    first, last = summary.values["loss"]
    assert f"values  loss {first:.4g} → {last:.4g}, learning rate " in said
    assert last < first
    assert summary.steps_per_s is not None
    assert summary.samples_per_s == pytest.approx(summary.steps_per_s * 4)
    assert summary.tokens_per_s == pytest.approx(summary.steps_per_s * 4 * 64)
    for rank in summary.ranks:
        assert rank.split.total == pytest.approx(1 / summary.steps_per_s, rel=0.02)
        assert min(rank.split.compute, rank.split.bubble, rank.split.optimizer) > 0
        assert rank.peak.weights > 0
        assert rank.peak.activations > 0
        assert rank.planned is not None
        assert rank.peak.weights == pytest.approx(rank.planned.weights, rel=0.02)
        assert rank.peak.states == pytest.approx(rank.planned.states, rel=0.02)


def test_commands_take_the_last_run(trained: tuple[Path, str], run: Path) -> None:
    folder = trained[0]
    timeline = smpkit(folder, "timeline")
    assert timeline.returncode == 0, timeline.stderr
    assert timeline.stdout.startswith("step 9 of 0 to 14, `train_step`: ")
    assert "\nexecuted  " in timeline.stdout
    assert "NOT in planned order" not in timeline.stdout
    logs = smpkit(folder, "logs", "--rank", "0", "--grep", "held-out loss .* ->")
    assert re.fullmatch(r"\[rank 0\] held-out loss .*\n", logs.stdout), logs.stderr
    runs = smpkit(folder, "runs")
    assert re.search(rf"(?m)^{run.name} +finished +6 +\d\.\d+ ", runs.stdout), "its loss"
    one = smpkit(folder, "runs", "gpt-text")
    assert one.stdout.splitlines()[0] == f"{run.name}: finished"
    assert one.stdout.splitlines()[1].startswith("run     6 steps of ")


TRAINING = """
import os, resource, signal, sys, torch, smpkit.torch as smp
from torch import nn
how, fatal_call = sys.argv[1], int(sys.argv[2])
class Fatal(nn.Module):
    calls = 0
    def forward(self, x):
        Fatal.calls += not smp.is_tracing()  # for the run's plan
        if Fatal.calls == fatal_call and smp.rank() == smp.size() - 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
            torch.ones(2**27)
        return x
@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss
smp.init()
linears = [nn.Linear(64, 64) for _ in range(4)]
model = smp.DistributedModel(nn.Sequential(*linears[:2], nn.Sequential(linears[2], Fatal()), linears[3]))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
for _ in smp.progress(range(6)):
    optimizer.zero_grad()
    train_step(model, torch.ones(8, 64))
    optimizer.step()
smp.shutdown()
"""
"""Trains four layers; the last rank is killed, or its memory is limited, in a call of the third one."""
WEIGHTS = 4 * 4 * (64 * 64 + 64)
"""Bytes of the four."""


@pytest.mark.parametrize("how", ["kill", pytest.param("limit", marks=pytest.mark.slow)])
def test_a_rank_without_memory_says_what_it_held_and_where_and_what_saves_most(tmp_path: Path, how: str) -> None:
    done, run = ran(tmp_path, {"microbatches": 4}, 1, how, 8)
    assert done.returncode == 1
    held = r"(?m)^tensors held [0-9.]+ [KM]iB: weights 65\.0 KiB, .*activations [0-9.]+ [KM]iB"
    assert re.search(held, done.stderr), done.stderr
    assert "run     " not in done.stderr, "the block is of runs that went well"
    assert re.search(r"(?m)^was in step 1, forward of microbatch 3, `2\S*`$", done.stderr), done.stderr
    # Of the 512 MiB that it asks for at the limit, no setting saves as much as it holds.
    hint = "`smp.set_activation_checkpointing(layers)` saves most: up to "
    assert f"hint: {'use more microbatches' if how == 'limit' else hint}" in done.stderr
    assert read_summary(run).exit_reason.startswith("failed: ")
    assert "failed: " in smpkit(tmp_path, "runs").stdout


@pytest.mark.slow
def test_the_plan_of_a_run_knows_its_model_and_the_block_its_share_of_the_peak(tmp_path: Path) -> None:
    peak = 1e6
    rate = {"dtype": "float32", "size": 512, "flops_per_second": peak, "shared_flops_per_second": peak}
    calibration = facts(machine=this_machine().model_dump(), matmul=[rate], link=None)
    (tmp_path / "calibration.json").write_text(json.dumps(calibration))
    pipeline = {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "simple", "active_microbatches": 4}
    done, run = ran(tmp_path, pipeline, 2, "trains", 0)
    assert done.returncode == 0, done.stderr
    plan, summary = json.loads((run / "plan.json").read_text()), read_summary(run)
    assert (plan["model"], plan["traced"], plan["optimizer"]) == ("Sequential", True, "adamw")
    assert plan["mesh"]["pipeline"] == len(plan["stages"]) == 2
    for rank, stage in zip(summary.ranks, plan["stages"], strict=True):
        assert rank.planned is not None
        assert rank.peak.weights == stage["parameters_bytes"] == rank.planned.weights == WEIGHTS / 2
        assert rank.planned.states == stage["optimizer_bytes"] == 2 * rank.planned.weights
        assert rank.planned.activations == stage["activations_bytes"] > 0
    # Six operations for each weight of a product and sample; two ranks.
    assert summary.steps_per_s is not None
    assert summary.flops_share == pytest.approx(6 * 4 * 64 * 64 * 8 * summary.steps_per_s / (2 * peak))
    assert "of the peak in calibration.json" in re.sub(r"\n\[rank 0\]\s+", " ", done.stdout + done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "fatal_call", "expected"),
    [(1, 5, "plan 65.0 KiB"), (2, 1, "as planned")],
    ids=["data parallel", "in its first step"],
)
def test_the_report_of_a_run_that_was_killed_shows_its_plan(
    degree: int, fatal_call: int, expected: str, tmp_path: Path
) -> None:
    parameters = {"pipeline_parallel_degree": degree, "microbatches": 2, "ddp": True}
    done, run = ran(tmp_path, parameters, 2, "kill", fatal_call)
    assert done.returncode != 0
    plan = json.loads((run / "plan.json").read_text())
    assert [stage["parameters_bytes"] for stage in plan["stages"]] == [WEIGHTS / degree] * degree
    assert [stage["optimizer_bytes"] for stage in plan["stages"]] == [2 * WEIGHTS / degree] * degree
    report = smpkit(tmp_path, "report", "--output", "report.html")
    assert report.returncode == 0, report.stderr
    assert expected in (tmp_path / "report.html").read_text()
