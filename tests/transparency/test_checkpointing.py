"""Checkpointed layers give bit for bit the losses, gradients and weights of plain ones, on one rank and on several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from tests.models import TOKENS, WIDTH, Case, Stack, block, plainly, token_step, tokens
from tests.pairwise import pairwise
from tests.train import TOLERANCE, Way, same

# --- layers of a Sequential -------------------------------------------------------------------------------------------


def stacked(dropout: float, tied: bool, frozen: bool) -> nn.Module:
    """Return an embedding, layers and a head, which may be tied; or the embedding and some layers are frozen."""
    # Dropout and Tanh hold nothing and run with their neighbours.
    first, second, third, fourth, fifth = [nn.Sequential(block(), nn.Dropout(dropout)) for _ in range(5)]
    layers = nn.Sequential(first, second, nn.Dropout(dropout), third, fourth, nn.Tanh(), fifth)
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), layers, nn.Linear(WIDTH, TOKENS, bias=False))
    if frozen:
        model[0].requires_grad_(tied)
        first.requires_grad_(False)
        third.requires_grad_(False)
    if tied:
        model[2].weight = model[0].weight
    return model


def autocast_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(ids)
    loss = functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())
    model.backward(loss)
    return loss


def checkpoint_stack(strategy: str, model: nn.Module) -> None:
    smp.set_activation_checkpointing(model.get_submodule("1"), strategy=strategy)


AXES: list[list[Any]] = [
    ["each", "contiguous", "group_2"],
    [1, 2],  # pipeline
    [1, 4],  # microbatches
    [False, True],  # autocast
    [0.0, 0.3],  # dropout
    [False, True],  # tied
    [False, True],  # frozen
    [None, 1],  # horizon of offloading
]


@pytest.mark.parametrize("cell", pairwise(AXES), ids=lambda cell: "-".join(map(str, cell)))
def test_checkpointed_layers_change_no_bit(cell: tuple[Any, ...]) -> None:
    strategy, pipeline, microbatches, autocast, *model, ahead = cell
    step, precision = (autocast_step, torch.float32) if autocast else (token_step, torch.float64)
    case = Case(partial(stacked, *model), tokens, step, precision)
    offloading = {} if ahead is None else {"offload_activations": True, "activation_loading_horizon": ahead}
    plain = Way(pipeline, microbatches=microbatches)
    way = replace(plain, config=offloading, prepare=partial(checkpoint_stack, strategy))
    same(case, way, like=plain, tolerance=0)


# --- calls of what is larger than a unit, and of what is none ---------------------------------------------------------


class Body(Stack):
    """Units, and random operations between them."""

    layer = staticmethod(lambda: nn.Sequential(block(), nn.Dropout(0.2)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.dropout(layer(x), 0.3, self.training)
        return x


class Between(nn.Module):
    """Calls what is larger than a unit, and what is none, each of it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.body, self.draws = Body(3), nn.Dropout(0.3)
        self.call: Any = plainly

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(2):
            x = self.call(self.draws, self.call(self.body, x))
        return self.head(functional.dropout(x, 0.1, self.training))


def checkpoint_calls(model: Any) -> None:
    model.call = smp.checkpoint


BETWEEN = Case(Between, tokens, token_step)
ONE = Way(microbatches=2)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_random_operations_between_units_drop_the_same(pipeline: int) -> None:
    way = Way(pipeline, microbatches=2, prepare=checkpoint_calls)
    same(BETWEEN, way, like=ONE, tolerance=0 if pipeline == 1 else TOLERANCE)


@pytest.mark.parametrize("overlapping", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_of_checkpointed_replicas_are_averaged(overlapping: bool) -> None:
    model = {"overlapping_allreduce": overlapping, "bucket_cap_mb": 0.0001}
    plain = Way(replicas=2, microbatches=2, model=model)
    same(BETWEEN, Way(replicas=2, microbatches=2, model=model, prepare=checkpoint_calls), like=plain, tolerance=0)
