from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Smpkit

REPORT = """\
train: 16 ranks on 2 hosts

mesh      pipeline 2 × tensor 2 × data 4, cluster
                  pp 0       pp 1
                  tp 0 tp 1  tp 0 tp 1
          rdp 0      0    1     2    3
          rdp 1      4    5     6    7
          rdp 2      8    9    10   11
          rdp 3     12   13    14   15

hosts     0–7  8–15
mp groups 0–3  4–7  8–11  12–15
dp groups 0,1,4,5,8,9,12,13  2,3,6,7,10,11,14,15
tp groups 0,1  2,3  4,5  6,7  8,9  10,11  12,13  14,15

schedule  interleaved (1F1B), 4 microbatches, at most 4 active, predicted bubble 20.0%
stage 0  F0 F1 F2 B0 F3 B1 .  B2 .  B3
stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3 .
held      3  1   (microbatches that each stage holds at its peak)
"""

ZOO = """
import torch
from torch import nn
import smpkit.torch as smp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def traced():
    return Net(), torch.zeros(4, 16, dtype=torch.int64)

class Placed(Net):
    def __init__(self):
        super().__init__()
        smp.set_partition(self.embed, 0)
        for number, block in enumerate(self.blocks):
            smp.set_partition(block, number % 2)
        smp.set_partition(self.head, 1)

def divided():
    with smp.tensor_parallelism():
        return traced()

class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        for number in range(2):
            smp.set_partition(self.down[number], number)
            smp.set_partition(self.up[number], 1 - number)

    def forward(self, x):
        first = self.down[0](x)
        second = self.down[1](first)
        return self.up[1](self.up[0](second) + second + first)

def skips():
    return Skips(), torch.zeros(4, 8)

class Chooses(Skips):
    def forward(self, x):
        return super().forward(x) if self.down[0](x).sum() > 0 else x

def chooses():
    return Chooses(), torch.zeros(4, 8)

def checkpointed():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)))
    smp.set_activation_checkpointing(net)
    return net, torch.zeros(16, 64)

def failing():
    raise ValueError("no such weights")
"""


@pytest.fixture
def zoo(folder: Path) -> Path:
    """The job's folder, with models in it."""
    (folder / "zoo.py").write_text(ZOO)
    return folder


def planned(smpkit: Smpkit, *arguments: str, **parameters: Any) -> dict[str, Any]:
    """Return the plan of a file of parameters, `mp.json`, which stays."""
    Path("mp.json").write_text(json.dumps(parameters))
    result = smpkit("plan", "mp.json", *arguments, "--json", code=0)
    content: dict[str, Any] = json.loads(result.stdout)
    return content


@pytest.mark.usefixtures("folder")
def test_a_job_shows_ranks_groups_and_schedule(smpkit: Smpkit) -> None:
    result = smpkit("-q", "plan", "job.yaml")
    assert (result.exit_code, result.stdout, result.stderr) == (0, REPORT, "")


def test_degrees_are_enough(smpkit: Smpkit) -> None:
    result = smpkit("plan", "--pp", "4", "--microbatches", "8", "--json")
    content = json.loads(result.stdout)
    assert (content["ranks"], content["hosts"]) == (4, 1)
    assert content["schedule"]["bubble"] == pytest.approx(3 / 11)
    assert content["schedule"]["peak_live_microbatches"] == [5, 4, 3, 1]
    assert content["schedule"]["actions"][3].startswith("F0 B0 F1 B1")


def test_a_model_shows_its_parts_and_memory(zoo: Path, smpkit: Smpkit) -> None:
    arguments = ("--set", "distribution.smdistributed.modelparallel.parameters.tensor_parallel_degree=1")
    result = smpkit("plan", "job.yaml", *arguments, "--model", "zoo:Net", "--memory-gib", "0.001", code=1)
    lines = result.stdout.splitlines()
    parts = "parts     of Net, by parameter sizes (as with skip_tracing)"
    assert f"{parts}; the slowest stage does 1.00 × the average work" in lines
    assert "shared    embed.weight" in lines
    assert "does not fit" in lines[-3]
    assert "hint: raise `pipeline_parallel_degree`, or lower `active_microbatches`\n" in result.stderr


