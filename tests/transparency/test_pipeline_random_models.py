"""Random models in random placements train as in one process, however slow units, sends and receives are."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smpkit.torch.pipeline.transport import Transport
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, check_same, run_all, train, train_plainly
from tests.transparency.pipeline_models import WIDTH, Case, mse_step, vectors

# Seeds, and not hypothesis: a model must be drawn alike on all ranks, and a world of ranks costs more than a model.


class Grown(nn.Module):
    """A tree of modules: lists, sequences, skips, a block that is used again, shared weights, operations between."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = random.Random(seed)
        self.layers = nn.ModuleList([_branch(dice, 0) for _ in range(dice.randint(2, 5))])
        self.order = [dice.randrange(len(self.layers)) for _ in range(len(self.layers) + dice.randint(0, 2))]
        self.skips = [dice.randrange(index + 1) for index in range(len(self.order))]
        self.kinds = [dice.randrange(5) for _ in self.order]
        self.scale = nn.Parameter(torch.ones(WIDTH))
        linears = [each for each in self.modules() if isinstance(each, nn.Linear)]
        if dice.random() < 0.5:
            linears[-1].weight = linears[0].weight
        self.tied = linears[0] if dice.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for index, skip, kind in zip(self.order, self.skips, self.kinds, strict=True):
            out = self.layers[index](made[-1])
            made.append(_joined(out, made[skip], kind))
        x = made[-1] * self.scale
        return x if self.tied is None else functional.linear(x, self.tied.weight)


def _branch(dice: random.Random, depth: int) -> nn.Module:
    kind = dice.randrange(4 if depth < 2 else 1)
    if kind == 0:
        return nn.Linear(WIDTH, WIDTH)
    if kind == 1:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
    children = [_branch(dice, depth + 1) for _ in range(dice.randint(1, 3))]
    return nn.Sequential(*children) if kind == 2 else Residual(children)


class Residual(nn.Module):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + torch.sin(part(x))
        return x


def _joined(out: Tensor, earlier: Tensor, kind: int) -> Tensor:
    if kind == 0:
        return out + 0.5 * earlier
    if kind == 1:
        return torch.cat([out, earlier], -1)[..., ::2].tanh()
    if kind == 2:
        return torch.where(earlier > 0, out, -out)
    return torch.stack([out, earlier.detach()]).mean(0) if kind == 3 else out.tanh()


class Grow:
    """Makes the model of a seed; a class, so that ranks can be told of it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self) -> nn.Module:
        return Grown(self.seed)


def train_seeds(seeds: range, degree: int) -> int:
    for seed in seeds:
        dice = random.Random(1000 + seed)
        setup = Setup(dice.choice([1, 2, 4, 8]), dice.choice(["interleaved", "simple"]), seed=seed, batches=(8, 8))
        run_all({f"seed {seed}": Case(Grow(seed), vectors, mse_step)}, [setup], degree)
    return len(seeds)


@pytest.mark.parametrize("degree", [2, 3], ids=["pp2", "pp3"])
def test_random_models_train_as_in_one_process(degree: int) -> None:
    assert run_ranks(train_seeds, degree, range(12), degree, timeout=150) == [12] * degree


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("degree", [2, 3, 4], ids=["pp2", "pp3", "pp4"])
def test_many_random_models_train_as_in_one_process(degree: int) -> None:
    assert run_ranks(train_seeds, degree, range(100, 300), degree, timeout=1700) == [200] * degree


# --- chaos --------------------------------------------------------------------------------------------------------


def sleepy(function: Any, dice: random.Random) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        if dice.random() < 0.3:
            time.sleep(dice.random() * 0.004)
        return function(*args, **kwargs)

    return called


def train_with_sleeps(seeds: range, degree: int) -> int:
    """Sleep at random in sends, receives and units; each rank by dice of its own."""
    plain = {name: getattr(Transport, name) for name in ("send", "send_gradient", "receive", "receive_gradient")}
    linear = nn.Linear.forward
    for seed in seeds:
        setup = Setup(4, "interleaved", seed=seed, batches=(8, 8, 8), options={"timeout_seconds": 30})
        case = Case(Grow(seed % 7), vectors, mse_step)
        expected = train_plainly(case, setup)
        dice = random.Random(f"{seed} {os.environ['RANK']}")
        for name, function in plain.items():
            setattr(Transport, name, sleepy(function, dice))
        nn.Linear.forward = sleepy(linear, dice)  # type: ignore[method-assign]
        try:
            check_same(train(case, setup, degree), expected)
        finally:
            nn.Linear.forward = linear  # type: ignore[method-assign]
            for name, function in plain.items():
                setattr(Transport, name, function)
    return len(seeds)


def test_random_sleeps_neither_hang_nor_change_a_result() -> None:
    assert run_ranks(train_with_sleeps, 3, range(6), 3, timeout=120) == [6] * 3


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("degree", [2, 4], ids=["pp2", "pp4"])
def test_two_hundred_seeds_of_sleeps_neither_hang_nor_change_a_result(degree: int) -> None:
    assert run_ranks(train_with_sleeps, degree, range(200), degree, timeout=1700) == [200] * degree
