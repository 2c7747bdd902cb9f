"""Virtual stages and a split backward change the order of work, and nothing that comes out of it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import MODELS, Case, autocast_step, block, by_torch, mse_step, singles, vectors
from tests.train import Way, same, train_with_sleeps

VIRTUAL: dict[str, Any] = {"virtual_pipeline_degree": 2}
SPLIT: dict[str, Any] = {"pipeline": "zero_bubble"}


class Recomputed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = block()

    def forward(self, x: Tensor) -> Tensor:
        return by_torch(self.inside, x)


def chain() -> nn.Module:
    return nn.Sequential(*[block() for _ in range(8)])


def partly_recomputed() -> nn.Module:
    return nn.Sequential(*[part() for _ in range(4) for part in (block, Recomputed)])


SHAPES = {
    "chain": Case(chain, vectors, mse_step),
    "skip connections": MODELS["skip connections"],
    "tied": MODELS["tied modules"],
    "GPT-2": MODELS["GPT-2"],
}
CASES = {
    **SHAPES,
    "partly recomputed": Case(partly_recomputed, vectors, mse_step),
    "autocast": Case(chain, singles, autocast_step, torch.float32),
}
WAYS = (
    Way(pipeline=2, microbatches=8, config=VIRTUAL),
    Way(pipeline=2, config=SPLIT),
    Way(pipeline=2, microbatches=8, config=VIRTUAL | SPLIT),
)
ROWS = [(shape, WAYS[2]) for shape in CASES] + [
    ("GPT-2", WAYS[0]),
    ("tied", WAYS[1]),
    ("chain", Way(pipeline=2, microbatches=1, config=VIRTUAL)),
    ("chain", Way(pipeline=2, microbatches=1, config=SPLIT)),
    ("tied", Way(pipeline=2, replicas=2, config=VIRTUAL)),
    ("skip connections", Way(pipeline=4, microbatches=8, config=VIRTUAL | SPLIT)),
]


@pytest.mark.parametrize(("shape", "way"), ROWS, ids=str)
def test_a_schedule_trains_as_in_one_process(shape: str, way: Way) -> None:
    same(CASES[shape], way)


@pytest.mark.parametrize("way", [replace(way, pipeline=3) for way in WAYS[1:]], ids=str)
def test_sleeps_neither_hang_nor_change_a_split_backward(way: Way) -> None:
    same(SHAPES["skip connections"], way, by=functools.partial(train_with_sleeps, 0))


# --- the widest grids -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("degree", [2, 4], ids=["pp2", "pp4"])
def test_hundred_seeds_of_sleeps_neither_hang_nor_change_a_split_backward(degree: int, seed: int) -> None:
    for way in WAYS[1:]:
        by = functools.partial(train_with_sleeps, seed)
        same(SHAPES["skip connections"], replace(way, pipeline=degree), by=by)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2], ids=["dp1", "dp2"])
@pytest.mark.parametrize("degree", [2, 4], ids=["pp2", "pp4"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in CASES if shape != "tied"])  # it has too few layers
def test_every_schedule_trains_as_in_one_process(shape: str, way: Way, degree: int, replicas: int) -> None:
    same(CASES[shape], replace(way, pipeline=degree, replicas=replicas))
