"""Training over a pipeline gives the losses, gradients and weights of plain PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from tests.ranks import run_ranks
from tests.transparency.models import Trace, assert_same, batch, build, loss_of, optimizer_of, record, train_plainly

STEPS = 5
TOLERANCE = 1e-11  # as in test_data_parallel: float64, sums in another order


@smp.step
def train_step(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, tokens, targets)
    model.backward(loss)
    return loss


def train(degree: int, microbatches: int, pipeline: str) -> Trace:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": microbatches, "pipeline": pipeline, "ddp": True})
    model = smp.DistributedModel(build())
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        loss = train_step(model, tokens[mine], targets[mine]).reduce_mean().item()
        losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
    trace = record(model, losses)
    held = {name for name, _ in model.local_named_parameters()}
    trace.gradients = {name: gradient for name, gradient in trace.gradients.items() if name in held}
    trace.weights = {name: weight for name, weight in trace.weights.items() if name in held}
    modules = {name for name, _ in model.local_named_modules()}
    assert modules >= {name.rpartition(".")[0] for name in held}
    others = {name for name, _ in model.named_parameters()} - held
    assert not modules & {name.rpartition(".")[0] for name in others}
    smp.shutdown()
    return trace


def grid() -> list[tuple[int, str]]:
    return list(itertools.product([1, 4, 8], ["interleaved", "simple"]))


def train_grid(degree: int) -> list[Trace]:
    return [train(degree, microbatches, pipeline) for microbatches, pipeline in grid()]


@pytest.mark.parametrize(("size", "degree"), [(2, 2), (4, 4), (4, 2)], ids=["pp2", "pp4", "pp2 dp2"])
def test_training_equals_plain_pytorch(size: int, degree: int) -> None:
    plain = train_plainly(STEPS, accumulation=1)
    traces = run_ranks(train_grid, size, degree, timeout=150)
    for _, *ranks in zip(grid(), *traces, strict=True):
        seen: set[str] = set()
        for trace in ranks:
            seen |= set(trace.gradients)
            mine = Trace(
                plain.losses,
                {name: plain.gradients[name] for name in trace.gradients},
                {name: plain.weights[name] for name in trace.weights},
            )
            assert_same(trace, mine, TOLERANCE)
        assert seen == set(plain.gradients)