@pytest.mark.usefixtures("zoo")
def test_memory_under_tensor_parallelism_is_that_of_divided_modules(smpkit: Smpkit) -> None:
    arguments = ("--ranks", "4", "--model", "zoo:divided")
    (stage,) = planned(smpkit, *arguments, tensor_parallel_degree=2, ddp=True)["stages"]
    block = 64 * 256 // 2 + 256 + 64 * 256 // 2 + 64  # biases are added to sums
    assert stage["num_parameters"] == 6 * block + 64000
    assert stage["parameters_bytes"] == stage["gradients_bytes"] == 4 * stage["num_parameters"]
    assert stage["activations_bytes"] > 0

    text = smpkit("plan", "mp.json", *arguments)
    assert "note: Tensor parallelism over 2 ranks: 12 Linear -> DistributedLinear.\n" in text.stderr
    assert "note: not distributed: Embedding `embed`: it shares the weight `embed.weight`" in text.stderr
    assert "nothing is distributed" in smpkit("plan", "mp.json", "--model", "zoo:Net").stderr


def test_memory_of_what_replicas_share(zoo: Path, smpkit: Smpkit) -> None:
    def stage(**config: Any) -> Any:
        divided = {"ddp": True, "tensor_parallel_degree": 2, **config}
        return planned(smpkit, "--ranks", "8", "--model", "zoo:divided", **divided)["stages"][0]

    plain, dealt = stage(), stage(shard_optimizer_state=True)
    assert dealt["parameters_bytes"] == plain["parameters_bytes"]
    assert plain["optimizer_bytes"] / 4 <= dealt["optimizer_bytes"] < 0.6 * plain["optimizer_bytes"]
    parts = stage(sharded_data_parallel_degree=4, prescaled_batch=True, sdp_param_persistence_threshold=0)
    assert 4 * parts["parameters_bytes"] == plain["parameters_bytes"]
    assert 4 * parts["optimizer_bytes"] == plain["optimizer_bytes"]
    block = 4 * (64 * 256 // 2 + 256 + 64 * 256 // 2 + 64)
    assert parts["gathered_bytes"] == 4 * 64000 + 2 * block
    (zoo / "mp.json").write_text('{"ddp": true, "sharded_data_parallel_degree": 4}')
    assert "gathered" in smpkit("plan", "mp.json", "--ranks", "4", "--model", "zoo:Net").stdout


@pytest.mark.usefixtures("zoo")
def test_json_counts_every_byte_of_a_model(smpkit: Smpkit) -> None:
    arguments = ("--model", "zoo:traced", "--optimizer", "momentum", "--memory-gib", "1")
    content = planned(smpkit, *arguments, pipeline_parallel_degree=2, microbatches=4)
    first, last = content["stages"]
    block = 64 * 256 + 256 + 256 * 64 + 64
    assert first["num_parameters"] + last["num_parameters"] == 6 * block + 2 * 64000
    assert first["parameters_bytes"] == first["gradients_bytes"] == first["optimizer_bytes"]
    assert first["reduction_bytes"] == 4 * 64000
    assert content["shared_parameters"] == ["embed.weight"]
    assert content["traced"]
    assert first["activations_bytes"] > last["activations_bytes"] > 0
    assert (first["fits"], last["fits"]) == (True, True)
    assert first["units"][0] == "embed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: neither a file nor a degree is given\nhint: try `smpkit plan job.yaml`, or `--pp 4`\n"),
        (["job.yaml", "--pp", "2"], "error: `--pipeline-parallel-degree` cannot be given beside a file\n"),
        (["-p", "a=1"], "error: `--set`, `-p` and `-H` change settings of a file, and none is given\n"),
        (["--pp", "2", "--ranks", "3"], "error: 1 problem in the plan"),
        (["--pp", "2", "--ranks", "4", "--hosts", "3"], "4 ranks cannot be spread evenly over 3 hosts"),
        (["--pp", "0"], "pipeline_parallel_degree"),
        (["--pp", "9999999"], "pipeline_parallel_degree: must be at most 1024, got 9999999"),
        (["--tp", "9999999"], "tensor_parallel_degree: must be at most 1024, got 9999999"),
        (["--pp", "2", "--ranks", "9999998"], "`--ranks`: 9999998 is not in the range 1<=x<=1000000"),
        (["--pp", "2", "--model", "zoo:Net", "--tflops", "nan"], "`--tflops`: `nan` is not a number from 1e-06 to"),
        (["--pp", "99", "--model", "zoo:Net"], "too few for 99 partitions"),
        (["--pp", "2", "--model", "zoo:failing"], "error: the factory failed: ValueError: no such weights\n"),
        (["--pp", "2", "--model", "zoo"], "error: `zoo` names no factory\nhint: write `module:factory`"),
        (["--pp", "2", "--model", "absent:Net"], "error: module `absent` cannot be imported: ModuleNotFoundError"),
        (["job.yaml", "--memory-gib", "1"], "`--memory-gib` cannot be given without a model"),
        (["job.yaml", "--ranks", "0"], "`--ranks`"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_said(arguments: list[str], message: str, zoo: Path, smpkit: Smpkit) -> None:
    result = smpkit("plan", *arguments, code=2)
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


BY_HAND: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "microbatches": 4,
    "auto_partition": False,
    "default_partition": 0,
}


