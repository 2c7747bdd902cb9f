"""Training with smpkit gives the losses, gradients and weights of plain PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from tests.ranks import run_ranks
from tests.transparency.models import Trace, assert_same, batch, build, loss_of, optimizer_of, record, train_plainly

STEPS = 5
# float64; what differs is the order in which 16 samples are added up, a few units in the last place per step, which
# AdamW's division by the root of the second moment then magnifies.
TOLERANCE = 1e-11


@smp.step
def train_step(model: Any, tokens: torch.Tensor, targets: torch.Tensor, divisor: int) -> torch.Tensor:
    loss = loss_of(model, tokens, targets)
    model.backward(loss / divisor)
    return loss


def train_with_smpkit(microbatches: int, accumulation: int, **options: Any) -> Trace:
    smp.init({"microbatches": microbatches, "ddp": True})
    if smp.dp_rank() > 0:
        torch.manual_seed(smp.dp_rank())  # replicas start different, so a missing broadcast shows
        module = type(build())().double()
    else:
        module = build()
    model = smp.DistributedModel(module, backward_passes_per_step=accumulation, **options)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(accumulation):
            tokens, targets = batch(step * accumulation + turn)
            mine = slice(smp.dp_rank(), None, smp.dp_size())
            loss = train_step(model, tokens[mine], targets[mine], accumulation).reduce_mean().item()
            losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
    trace = record(model, losses)
    smp.shutdown()
    return trace


def train_plain_style(accumulation: int, overlap: bool) -> Trace:
    """No `@smp.step`: the documented life at pipeline degree 1, `loss.backward()` and all."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(build(), overlapping_allreduce=overlap, backward_passes_per_step=accumulation)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(accumulation):
            tokens, targets = batch(step * accumulation + turn)
            mine = slice(smp.dp_rank(), None, smp.dp_size())
            loss = loss_of(model, tokens[mine], targets[mine])
            (loss / accumulation).backward()
            losses.append(sum(smp.allgather(loss.item(), smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
    trace = record(model, losses)
    smp.shutdown()
    return trace


def grid() -> list[tuple[int, int, bool, bool]]:
    return list(itertools.product([1, 4], [1, 2], [True, False], [True, False]))


def train_grid() -> list[Trace]:
    """Train every combination on this world: starting ranks costs more than training does."""
    return [
        train_with_smpkit(
            microbatches,
            accumulation,
            overlapping_allreduce=overlap,
            gradient_as_bucket_view=view,
            bucket_cap_mb=0.001,  # several buckets, or overlap has nothing to get wrong
        )
        for microbatches, accumulation, overlap, view in grid()
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_equals_plain_pytorch(size: int) -> None:
    traces = run_ranks(train_grid, size, timeout=150)
    for combination, *ranks in zip(grid(), *traces, strict=True):
        plain = train_plainly(STEPS, accumulation=combination[1])
        for trace in ranks:
            assert_same(trace, plain, TOLERANCE)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_rank_equals_a_hand_written_loop_to_the_bit(microbatches: int, accumulation: int) -> None:
    (trace,) = run_ranks(train_with_smpkit, 1, microbatches, accumulation)
    plain = train_plainly(STEPS, accumulation, microbatches)
    assert_same(trace, plain, 0)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "at the end"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trap_20_training_without_a_step_function_equals_plain_pytorch(accumulation: int, overlap: bool) -> None:
    plain = train_plainly(STEPS, accumulation)
    for trace in run_ranks(train_plain_style, 2, accumulation, overlap):
        assert_same(trace, plain, TOLERANCE)
