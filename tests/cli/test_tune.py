from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from smpkit.config.load import load_job
from smpkit.config.modelparallel import ModelParallelConfig
from tests.cli.conftest import Smpkit
from tests.plan.tune.facts import facts

ZOO = """
import torch
from torch import nn
import smpkit.torch as smp

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def traced():
    return Net(), torch.zeros(2, 64, dtype=torch.int64)

def bare():
    return Net()
"""

JOB = """\
entry_point: train.py
compute: {instance_type: ml.p4d.24xlarge, instance_count: 2}  # two
distribution:
  smdistributed:
    modelparallel:
      enabled: true
      parameters:
        # what we had
        pipeline_parallel_degree: 4   # stages
        microbatches: 4
        pipeline: simple
        active_microbatches: 4
        ddp: true
  torch_distributed: {enabled: true}
"""


@pytest.fixture
def zoo(folder: Path) -> Path:
    (folder / "zoo.py").write_text(ZOO)
    (folder / "job.yaml").write_text(JOB)
    (folder / "lab.json").write_text(json.dumps(facts()))
    return folder


def parameters(folder: Path) -> ModelParallelConfig:
    """Return what the job has now."""
    config = load_job(folder / "job.yaml").config.distribution.model_parallel
    assert config is not None
    return config


def tune(smpkit: Smpkit, *arguments: str, code: int | None = None) -> Result:
    return smpkit("tune", "job.yaml", "--model", "zoo:traced", "--seconds", "2", *arguments, code=code)


def found(smpkit: Smpkit, *arguments: str) -> Any:
    return json.loads(tune(smpkit, "--json", *arguments, code=0).stdout)


def test_the_best_are_shown_with_what_they_take(zoo: Path, smpkit: Smpkit) -> None:
    done = tune(smpkit, "--top", "3", code=0)
    lines = done.stdout.splitlines()
    assert lines[0] == "train: 16 ranks on 2 hosts of ml.p4d.24xlarge"
    assert "vendor figures, assuming 50% of peak compute and 80% of link speed" in done.stdout
    assert "model     Net, 32 samples (2048 tokens) in a step" in lines
    assert any(line.startswith("as it is") for line in lines)
    for word in ("bubble", "communication", "stall", "limited by", "activations", "ruled out", "settings  "):
        assert word in done.stdout
    # Of 32 samples, each of the job's 4 replicas reads 8.
    count, size = map(int, re.findall(r"^1 .* (\d+) of (\d+) ", done.stdout, re.MULTILINE)[0])
    assert f"batch     the script must pass {count * size} samples to a step on each rank, not 8" in lines
    assert count * size != 8
    assert "--write" in done.stderr
    assert (zoo / "job.yaml").read_text() == JOB


def test_programs_get_all_of_it(zoo: Path, smpkit: Smpkit) -> None:
    content = found(smpkit, "--calibration", "lab.json", "--machine", "lab", "--hosts", "2")
    assert content["machine"]["source"] == "measured on `lab` (Some GPU) with 4 ranks"
    assert (content["ranks"], content["hosts"], content["samples"]) == (8, 2, 16)
    best = content["best"][0]
    assert best["step_seconds"] == pytest.approx(sum(best["parts_seconds"].values()))
    assert best["tokens_per_second"] == pytest.approx(content["tokens"] / best["step_seconds"])
    assert best["step_seconds"] <= content["present"]["step_seconds"]
    assert set(best["layers"]) == {f"blocks.{index}" for index in range(8)}
    assert sum(len(stage["units"]) for stage in best["stages"]) == 10
    ModelParallelConfig.from_sources(best["parameters"], None)