@pytest.mark.usefixtures("zoo")
def test_what_the_model_places_by_hand_is_planned(smpkit: Smpkit) -> None:
    content = planned(smpkit, "--model", "zoo:Placed", **BY_HAND)
    found = [{unit.rpartition(".")[0] or unit for unit in stage["units"]} for stage in content["stages"]]
    assert found == [{"embed", "blocks.0", "blocks.2", "blocks.4"}, {"blocks.1", "blocks.3", "blocks.5", "head"}]
    assert "F0.2" in content["schedule"]["actions"][0]


@pytest.mark.usefixtures("zoo")
def test_what_a_model_sends_is_planned_and_not_assumed(smpkit: Smpkit) -> None:
    content = planned(smpkit, "--model", "zoo:skips", **BY_HAND)
    segments = {(place["rank"], place["index"]): units for place, units in content["graph"]["segments"]}
    assert segments == {(0, 0): ["down.0"], (0, 1): ["up.1"], (1, 0): ["down.1", "up.0"]}
    values = [
        ([*each["source"].values()], [*each["target"].values()], each["consumer"])
        for each in content["graph"]["values"]
    ]
    # The sum stays on the later rank, as the tie is broken; `first` is there already, so it is sent once.
    assert values == [([0, 0], [1, 0], "down.1"), ([1, 0], [0, 1], "up.1")]
    first = content["graph"]["values"][0]
    assert (first["shape"], first["dtype"], first["num_bytes"]) == ([4, 8], "float32", 128)
    assert first["differentiable"]
    assert " F0.1 B0.1 " in content["schedule"]["actions"][0]

    lines = [" ".join(line.split()) for line in smpkit("plan", "mp.json", "--model", "zoo:skips").stdout.splitlines()]
    assert "values a microbatch sends 2 values, 256 B, and 256 B of gradients back" in lines
    assert "stage 0.1: up.1" in lines


@pytest.mark.usefixtures("zoo")
def test_a_model_that_needs_values_is_planned_by_an_assumption_that_is_said(smpkit: Smpkit) -> None:
    assert planned(smpkit, "--model", "zoo:chooses", **BY_HAND)["graph"] is None
    said = smpkit("plan", "mp.json", "--model", "zoo:chooses").stderr
    assert "note: what travels between stages is assumed, every unit handing its output to the next: " in said
    assert "DataDependentOutputException" in said
    assert "let the factory return" not in said  # it has


@pytest.mark.usefixtures("zoo")
def test_virtual_stages_are_planned(smpkit: Smpkit) -> None:
    chunks = {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "microbatches": 4, "memory_weight": 0}
    content = planned(smpkit, **chunks)
    # Filling and draining take half of the 1 / 5 that a chain loses.
    assert content["schedule"]["bubble"] == pytest.approx(0.5 / 4.5)
    content = planned(smpkit, "--model", "zoo:traced", **chunks)
    places = {name: stage for stage, each in enumerate(content["stages"]) for name in each["units"]}
    assert [places[f"blocks.{number}.0"] for number in range(6)] == [0, 0, 1, 1, 0, 0]
    assert content["schedule"]["actions"][1].startswith("F0 F1 F2 F0.1")


OFFLOADING: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 4, "offload_activations": True}


