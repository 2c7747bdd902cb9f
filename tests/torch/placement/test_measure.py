"""Partitioning by measured times: `trace_execution_times`."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.placement.measure import measure_times
from smpkit.torch.placement.trace import TrialStep, measure_units, restoring_model
from smpkit.torch.placement.units import units_of
from tests.ranks import run_ranks
from tests.torch.steps import announced, train_step
from tests.transparency.test_pipeline_failures import told

WIDTH = 16
CPU = torch.device("cpu")


class Slow(nn.Module):
    """Takes time that no counter of operations sees."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


def slow_first() -> nn.Module:
    return nn.Sequential(*[Slow(seconds) for seconds in (0.2, 0.0, 0.0, 0.0)])


def measured(module: nn.Module) -> dict[str, Any]:
    costs = measure_units(module, units_of(module), None)
    step = TrialStep(lambda x: module(x).sum(), (torch.ones(4, WIDTH),))
    return {cost.name: cost for cost in measure_times(module, costs, step, CPU)}


class Twice(nn.Module):
    """Calls its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Slow(0.25), Slow(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](self.layers[0](x)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass only where somebody sleeps."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))


@pytest.mark.usefixtures("clock")
def test_times_are_measured_by_unit_over_all_of_its_calls() -> None:
    costs = measured(Twice())
    assert {name: cost.flops for name, cost in costs.items()} == pytest.approx({"layers.0": 0.5, "layers.1": 0.25})
    assert all(cost.activation_bytes == 0 for cost in costs.values())


class Counting(nn.Module):
    """Changes its buffer, an attribute and every generator when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        random.random(), np.random.random(), torch.rand(1)
        return self.norm(x)


def test_measuring_leaves_no_trace() -> None:
    def chances() -> tuple[Any, ...]:
        return random.random(), np.random.random(), torch.rand(1).item()

    module = nn.Sequential(Counting(), nn.Linear(WIDTH, WIDTH))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = chances()
    random.setstate(seeds[0])
    np.random.set_state(seeds[1])
    torch.set_rng_state(seeds[2])
    measured(module)
    assert chances() == expected
    assert module[0].calls == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module[1]._forward_hooks


def test_a_trial_that_fails_leaves_no_trace_either() -> None:
    module = nn.BatchNorm1d(WIDTH)
    with pytest.raises(ValueError, match="expected 2D"), restoring_model(module, lambda tensor: tensor.clone()):
        module(torch.ones(3, 2, 2, 2))
    assert module.running_mean is not None
    assert not module.running_mean.any()


# --- over a pipeline --------------------------------------------------------------------------------------------------


def partition(module: str, wishes: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    with announced() as lines:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, **options})
        torch.manual_seed(3)
        # Every replica is given batches of another size.
        x = torch.ones(4 * (1 + smp.dp_rank()), WIDTH)
        model = smp.DistributedModel(globals()[module](), **wishes)
        train_step(model, x)
    assert model.pipeline is not None
    assert model.pipeline.assignment is not None
    return model.pipeline.assignment.partition_of, lines


def sizes(places: dict[str, int]) -> list[int]:
    return [list(places.values()).count(rank) for rank in (0, 1)]


def test_a_slow_unit_gets_a_rank_for_itself_if_times_are_measured() -> None:
    (places, lines), (others, silent) = run_ranks(partition, 2, "slow_first", {"trace_execution_times": True}, {})
    assert places == others
    assert sizes(places) == [1, 3]
    assert lines[0] == "Partitioned by execution times of one microbatch, measured on rank 0 (cpu)."
    assert silent == []
    ((without, lines), _) = run_ranks(partition, 2, "slow_first", {}, {})
    assert sizes(without) == [2, 2]
    assert lines[0] == "Partition assignments:"


def test_replicas_take_the_measurements_of_the_first() -> None:
    ranks = run_ranks(partition, 4, "slow_first", {"trace_execution_times": True}, {})
    assert all(places == ranks[0][0] for places, _ in ranks)
    assert sizes(ranks[0][0]) == [1, 3]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"skip_tracing": True}, "skip_tracing is on: partitioned by parameter sizes"),
        ({"auto_partition": False, "default_partition": 0}, "auto_partition is off: modules are placed by hand"),
    ],
    ids=["skip_tracing", "auto_partition"],
)
def test_a_wish_that_the_configuration_overrules_is_told(options: dict[str, Any], line: str) -> None:
    ((_, lines), _) = run_ranks(partition, 2, "slow_first", {"trace_execution_times": True}, options)
    assert lines[0] == f"{line}, not by measured execution times."


def measure_without_weights() -> tuple[str, float]:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    with smp.delay_param_initialization():
        module = slow_first()
    model = smp.DistributedModel(module, trace_execution_times=True)
    return told(lambda: train_step(model, torch.ones(4, WIDTH)))


def test_a_model_without_weights_cannot_be_measured() -> None:
    for message, _ in run_ranks(measure_without_weights, 2):
        assert f"{UsageError.__name__}: execution times cannot be measured" in message
