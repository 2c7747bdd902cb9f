"""Replicas train as plain PyTorch does on all their batches, however gradients are averaged."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from smpkit.errors import UsageError
from tests.models import MODELS, TOKENS, WIDTH, Case, token_step, tokens
from tests.torch.steps import on_ranks
from tests.train import Way, differ, same, training

SMALL_BUCKETS = {"bucket_cap_mb": 0.001}
"""Several for a model, or overlap has nothing to get wrong."""


def row(name: str, overlap: bool, accumulation: int = 1, **more: Any) -> tuple[str, Way]:
    options = {**SMALL_BUCKETS, "overlapping_allreduce": overlap}
    counts = {"replicas": 2, "microbatches": 4 if more.get("stepwise", True) else 1, "accumulation": accumulation}
    return name, Way(**{**counts, "batches": (8,) * 2 * accumulation, "model": options, "prepare": differ, **more})


BRANCH = "a branch on a value in the model"
ROWS = [
    row("frozen and unused parameters", True),
    row("frozen and unused parameters", False, accumulation=2),
    # Whole batches of some replicas leave the second half of the model out.
    row(BRANCH, True, microbatches=1, replicas=3),
    row(BRANCH, False, microbatches=1, replicas=3),
    row("several backwards", True, microbatches=2),
    row("BatchNorm", True, accumulation=2),
    row("parameters of the root", True, replicas=4),
    row("tied by a function", True, stepwise=False),
    row("tied by a function", False, accumulation=2, stepwise=False),
]


@pytest.mark.also_on("sim:copies:0", name=BRANCH)
@pytest.mark.parametrize(("name", "way"), ROWS, ids=str)
def test_replicas_equal_plain_pytorch(name: str, way: Way) -> None:
    same(MODELS[name], way)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_rank_equals_plain_pytorch_to_the_bit(microbatches: int, accumulation: int) -> None:
    way = Way(microbatches=microbatches, accumulation=accumulation, batches=(8,) * 4, optimizer="AdamW")
    same(MODELS["frozen and unused parameters"], way, tolerance=0)


def renormalising() -> nn.Module:
    """Return a model whose embedding shortens the rows that a batch has, in its forward."""
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH, max_norm=0.5), nn.Linear(WIDTH, TOKENS))


@pytest.mark.parametrize("config", [{}, {"shard_optimizer_state": True}], ids=str)
@on_ranks(2)
def test_a_forward_that_writes_to_weights_by_its_samples_is_refused(config: dict[str, Any]) -> None:
    # Replicas went on with other weights, as they do under torch's DistributedDataParallel.
    way = Way(replicas=2, config=config)
    message = r"`0\.weight` is no longer the same on data-parallel ranks 0 and 1: its norm"
    with training(Case(renormalising, tokens, token_step), way) as script, pytest.raises(UsageError, match=message):
        script.run(0)
