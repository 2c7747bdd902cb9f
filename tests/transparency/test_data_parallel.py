"""Training with smpkit gives the losses, gradients and weights of plain PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import smpkit.torch as smp
from smpkit.torch.core import devices
from tests.device.device import sleep
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
            here = [each[mine].to(smp.state.device) for each in (tokens, targets)]  # only a step moves them by itself
            loss = loss_of(model, *here)
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


# --- communication hooks ----------------------------------------------------------------------------------------------

HOOKED_MICROBATCHES = 2
LATE_CYCLES = 200_000_000
"""Of a GPU's clock: a tenth of a second."""


def late_hook(devices_seen: list[str], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average on a stream of the hook's own, which comes to it late: only the future says when the gradients are there.

    A future over gloo says nothing about streams, so this one is made here.
    """
    buffer = bucket.buffer()
    devices_seen.append(buffer.device.type)
    asynchronous = devices.is_asynchronous(buffer.device)
    computed = devices.record_event(buffer.device)
    own = devices.new_stream(buffer.device)
    future = torch.futures.Future[torch.Tensor](devices=[buffer.device] if asynchronous else [])
    with devices.on_stream(own):
        devices.order_after(computed, own)
        made = buffer / (HOOKED_MICROBATCHES * dist.get_world_size())
        dist.all_reduce(made)
        if asynchronous:
            sleep(LATE_CYCLES)
        future.set_result(made * 1)  # behind the sleep; without the wait the user finds memory that nobody has written
    return future


def torchs_hook(devices_seen: list[str], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average over replicas as torch's own does, and over microbatches."""
    devices_seen.append(bucket.buffer().device.type)
    bucket.buffer().div_(HOOKED_MICROBATCHES)
    assert dist.group.WORLD is not None
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


HOOKS = {"late": late_hook, "torch's": torchs_hook}


def train_with_hook(name: str, view: bool) -> tuple[Trace, list[str]]:
    """Return what training did, and of each bucket that the hook was given, on which type of device it lay."""
    smp.init({"microbatches": HOOKED_MICROBATCHES, "ddp": True})
    model = smp.DistributedModel(build(), bucket_cap_mb=0.001, gradient_as_bucket_view=view)
    seen: list[str] = []
    model.register_comm_hook(seen, HOOKS[name])
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        mine = slice(smp.dp_rank(), None, smp.dp_size())
        loss = train_step(model, tokens[mine], targets[mine], 1).reduce_mean().item()
        losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
    trace = record(model, losses)
    smp.shutdown()
    return trace, seen


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", HOOKS)
def test_training_with_a_communication_hook_equals_plain_pytorch(name: str, view: bool) -> None:
    if name == "torch's" and torch.cuda.is_available():
        pytest.skip("over gloo a future does not order the streams of a GPU: tests/device runs this over NCCL")
    plain = train_plainly(STEPS, 1)
    for trace, seen in run_ranks(train_with_hook, 2, name, view):
        assert len(seen) > STEPS  # several buckets a step
        assert_same(trace, plain, TOLERANCE)