@pytest.mark.usefixtures("zoo")
def test_offloading_is_planned_for_each_stage_and_copies_that_do_not_hide_are_said(smpkit: Smpkit) -> None:
    arguments = ("--model", "zoo:checkpointed", "--tflops", "0.001", "--link-gbs", "1")
    content = planned(smpkit, *arguments, **OFFLOADING)
    first, last = content["offload"]
    boundary = 16 * 64 * 4
    assert first["resident_bytes"] == 3 * 3 * boundary  # one more than 1F1B
    assert first["out_bytes"] == 4 * 3 * boundary
    assert (first["stall_seconds"], last["stall_seconds"]) == (0, 0)
    assert content["stages"][0]["boundaries_bytes"] == first["device_bytes"] < first["resident_bytes"]
    assert content["stages"][0]["host_bytes"] == first["host_bytes"]
    lines = smpkit("plan", "mp.json", *arguments).stdout.splitlines()
    assert "offload   at horizon 4, over a link of 1 GB/s each way, by devices of 0.001 TFLOP/s" in lines
    assert any(line.startswith("KiB") and "boundaries" in line for line in lines)  # of GiB all were 0.00
    said = smpkit("plan", "mp.json", "--model", "zoo:checkpointed", "--tflops", "100", "--link-gbs", "1").stderr
    assert "hint: copies take longer than the forward of their layer; a link of " in said


def test_offloading_without_checkpointed_layers_is_said(zoo: Path, smpkit: Smpkit) -> None:
    (zoo / "mp.json").write_text(json.dumps(OFFLOADING))
    result = smpkit("plan", "mp.json", "--model", "zoo:traced")
    assert "`offload_activations` has nothing to offload: no layer of the model is checkpointed" in result.stderr
    assert "offload   " not in result.stdout


def test_ranks_and_hosts_go_before_those_of_the_file(folder: Path, smpkit: Smpkit) -> None:
    job = "entry_point: train.py\ndistribution: {torch_distributed: {enabled: true, processes_per_host: 2}}\n"
    (folder / "job.yaml").write_text(job)
    done = smpkit("plan", "job.yaml", "--hosts", "3", "--ranks", "12", "-p", "pipeline_parallel_degree=4", "--json")
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["ranks"], plan["hosts"], plan["mesh"]["data"]) == (12, 3, 3)


def test_a_plan_says_what_features_save_and_the_one_change_that_makes_a_model_fit(zoo: Path, smpkit: Smpkit) -> None:
    arguments = ["plan", "job.yaml", "--model", "zoo:traced", "--set", "distribution.mpi.processes_per_host=2"]
    made = json.loads(smpkit(*arguments, "--json").stdout)
    found = {each["setting"]: each for each in made["features"]}
    peak = max(stage["total_bytes"] for stage in made["stages"])
    for each in found.values():
        change = -each["saved_bytes"] if not each["is_on"] else each["saved_bytes"]
        assert each["peak_bytes"] == peak + change
    states = found["shard_optimizer_state: true"]
    # What is said is what a plan with that setting says.
    key = "distribution.smdistributed.modelparallel.parameters.shard_optimizer_state=true"
    again = json.loads(smpkit(*arguments, "--set", key, "--json").stdout)
    assert states["peak_bytes"] == max(stage["total_bytes"] for stage in again["stages"])
    limit = f"{(states['peak_bytes'] + 1000) / 2**30}"
    done = smpkit(*arguments, "--memory-gib", limit)
    assert "features" in done.stdout
    assert (done.exit_code, "makes it fit" in done.stderr) == (1, True)
    none = smpkit(*arguments, "--memory-gib", "0.00001")
    assert "no single change makes it fit" in none.stderr


def test_what_a_plan_is_not_for_is_said(smpkit: Smpkit, folder: Path) -> None:
    (folder / "prepare.sh").touch()
    (folder / "shell.yaml").write_text("entry_point: prepare.sh\n")
    assert "runs a shell script once on each host, and so has no ranks to plan" in smpkit("plan", "shell.yaml").stderr
    none = "--ranks: starts ranks, and a shell script has none"
    assert smpkit("plan", "shell.yaml", "--ranks", "2").stderr.startswith(none)


def test_sharding_and_a_single_microbatch_are_told(smpkit: Smpkit, folder: Path) -> None:
    (folder / "mp.yaml").write_text("sharded_data_parallel_degree: 2\nddp: true\n")
    said = smpkit("plan", "mp.yaml", "--ranks", "4").stdout
    assert "sharding  parameters, gradients and optimizer states are divided over 2 data-parallel ranks\n" in said
    assert "interleaved (1F1B), 1 microbatch, at most 1 active" in said