def test_ranks_lie_on_the_hosts_that_are_asked_for(zoo: Path, smpkit: Smpkit) -> None:
    two = ("-p", "pipeline_parallel_degree=2", "--ranks", "2", "--batch", "8")
    near, far = (found(smpkit, *two, "--hosts", hosts) for hosts in ("1", "2"))
    assert [content["hosts"] for content in (near, far)] == [1, 2]
    assert near["present"]["step_seconds"] < far["present"]["step_seconds"]
    for ranks, said in (("3", "cannot be spread evenly over 2 hosts"), ("18", "more than ml.p4d.24xlarge has: 8")):
        assert said in tune(smpkit, "--ranks", ranks, "--hosts", "2").stderr
    (zoo / "job.yaml").write_text(JOB.replace("{enabled: true}", "{enabled: true, processes_per_host: 2}"))
    assert tune(smpkit).stdout.startswith("train: 4 ranks on 2 hosts")


def test_the_job_is_changed_and_its_comments_stay(zoo: Path, smpkit: Smpkit) -> None:
    to_the_end = ("--seconds", "100")  # or a second search, at another pace, finds something better
    done = tune(smpkit, "--write", *to_the_end, code=0)
    text = (zoo / "job.yaml").read_text()
    for comment in ("# two", "# what we had", "# stages"):
        assert comment in text
    assert "Changed job.yaml: " in done.stderr
    assert "removed active_microbatches" in done.stderr
    again = found(smpkit, *to_the_end)
    assert again["best"][0]["changes"] == {}
    assert again["present"]["step_seconds"] == pytest.approx(again["best"][0]["step_seconds"], rel=0.01)
    # What `smpkit plan` says of the changed job is what was predicted.
    planned = json.loads(smpkit("plan", "job.yaml", "--ranks", "16", "--hosts", "2", "--json").stdout)
    assert planned["schedule"]["microbatches"] == parameters(zoo).microbatches
    assert sorted(path.name for path in zoo.iterdir() if "tune" in path.name) == []


def test_the_degrees_of_the_job_need_not_divide_the_ranks_that_are_asked_for(zoo: Path, smpkit: Smpkit) -> None:
    (zoo / "job.yaml").write_text(JOB.replace("{enabled: true}", "{enabled: true, processes_per_host: 3}"))
    made = found(smpkit, "--hosts", "1", "--ranks", "3", "--batch", "12", "-p", "pipeline_parallel_degree=4")
    assert (made["ranks"], made["present"]) == (3, None)


def test_a_job_is_not_changed_for_other_ranks_than_it_starts(zoo: Path, smpkit: Smpkit) -> None:
    text = JOB.replace("{enabled: true}", "{enabled: true, processes_per_host: 2}")
    (zoo / "job.yaml").write_text(text)
    refused = tune(smpkit, "--ranks", "8", "--write", code=2)
    assert refused.stdout == ""  # before the search
    assert "error: `--write` is for the 4 ranks of `job.yaml`, not for 8" in refused.stderr
    tune(smpkit, "--ranks", "4", "--write", code=0)
    assert (zoo / "job.yaml").read_text() != text


def test_what_was_predicted_with_a_parameter_is_written_with_it(zoo: Path, smpkit: Smpkit) -> None:
    tune(smpkit, "-p", "bf16=true", "--write", code=0)
    assert parameters(zoo).bf16
    refused = tune(smpkit, "--set", "compute.instance_count=4", "--write", code=2).stderr
    assert "`--write` cannot be given beside `--set`, which the file would not have" in refused


def test_a_calibration_of_another_device_is_refused_by_name(zoo: Path, smpkit: Smpkit) -> None:
    done = tune(smpkit, "--calibration", "lab.json", code=2)
    assert "`lab.json` cannot be used for `ml.p4d.24xlarge`, which has NVIDIA A100 40 GB" in done.stderr
    assert "it was measured on `lab`, whose ranks compute on Some GPU" in done.stderr
    twice = tune(smpkit, "--calibration", "lab.json", "--tflops", "9", code=2)
    assert "`--tflops` says nothing beside `--calibration`" in twice.stderr
    local = tune(smpkit, "--set", "compute.instance_type=local", "--calibration", "lab.json", code=2)
    assert "`lab.json` cannot be used for this machine: it was measured on `lab`" in local.stderr


