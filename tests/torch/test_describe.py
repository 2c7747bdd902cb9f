from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import UsageError
from smpkit.modules import module_command
from smpkit.plan.memory import ModelFacts
from smpkit.plan.schedule.graph import Segment
from smpkit.plan.tune.predict import scaled
from smpkit.torch.describe import describe
from smpkit.torch.placement.trace import TrialStep, measure_units, run_fake
from smpkit.torch.placement.units import units_of
from tests.forked import run_module


class Tied(nn.Module):
    """Embedding and head share a weight; a buffer and a scale belong to the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


def test_tied_tensors_are_one_and_loose_ones_are_on_every_rank() -> None:
    model = describe(Tied)
    assert (model.name, model.traced) == ("Tied", False)
    assert {unit.cost.name: unit.tensors for unit in model.units}["head"] == ("embed.weight",)
    assert {unit.cost.name: dict(unit.cost.shared) for unit in model.units}["head"] == {"embed.weight": 160}
    assert set(model.loose) == {"scale", "mask"}
    assert {name for name, each in model.tensors.items() if each.trainable} == {
        *("embed.weight", "block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias")
    }
    assert model.tensors["mask"].dtype == "bool"
    assert sum(each.num_bytes for each in model.tensors.values()) == sum(
        each.nbytes for each in [*Tied().parameters(), *Tied().buffers()]
    )


class Biased(nn.Module):
    """Its layers keep a bias that all samples share, and hand it on."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        bias = self.bias(torch.ones(5, 4)).sigmoid()
        for layer in self.layers:
            value = (layer(value) * bias).tanh()
        return value


def described(samples: int, **options: Any) -> ModelFacts:
    return describe(lambda: (Biased(), torch.ones(samples, 5, 4)), **options)


@pytest.mark.parametrize("samples", [1, 2])
def test_what_does_not_grow_with_the_samples_is_told_from_what_does(samples: int) -> None:
    model, larger = described(samples, other_sizes=True), described(6)
    assert [unit.cost for unit in scaled(model, 6 / samples).units] == [unit.cost for unit in larger.units]
    assert any(unit.fixed for unit in model.units)
    assert described(samples).units[0].cost == model.units[0].cost
    both: list[Any] = [scaled(model, 6 / samples).recorded, larger.recorded]
    sizes, larger_sizes = ([each.num_bytes for each in recorded.values] for recorded in both)
    assert sizes == larger_sizes
    assert 5 * 4 * 4 in sizes  # the bias; a hidden state has six times as much


def test_another_job_learns_from_the_first_what_grows() -> None:
    model, other = described(1, other_sizes=True), described(1)
    assert not any(unit.fixed for unit in other.units)
    assert other.growing_as(model) == model


class OneSample(Biased):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value.view(1, 5, 4))


def test_a_model_that_takes_no_more_samples_says_that_it_is_assumed_to_grow() -> None:
    model = describe(lambda: (OneSample(), torch.ones(1, 5, 4)), other_sizes=True)
    assert not any(unit.fixed for unit in model.units)
    (note,) = model.notes
    assert note.startswith(
        "all that layers keep is assumed to grow with the samples: with twice as many the model failed"
    )


class Headed(nn.Module):
    """Checkpoints a head of two units, which have ranks of their own in the recording of a search."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).append(nn.Module())
        self.head.forward = self._scores  # type: ignore[method-assign]  # no plain Sequential

    def _scores(self, value: torch.Tensor) -> torch.Tensor:
        norm, scores = list(self.head)[:2]
        return scores(norm(value))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layers(value)
        return torch.cat([smp.checkpoint(self.head, part) for part in value.split(1)])


def test_what_is_checkpointed_across_units_is_recorded_without_a_job() -> None:
    model = describe(lambda: (Headed(), torch.ones(2, 4)), other_sizes=True)
    assert not model.notes
    assert model.recorded is not None


class Counted(nn.Linear):
    runs = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        type(self).runs += 1
        return super().forward(value)


def test_one_run_of_a_layer_tells_what_it_costs_and_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "runs", 0)
    model: Any = describe(lambda: (nn.Sequential(Counted(4, 8), nn.ReLU(), Counted(8, 2)), torch.ones(3, 4)))
    assert [value.shape for value in model.recorded.values] == [(3, 8)]
    assert Counted.runs == 2


def test_a_microbatch_is_recorded_under_the_assignment_of_the_job() -> None:
    cfg, _ = ModelParallelConfig.from_sources({"pipeline_parallel_degree": 2, "microbatches": 2}, None)
    model: Any = describe(lambda: (Tied(), torch.zeros(3, dtype=torch.int64)), 2, cfg=cfg)
    assert {name for name, _ in model.recorded.units} == {unit.cost.name for unit in model.units}
    (value,) = model.recorded.values
    assert (value.source, value.target) == (Segment(0, 0), Segment(1, 0))
    assert (value.shape, value.dtype, value.num_bytes, value.differentiable) == ((3, 4), "float32", 48, True)
    assert value.consumer == dict(model.recorded.segments)[Segment(1, 0)][0]
    assert ModelFacts.from_json(model.to_json()).recorded == model.recorded
    assert describe(Tied, 2, cfg=cfg).recorded is None, "without inputs"


def test_without_a_pipeline_it_is_recorded_as_if_each_unit_had_a_rank() -> None:
    model: Any = describe(lambda: (Tied(), torch.zeros(3, dtype=torch.int64)))
    assert model.recorded.units == tuple((unit.cost.name, rank) for rank, unit in enumerate(model.units))


class ByHand(nn.Module):
    """Says where its parts belong; the parts of its block are apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        with smp.partition(1):
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        smp.set_partition(self.block[1], 3)


