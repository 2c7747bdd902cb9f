"""Ranks that do different things hear so at once, and what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from tests.ranks import run_ranks
from tests.torch.steps import train_step


@smp.step
def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def wrap(**config: Any) -> smp.DistributedModel:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "timeout_seconds": 60, **config})
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        return smp.DistributedModel(nn.Sequential(nn.Linear(4, 4)))


def mismatches() -> list[str]:
    model = wrap()
    other = smp.rank() == 1
    said = []
    for call in (
        lambda: train_step(model, torch.zeros(2 + other, 4)),
        lambda: (evaluate if other else train_step)(model, torch.zeros(2, 4)),
        lambda: model(torch.zeros(2, 4 + 4 * other)),
        lambda: model.train(not other)(torch.zeros(2, 4)),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        said.append(caught.value.message)
        model.train()
    train_step(model, torch.zeros(2, 4))  # and all is well again
    return said


def test_ranks_that_call_different_things_hear_what() -> None:
    for said in run_ranks(mismatches, 2):
        start = "ranks 0 and 1 of a tensor-parallel group are about to do different things: "
        assert all(each.startswith(start) for each in said)
        shapes, steps, plain, modes = (each.removeprefix(start) for each in said)
        assert "the step `train_step` (training, with gradients) with float32[2, 4], and the step" in shapes
        assert "with float32[3, 4]" in shapes
        assert "the step `train_step`" in steps
        assert "the step `evaluate`" in steps
        assert "the model (training, with gradients) with float32[2, 4], and the model" in plain
        assert "the model (evaluation, with gradients)" in modes


def prescaled_batches() -> str:
    model = wrap(prescaled_batch=True)
    train_step(model, torch.zeros(2, 4))
    with pytest.raises(UsageError) as caught:
        train_step(model, torch.full((2, 4), float(smp.rank())))
    return caught.value.message


def test_a_prescaled_batch_that_is_not_the_same_is_named() -> None:
    for message in run_ranks(prescaled_batches, 2):
        assert "ranks 0 and 1 of a tensor-parallel group brought different values to the step `train_step`" in message
