"""Replicas train as plain PyTorch does on all their batches, however gradients are averaged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from smpkit.errors import UsageError
from tests.models import MODELS, Case
from tests.train import Trace, Training, Way, differ, same, trace_of, world

SMALL_BUCKETS = {"bucket_cap_mb": 0.001}
"""Several for a model, or overlap has nothing to get wrong."""


def row(name: str, overlap: bool, view: bool, accumulation: int = 1, **more: Any) -> tuple[str, Way]:
    options = {**SMALL_BUCKETS, "overlapping_allreduce": overlap, "gradient_as_bucket_view": view}
    given = {"replicas": 2, "microbatches": 4 if more.get("stepwise", True) else 1, "accumulation": accumulation}
    return name, Way(**{**given, "batches": (8,) * 2 * accumulation, "model": options, "prepare": differ, **more})


BRANCH = "a branch on a value in the model"
ROWS = [
    row("frozen and unused parameters", True, False),
    row("frozen and unused parameters", False, True, accumulation=2),
    # Whole batches of some replicas leave the second half of the model out.
    row(BRANCH, True, True, microbatches=1, replicas=3),
    row(BRANCH, False, False, microbatches=1, replicas=3),
    row("several backwards", True, False, microbatches=2),
    row("BatchNorm", True, True, accumulation=2),
    row("parameters of the root", True, True, replicas=4),
    row("tied by a function", True, False, stepwise=False),
    row("tied by a function", False, True, accumulation=2, stepwise=False),
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


def torchs_hook(microbatches: int, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average over replicas as torch's own does, and over microbatches."""
    bucket.buffer().div_(microbatches)
    assert dist.group.WORLD is not None
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def own_hook(microbatches: int, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average in memory of its own."""
    assert sum(each.numel() for each in bucket.gradients()) == bucket.buffer().numel()
    buffer = bucket.buffer() / (microbatches * dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] * 1)


def train_with_hook(case: Case, way: Way, hook: Callable[..., Any]) -> Trace:
    with world(way):
        script = Training(case, way)
        script.model.register_comm_hook(way.microbatches, hook)
        with pytest.raises(UsageError, match="registered already"):
            script.model.register_comm_hook(way.microbatches, hook)
        return trace_of([script.run(number) for number in range(len(way.batches))], script.model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over gloo a future does not order the streams of a GPU")
@pytest.mark.parametrize("hook", [torchs_hook, own_hook])
def test_a_communication_hook_averages(hook: Callable[..., Any]) -> None:
    name, way = row(BRANCH, True, hook is torchs_hook, microbatches=2)
    same(MODELS[name], way, by=functools.partial(train_with_hook, hook=hook))
