"""Checkpointed layers give bit for bit the losses, gradients and weights of plain ones, on one rank and on several."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from tests.pairwise import pairwise
from tests.ranks import run_ranks
from tests.transparency.checkpointed_models import (
    TOKENS,
    WIDTH,
    Block,
    Variant,
    batch,
    differences,
    run,
    train,
    train_step_of,
    world,
)

AXES: list[list[Any]] = [
    ["each", "contiguous", "group_2"],
    [1, 4],  # microbatches
    [False, True],  # autocast
    [0.0, 0.3],  # dropout
    [False, True],  # tied
    [False, True],  # frozen
    [None, 1, 2, 4, 64],  # horizon of offloading
]


def train_all(variants: Sequence[Variant], degree: int) -> list[dict[str, Any]]:
    return [train(variant, degree) for variant in variants]


def check(rows: Sequence[tuple[Any, ...]], degree: int, timeout: float = 150) -> None:
    """Train with and without checkpointing, and compare what all ranks hold; the partition may differ."""
    ours = [Variant(*row) for row in rows]
    plain = {variant: Variant(None, *row[1:6]) for variant, row in zip(ours, rows, strict=True)}
    every = [*dict.fromkeys(plain.values()), *ours]
    ranks = run_ranks(train_all, degree, every, degree, timeout=timeout)
    found = {variant: dict(item for rank in ranks for item in rank[i].items()) for i, variant in enumerate(every)}
    for variant in ours:
        assert not differences(found[variant], found[plain[variant]]), variant
        assert found[variant].keys() == found[plain[variant]].keys()


@pytest.mark.parametrize("degree", [1, 2], ids=["pp1", "pp2"])
def test_training_equals_training_without_checkpointing(degree: int) -> None:
    check(pairwise(AXES), degree)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("degree", [1, 2], ids=["pp1", "pp2"])
def test_every_variant_equals_training_without_checkpointing(degree: int) -> None:
    rows = list(itertools.product(*AXES))
    assert len(rows) == 3 * 2 * 2 * 2 * 2 * 2 * 5  # every cell, in one launch
    check(rows, degree, timeout=1000)


def train_replicas(overlapping: bool, checkpointed: bool) -> dict[str, Any]:
    """Train two replicas with a module that is used twice."""
    with world(1, 2):
        torch.manual_seed(7)
        module = Between(smp.checkpoint if checkpointed else plainly)
        model = smp.DistributedModel(module, overlapping_allreduce=overlapping, bucket_cap_mb=0.0001)
        return run(model, train_step_of(Variant()), lambda step: batch(10 * step + smp.dp_rank()))


@pytest.mark.parametrize("overlapping", [True, False])
def test_gradients_of_replicas_are_averaged_as_without(overlapping: bool) -> None:
    plain = run_ranks(train_replicas, 2, overlapping, False)
    for ours, theirs in zip(run_ranks(train_replicas, 2, overlapping, True), plain, strict=True):
        assert not differences(ours, theirs)


def plainly(module: nn.Module, *args: Any) -> Any:
    return module(*args)


class Draws(nn.Module):
    """Holds nothing, and draws."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3, self.training) * torch.rand_like(x)


class Body(nn.Module):
    """Units, and random operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(0.2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.dropout(layer(x), 0.3, self.training)
        return x


class Between(nn.Module):
    """Checkpoints what is larger than a unit, and what is none."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.body, self.draws, self.head = Body(), Draws(), nn.Linear(WIDTH, TOKENS)
        self.call = call

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = self.call(self.draws, self.call(self.body, x))
        scores: Tensor = self.head(functional.dropout(x, 0.1, self.training))
        return scores


def train_between(degree: int, checkpointed: bool) -> dict[str, Any]:
    with world(degree, 2), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`(body|draws)` is not checkpointed")
        torch.manual_seed(7)
        model = smp.DistributedModel(Between(smp.checkpoint if checkpointed else plainly))
        return run(model, train_step_of(Variant()), batch)


def test_random_operations_between_units_drop_the_same() -> None:
    plain = run_ranks(train_between, 1, 1, False)[0]
    assert not differences(run_ranks(train_between, 1, 1, True)[0], plain)
    for rank in run_ranks(train_between, 2, 2, True):
        assert rank["losses"] == pytest.approx(plain["losses"], rel=1e-6)  # float32, added up in another order
