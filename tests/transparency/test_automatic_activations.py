"""`strategy="auto"` and `offload_activations: auto` change memory and time, and no bit of losses and weights.

Each job trains twice: with every layer recomputed, and with the choice made in its first steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.torch.memory.chooser import Phase
from smpkit.torch.placement.dtensor import local_tensor_of
from tests.ranks import run_ranks

WIDTH, LAYERS, BATCH, STEPS = 32, 6, 8, 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.shrink(nn.functional.gelu(self.grow(self.norm(x)))))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@dataclass
class Trained:
    """What a rank saw; `steps` holds losses and gradients of each step."""

    steps: list[list[Tensor]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    choices: list[dict[str, str]] = field(default_factory=list)
    """After each step."""
    phases: list[str] = field(default_factory=list)
    planned: tuple[float, float] = (0.0, 0.0)
    """What the smallest choice takes beside the layers, and what they save if all are kept, in bytes."""


def train(
    config: dict[str, Any],
    strategy: str,
    *,
    folder: str = "",
    steps: range = range(STEPS),
    evaluates: bool = False,
    tensor: bool = False,
) -> Trained:
    """Train on this rank; with a folder, resume from it if there is a checkpoint, and save in it at the end."""
    smp.init({"ddp": True, **config})
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=tensor):
        module = Model()
    smp.set_activation_checkpointing(module.layers, strategy=strategy)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    if folder and any(Path(folder).iterdir()):
        smp.resume_from_checkpoint(folder, partial=True)
    found = Trained()
    for number in steps:
        x = torch.randn(BATCH, 16, WIDTH, generator=torch.Generator().manual_seed(number + 100 * smp.dp_rank()))
        optimizer.zero_grad()
        loss = train_step(model, x)
        gradients = [local_tensor_of(each.grad).clone() for each in model.local_parameters() if each.grad is not None]
        optimizer.step()
        found.steps.append([*loss.outputs, *gradients])
        found.choices.append(model.activation_choices())
        if evaluates:
            with torch.no_grad():
                model.eval()
                evaluate(model, x)
                model.train()
    found.weights = [each.clone() for each in model.state_dict().values()]
    chooser = model.activations._chooser
    if chooser is not None:
        found.phases.append(chooser.phase.name)
        if chooser.facts is not None:
            layers = chooser.facts.layers
            once = max((each.saved_bytes for each in layers), default=0)
            least = once + chooser.facts.live * sum(each.input_bytes for each in layers)
            kept = chooser.facts.live * sum(each.saved_bytes for each in layers)
            found.planned = chooser.facts.other_bytes + least, kept - least
    if folder:
        smp.save_checkpoint(folder, tag=f"step_{steps.stop}", partial=True)
    smp.shutdown()
    return found


@smp.step
def evaluate(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output


def assert_same(found: Trained, expected: Trained) -> None:
    assert len(found.steps) == len(expected.steps)
    for one, other in zip(found.steps, expected.steps, strict=True):
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other))
    assert all(map(torch.equal, found.weights, expected.weights))


JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"microbatches": 2}),
    "pipeline": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "tensor": (2, {"tensor_parallel_degree": 2}),
    "replicas": (2, {}),
    "zero bubble": (2, {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "zero_bubble"}),
    "sharded data": (2, {"sharded_data_parallel_degree": 2}),
    "half": (2, {"bf16": True, "sharded_data_parallel_degree": 2}),
}


@pytest.mark.parametrize("job", [*JOBS][:4] + [pytest.param(each, marks=pytest.mark.slow) for each in [*JOBS][4:]])
def test_no_bit_changes_before_during_and_after_the_switch(job: str) -> None:
    size, config = JOBS[job]
    found = run_ranks(switched, size, config, job == "tensor")
    # Ranks of one stage do the same; together they have chosen for all layers.
    stages = config.get("pipeline_parallel_degree", 1)
    by_stage: dict[frozenset[str], set[str]] = {}
    for chosen in found:
        by_stage.setdefault(frozenset(chosen), set()).add(str(sorted(chosen.items())))
    assert len(by_stage) == stages
    assert all(len(each) == 1 for each in by_stage.values())
    assert len({name for names in by_stage for name in names}) == LAYERS


def switched(config: dict[str, Any], tensor: bool) -> dict[str, str]:
    """Train with each layer recomputed, with room for all, and with room for some; return the last choices."""
    expected = train(config, "each", tensor=tensor)
    roomy = train(config, "auto", tensor=tensor, evaluates=True)
    assert_same(roomy, expected)
    assert roomy.phases == [Phase.DONE.name]
    assert set(roomy.choices[0].values()) == {"recompute"}
    assert set(roomy.choices[-1].values()) == {"keep"}
    least, more = roomy.planned
    budget = {"memory_budget_gib": max(smp_worst(least + 0.5 * more)) / 2**30}
    tight = train({**config, **budget}, "auto", tensor=tensor)
    assert_same(tight, expected)
    counts = [list(tight.choices[-1].values()).count(word) for word in ("keep", "recompute")]
    assert all(counts), f"kept and recomputed {counts} layers"
    return tight.choices[-1]


def smp_worst(number: float) -> list[float]:
    """Return the number of every rank."""
    smp.init({})
    found: list[float] = smp.allgather(number)
    smp.shutdown()
    return found


def test_a_resumed_job_does_the_same_and_measures_nothing(tmp_path: Path) -> None:
    run_ranks(resumed, 2, str(tmp_path))


def resumed(folder: str) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 4}
    expected = train(config, "auto", steps=range(STEPS))
    least, more = expected.planned
    tight = {**config, "memory_budget_gib": max(smp_worst(least + 0.5 * more)) / 2**30}
    first = train(tight, "auto", folder=folder, steps=range(6))
    second = train(tight, "auto", folder=folder, steps=range(6, STEPS))
    assert_same(Trained(first.steps + second.steps, second.weights), expected)
    assert second.choices == [first.choices[-1]] * (STEPS - 6)
    assert second.planned == (0.0, 0.0), "it has measured"
    assert len(set(first.choices[-1].values())) == 2


@pytest.mark.slow
def test_other_degrees_measure_anew(tmp_path: Path) -> None:
    run_ranks(with_degree, 2, str(tmp_path), 2, range(6))
    [found, _] = run_ranks(with_degree, 2, str(tmp_path), 1, range(6, STEPS + 6))
    assert set(found[0].values()) == {"recompute"}
    assert set(found[-1].values()) == {"keep"}


def with_degree(folder: str, degree: int, steps: range) -> list[dict[str, str]]:
    config = {"pipeline_parallel_degree": degree, "microbatches": 4}
    return train(config, "auto", folder=folder, steps=steps).choices


def test_what_has_no_effect_is_said() -> None:
    smp.init({"memory_budget_gib": 1})
    model = smp.DistributedModel(Model())
    with pytest.warns(UserWarning, match="memory_budget_gib has no effect: there is no layer"):
        train_step(model, torch.ones(2, 4, WIDTH))
    smp.shutdown()


def test_a_budget_that_cannot_be_kept_is_said() -> None:
    with pytest.warns(UserWarning, match=re.escape("the model does not fit: its layers hold at least")):
        found = train({"memory_budget_gib": 1e-6}, "auto")
    assert set(found.choices[-1].values()) == {"recompute"}


def test_layers_inside_others_are_not_chosen_for() -> None:
    smp.init({})
    module = Model()
    smp.set_activation_checkpointing(module.layers, strategy="auto")
    smp.set_activation_checkpointing(module.get_submodule("layers.0.grow"))
    model = smp.DistributedModel(module)
    train_step(model, torch.ones(2, 4, WIDTH))
    assert list(model.activation_choices()) == [f"layers.{index}" for index in range(LAYERS)]
    smp.shutdown()
