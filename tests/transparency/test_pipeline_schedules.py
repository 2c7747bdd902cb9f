"""Virtual stages and a split backward change the order of work, and nothing that comes out of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models import (
    CASES,
    HUGGING_FACE,
    TOKENS,
    WIDTH,
    Case,
    block,
    mse_step,
    token_step,
    tokens,
    vectors,
)
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all, train_with_sleeps


def setups(pipeline: str, virtual: tuple[int, ...], microbatches: tuple[int, ...]) -> tuple[Setup, ...]:
    return tuple(
        Setup(count, pipeline, options={"virtual_pipeline_degree": chunks})
        for chunks, count in itertools.product(virtual, microbatches)
    )


def train_all(degree: int, asked: tuple[Setup, ...], cases: dict[str, Case]) -> dict[str, list[set[str]]]:
    return run_all(cases, asked, degree)


def check(degree: int, asked: tuple[Setup, ...], cases: dict[str, Case], timeout: float = 150) -> None:
    for rank in run_ranks(train_all, degree, degree, asked, cases, timeout=timeout):
        assert all(len(held) == len(asked) for held in rank.values())


class Skipping(nn.Module):
    """As many blocks as four ranks with two chunks need, with a skip from each on the way down to one on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], dim=-1)))
        return x


class DeepTied(nn.Module):
    """Embedding and head share a weight, seven blocks apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(7)])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        result: Tensor = self.head(x)
        return result


def chain() -> nn.Module:
    return nn.Sequential(*[block() for _ in range(8)])


SHAPES = {
    "chain": Case(chain, vectors, mse_step),
    "skip connections": Case(Skipping, vectors, mse_step),
    "tied": Case(DeepTied, tokens, token_step),
    "GPT-2": HUGGING_FACE["GPT-2"],
}


@pytest.mark.parametrize("degree", [pytest.param(2, id="pp2"), pytest.param(4, id="pp4", marks=pytest.mark.slow)])
def test_virtual_stages_train_as_in_one_process(degree: int) -> None:
    check(degree, setups("interleaved", (2,), (1, 8)), SHAPES)


@pytest.mark.parametrize("degree", [pytest.param(2, id="pp2"), pytest.param(4, id="pp4", marks=pytest.mark.slow)])
def test_a_split_backward_trains_as_in_one_process(degree: int) -> None:
    check(degree, (*setups("zero_bubble", (1,), (1, 4)), *setups("zero_bubble", (2,), (8,))), SHAPES)


@pytest.mark.parametrize("degree", [pytest.param(2, id="pp2"), pytest.param(3, id="pp3", marks=pytest.mark.slow)])
def test_models_of_every_shape_train_with_a_split_backward(degree: int) -> None:
    check(degree, (Setup(4, "zero_bubble", seed=degree),), CASES)


# --- together with everything else --------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inside, x, use_reentrant=False)
        return result


def partly_recomputed() -> nn.Module:
    return nn.Sequential(*[part() for _ in range(4) for part in (block, Recomputed)])


def autocast_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.mse_loss(model(x).float(), y)
    model.backward(loss)
    return loss


def single(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(each.float() for each in vectors(size, generator))


MODES = {
    "activation checkpointing": Case(partly_recomputed, vectors, mse_step),
    "autocast": Case(chain, single, autocast_step, torch.float32),
}
SPLIT = setups("zero_bubble", (1, 2), (8,))


def test_a_split_backward_trains_under_autocast_and_with_recomputed_layers() -> None:
    check(2, SPLIT, MODES)


@pytest.mark.parametrize("degree", [pytest.param(2, id="pp2"), pytest.param(4, id="pp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_replicas_of_virtual_stages_and_split_backwards_train_as_in_one_process(pipeline: str, degree: int) -> None:
    asked = tuple(replace(setup, replicas=2) for setup in setups(pipeline, (1, 2), (4,)))
    cases = {name: SHAPES[name] for name in ("chain", "tied")}
    for rank in run_ranks(train_all, 2 * degree, degree, asked, cases, timeout=150):
        assert all(len(held) == len(asked) for held in rank.values())


def sleep(degree: int, seeds: range) -> int:
    return sum(train_with_sleeps(SHAPES["skip connections"], setup, seeds, degree) for setup in SPLIT)


def test_sleeps_neither_hang_nor_change_a_split_backward() -> None:
    assert run_ranks(sleep, 3, 3, range(2), timeout=150) == [2 * len(SPLIT)] * 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("degree", [2, 4], ids=["pp2", "pp4"])
def test_hundred_seeds_of_sleeps_neither_hang_nor_change_a_split_backward(degree: int) -> None:
    assert run_ranks(sleep, degree, degree, range(100), timeout=3500) == [100 * len(SPLIT)] * degree


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("degree", [2, 4], ids=["pp2", "pp4"])
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_every_combination_trains_as_in_one_process(degree: int, pipeline: str) -> None:
    check(degree, setups(pipeline, (1, 2), (1, 4, 8)), SHAPES, timeout=1000)
    check(degree, (Setup(4, pipeline), Setup(8, pipeline, seed=11), Setup(2, pipeline, seed=12)), CASES, timeout=1000)
