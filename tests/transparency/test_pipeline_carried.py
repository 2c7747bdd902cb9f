"""What modules keep between their calls is one microbatch's own where it comes back to a rank, or is refused."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import RemoteError, UsageError
from smpkit.torch.distributed import deadline
from tests.models import WIDTH, Case, block, doubled, mse_step, vectors
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, place, run_all

# Each of the two ranks is visited three times, by two microbatches that would be there at the same time.
SETUPS = [Setup(4, "interleaved", -1, (8, 8, 8)), Setup(4, "simple", -1, (8, 8)), Setup(4, "zero_bubble", -1, (8, 8))]


class Stateful(nn.Module):
    """A layer with a hidden state, a count of its calls, and a factor that others set."""

    def __init__(self, *, detaches: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hidden: Tensor | None = None
        self.factor: Tensor | float = 1.0
        self.num_calls = 0
        self.detaches = detaches

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.linear(x) * self.factor
        x = torch.tanh(x if self.hidden is None else x + self.hidden * self.num_calls)
        self.hidden = x.detach() if self.detaches else x
        return x


class Ring(nn.Module):
    """Goes round its layers three times."""

    def __init__(self, layer: Callable[[], nn.Module] = Stateful) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return x


class Resetting(Ring):
    """Takes from each layer what it has kept, as recurrent and spiking models do before a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, Stateful)
            layer.hidden, layer.num_calls = None, 0
        return super().forward(x)


class Scaling(Ring):
    """Sets what its layers read in later calls."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, Stateful)
            layer.factor, layer.hidden, layer.num_calls = x.abs().mean(), None, 0
        return super().forward(x)


class Gathering(Ring):
    """Keeps what its layers return, and its own input, as attributes."""

    def __init__(self) -> None:
        super().__init__(block)
        self.made: list[Tensor] = []
        self.given = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.made, self.given = [], x
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
                self.made.append(x)
        return torch.stack(self.made).sum(0) + self.given


class Tabled(Ring):
    """Makes a table at its first call."""

    def __init__(self) -> None:
        super().__init__(block)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype)
        return super().forward(x) + self.table


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def with_graphs() -> nn.Module:
    return Resetting(functools.partial(Stateful, detaches=False))


CASES = {
    "reset": Case(Resetting, vectors, mse_step),
    "set": Case(Scaling, vectors, mse_step),
    "statistics": Case(functools.partial(Ring, normed), doubled, mse_step),
    "gathered": Case(Gathering, vectors, mse_step),
}


def train() -> int:
    warnings.simplefilter("ignore")
    return len(run_all(CASES, SETUPS, 2))


def test_microbatches_do_not_mix_what_modules_keep() -> None:
    # The losses were other ones than in one process, without a word.
    assert run_ranks(train, 2, timeout=120) == [len(CASES)] * 2


def take_steps(build: Callable[[], nn.Module]) -> tuple[list[bool], list[str]]:
    """Train, and return which steps followed a schedule, and what was warned of."""
    torch.manual_seed(0)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    module = build()
    place(module, -1, 2)
    model = smp.DistributedModel(module)
    step: Any = smp.step(mse_step)
    planned = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            step(model, torch.ones(4, WIDTH), torch.ones(4, WIDTH))
            planned.append(executor_of(model).last_schedule is not None)
    return planned, [str(each.message) for each in caught if "changed while a microbatch" in str(each.message)]


def executor_of(model: smp.DistributedModel) -> Any:
    assert model.pipeline is not None
    return model.pipeline._executor


def test_who_keeps_something_is_named_once_and_what_is_made_once_costs_one_step() -> None:
    (planned, warned), (_, others) = run_ranks(take_steps, 2, Resetting)
    assert planned == [False] * 4
    assert len(warned) == 1
    assert warned[0].startswith("`layers.0.hidden`, `layers.1.hidden`, `layers.2.hidden`, ...")
    assert others == []
    assert run_ranks(take_steps, 2, Tabled) == [([False, True, True, True], [])] * 2
    assert run_ranks(take_steps, 2, functools.partial(Ring, block)) == [([True] * 4, [])] * 2


def keep_graphs() -> str:
    with pytest.raises((UsageError, RemoteError)) as caught:
        take_steps(with_graphs)
    deadline.report_failure(caught.value)  # as a script that ends does
    return caught.value.message


def test_a_graph_that_is_kept_over_a_visit_is_refused() -> None:
    for message in run_ranks(keep_graphs, 2):
        assert "a module keeps a tensor that needs gradients from one visit to the next" in message