def test_facts_are_needed(zoo: Path, smpkit: Smpkit) -> None:
    done = tune(smpkit, "--set", "compute.instance_type=local", code=2)
    assert "nothing is known about this machine's speed yet" in done.stderr
    assert "smpkit calibrate" in done.stderr


def test_a_model_without_arguments_is_refused(zoo: Path, smpkit: Smpkit) -> None:
    assert "`zoo:bare` returns no arguments" in tune(smpkit, "--model", "zoo:bare", code=2).stderr


def test_what_cannot_fit_says_what_it_lacks(zoo: Path, smpkit: Smpkit) -> None:
    done = tune(smpkit, "--memory-gib", "1.06", "--write", code=1)
    assert "no configuration fits; the nearest, pipeline " in done.stderr
    assert "1 microbatches" not in done.stderr
    assert " GiB with nothing kept" in done.stderr or "weights, gradients and states alone need" in done.stderr
    assert "hint: use more `--hosts`" in done.stderr
    assert (zoo / "job.yaml").read_text() == JOB


def test_the_older_name_of_the_degree_is_replaced(zoo: Path, smpkit: Smpkit) -> None:
    (zoo / "job.yaml").write_text(JOB.replace("pipeline_parallel_degree: 4", "partitions: 16"))
    tune(smpkit, "--write", code=0)
    assert parameters(zoo).pipeline_parallel_degree != 16


def test_parameters_in_a_file_of_their_own_are_changed_there(zoo: Path, smpkit: Smpkit) -> None:
    text_before = "# ours\npipeline_parallel_degree: 16  # deep\nmicrobatches: 16\nddp: true\n"
    (zoo / "mp.yaml").write_text(text_before)
    text = "entry_point: train.py\ncompute: {instance_type: ml.p4d.24xlarge, instance_count: 2}\n"
    text += "distribution:\n  smdistributed: {modelparallel: {enabled: true, parameters: mp.yaml}}\n"
    text += "  torch_distributed: {enabled: true}\n"
    (zoo / "job.yaml").write_text(text)
    tune(smpkit, "--write", code=0)
    assert (zoo / "job.yaml").read_text() == text
    changed = (zoo / "mp.yaml").read_text()
    assert changed != text_before
    assert changed.startswith("# ours\n")


AUTOMATIC = JOB.replace(
    JOB[JOB.index("        pipeline_parallel_degree") : JOB.index("  torch_distributed")],
    "        microbatches: 1\n        offload_activations: auto   # as it sees fit\n        ddp: true\n",
)
ON_ONE_RANK = ("--calibration", "lab.json", "--machine", "lab", "--ranks", "1", "--hosts", "1")


@pytest.mark.parametrize(
    ("gib", "batch", "model", "stays", "layers"),
    [("1.5", "1", "zoo:long", True, {"keep", "offload"}), ("1.2", "64", "zoo:traced", False, {"keep"})],
    ids=["what does not fit is offloaded", "smaller microbatches fit as they are"],
)
def test_what_layers_do_automatically_is_searched_too(
    zoo: Path, smpkit: Smpkit, gib: str, batch: str, model: str, *, stays: bool, layers: set[str]
) -> None:
    (zoo / "zoo.py").write_text(f"{ZOO}\ndef long():\n    return Net(), torch.zeros(1, 8192, dtype=torch.int64)\n")
    (zoo / "job.yaml").write_text(AUTOMATIC)
    asked = (*ON_ONE_RANK, "--memory-gib", gib, "--batch", batch, "--model", model)
    done = tune(smpkit, *asked, "--write", code=0)
    assert ("removed offload_activations" in done.stderr) is not stays
    assert ("offload_activations: auto   # as it sees fit" in (zoo / "job.yaml").read_text()) is stays
    assert parameters(zoo).offload_activations == ("auto" if stays else False)
    again = found(smpkit, *asked)
    assert again["best"][0]["changes"] == {}
    assert set(again["present"]["layers"].values()) == layers
    assert again["present"]["step_seconds"] == again["best"][0]["step_seconds"]