def test_places_that_a_model_says_are_described_if_they_exist() -> None:
    model = describe(ByHand, 4, by_hand=True)
    assert model.places == {"block.0": 1, "block.1": 3}
    assert [unit.cost.name for unit in model.units] == ["embed", "block.0", "block.1"]
    assert describe(ByHand, 4).places == {}
    assert ModelFacts.from_json(model.to_json()) == model
    with pytest.raises(UsageError, match=r"partition 3 is no planned partition\nhint: valid are 0 to 1"):
        describe(ByHand, 2, by_hand=True)


@pytest.mark.parametrize("by_name", [False, True])
def test_with_inputs_compute_and_activations_are_known(by_name: bool) -> None:
    tokens = torch.zeros(6, dtype=torch.int64)
    model = describe(lambda: (Tied(), {"tokens": tokens} if by_name else tokens))
    costs = {cost.name: cost for cost in model.costs}
    assert model.traced
    assert costs["head"].flops == 2 * 6 * 4 * 10
    assert costs["head"].activation_bytes == 6 * 4 * 4


def test_weights_are_no_activations_of_a_traced_step() -> None:
    # A linear layer saves the transpose of its weight, which is a view: it was counted as an activation.
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    costs = measure_units(model, units_of(model), lambda: run_fake(model, TrialStep(model, (torch.zeros(2, 100),))))
    assert [cost.activation_bytes for cost in costs] == [2 * 100 * 4] * 2


def test_a_model_too_large_for_any_machine_is_described() -> None:
    model = describe(lambda: nn.Sequential(nn.Linear(2**20, 2**20, bias=False), nn.Linear(2**20, 2**20, bias=False)))
    assert sum(each.num_bytes for each in model.tensors.values()) == 2 * 4 * 2**40


class NeedsValues(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2 + int(torch.ones(1).item())))


def test_a_factory_that_needs_values_gets_them() -> None:
    assert describe(NeedsValues).tensors["0.weight"].num_elements == 6


@pytest.mark.parametrize(
    ("factory", "message"),
    [(lambda: 3, "returned an object of type `int`"), (lambda: 1 / 0, "failed: ZeroDivisionError")],
    ids=["no module", "raises"],
)
def test_a_factory_that_makes_no_model_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        describe(factory)


def run(folder: Path, target: str, *, fresh: bool = False) -> tuple[int, Any]:
    command = [*module_command("smpkit.torch.describe"), target, str(folder)]
    start: Any = subprocess.run if fresh else run_module
    done = start(command, capture_output=True, text=True, timeout=150, check=False)
    return done.returncode, done.stdout


def test_stdout_is_json_whatever_the_module_prints(tmp_path: Path) -> None:
    source = """
import argparse, os
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2)
width = parser.parse_args().width
print("hello"); os.system("echo hello")
build = lambda: nn.Linear(width, width)
"""
    (tmp_path / "zoo.py").write_text(source)
    code, out = run(tmp_path, "zoo:build", fresh=True)
    assert code == 0
    assert ModelFacts.from_json(out).name == "Linear"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("zoo", "`zoo` names no factory"),
        ("absent:build", "module `absent` cannot be imported: ModuleNotFoundError"),
        ("exits:build", "module `exits` cannot be imported: SystemExit: 2"),
        ("zoo:none", "module `zoo` has no `none`"),
        ("zoo:number", "`zoo:number` is not callable"),
    ],
    ids=["form", "module", "exit", "attribute", "callable"],
)
def test_a_target_that_is_none_is_told_in_json(target: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text("number = 3\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(2)\n")
    code, out = run(tmp_path, target)
    assert code == 2
    assert message in json.loads(out)["error"]
