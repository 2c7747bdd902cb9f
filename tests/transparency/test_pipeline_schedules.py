"""Virtual stages and a split backward change the order of work, and nothing that comes out of it."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import MODELS, Case, Does, Stack, autocast_step, block, by_torch, mse_step, singles, vectors
from tests.pairwise import slow
from tests.train import Way, same, train_with_sleeps

VIRTUAL: dict[str, Any] = {"virtual_pipeline_degree": 2}
SPLIT: dict[str, Any] = {"pipeline": "zero_bubble"}
CHAIN = functools.partial(Stack, 8)


def recomputed() -> nn.Module:
    return Does(lambda own, x: by_torch(own.inside, x), inside=block())


def partly_recomputed() -> nn.Module:
    return nn.Sequential(*[part() for _ in range(4) for part in (block, recomputed)])


SHAPES = {
    "chain": Case(CHAIN, vectors, mse_step),
    "skip connections": MODELS["skip connections"],
    "tied": MODELS["tied modules"],
    "GPT-2": MODELS["GPT-2"],
}
CASES = {
    **SHAPES,
    "partly recomputed": Case(partly_recomputed, vectors, mse_step),
    "autocast": Case(CHAIN, singles, autocast_step, torch.float32),
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


GRID = [
    (shape, replace(way, pipeline=degree, replicas=replicas))
    for shape, way, degree, replicas in product(CASES, WAYS, (2, 4), (1, 2))
    if shape != "tied"  # it has too few layers
]


@pytest.mark.parametrize(("shape", "way"), [*ROWS, *slow(row for row in GRID if row not in ROWS)], ids=str)
def test_a_schedule_trains_as_in_one_process(shape: str, way: Way) -> None:
    same(CASES[shape], way)


SLEEPS = [(replace(way, pipeline=3), 0) for way in WAYS[1:]]
MANY_SLEEPS = [(replace(way, pipeline=degree), seed) for way, degree, seed in product(WAYS[1:], (2, 4), range(100))]


@pytest.mark.parametrize(("way", "seed"), [*SLEEPS, *slow(MANY_SLEEPS)], ids=str)
def test_sleeps_neither_hang_nor_change_a_split_backward(way: Way, seed: int) -> None:
    same(SHAPES["skip connections"], way, by=functools.partial(train_with_sleeps, seed))
