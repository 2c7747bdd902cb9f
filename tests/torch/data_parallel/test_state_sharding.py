"""What sharded optimizer states send is grouped when it changes, and not in each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.torch.data_parallel import replicas, state_sharding
from tests.ranks import run_ranks


@smp.step
def train_step(model: Any, batch: Tensor) -> None:
    model.backward(model(batch).square().mean())


def freeze_and_unfreeze() -> tuple[list[int], list[list[float]]]:
    """Return how often messages had been made after each step, and what the weights were."""
    made = 0
    messages_of = replicas.messages_of

    def counted(tensors: Any) -> Any:
        nonlocal made
        made += 1
        return messages_of(tensors)

    setattr(state_sharding, "messages_of", counted)  # noqa: B010 - the name that it has there
    smp.init({"ddp": True, "shard_optimizer_state": True})
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    model = smp.DistributedModel(nn.Sequential(first, nn.Linear(3, 2)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    counts, weights = [], []
    for trains_first in (True, True, False, False, True):
        first.requires_grad_(trains_first)
        optimizer.zero_grad()
        train_step(model, torch.full((2, 3), 1.0 + smp.rank()))
        optimizer.step()
        counts.append(made)
        weights.append([float(each.sum()) for each in model.parameters()])
    smp.shutdown()
    return counts, weights


def test_messages_are_made_anew_when_parameters_are_frozen_or_not() -> None:
    (counts, weights), (_, others) = run_ranks(freeze_and_unfreeze, 2)
    assert counts == [1, 1, 2, 2, 3]
    assert weights == others
    assert weights[1][0] == weights[3][0] != weights[4][0]
