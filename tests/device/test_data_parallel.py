"""Replicas on the GPU: averaged gradients in buckets and views, communication hooks, sharded parameters."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.on_gpu.parts import NCCL
from smpkit.testing import RankFailed
from smpkit.torch.core import devices
from tests.device.device import IS_SIMULATED, sleep
from tests.device.ranks import run_on_gpu
from tests.models import MODELS, Case
from tests.train import Trace, Way, check_same, reference, train
from tests.transparency.test_data_parallel import row, torchs_hook, train_with_hook
from tests.transparency.test_sharded_data_parallel import checkpoint, way_of

TOLERANCE = 1e-8  # float64 beside the CPU's


def check(name: str, way: Way, by: Callable[[Case, Way], Trace] = train) -> None:
    case = MODELS[name]
    plain = reference(case, way)
    for trace in run_on_gpu(by, case, way, size=way.ranks, timeout=150):
        check_same(trace, plain[trace.replica], TOLERANCE)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapping"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_replicas_equal_plain_pytorch(accumulation: int, overlap: bool, view: bool) -> None:
    check(*row("frozen and unused parameters", overlap, view, accumulation))


def test_training_without_a_step_function_equals_plain_pytorch() -> None:
    check(*row("frozen and unused parameters", True, False, 2, stepwise=False))


LATE_CYCLES = 200_000_000
"""Of a GPU's clock: a tenth of a second."""


def late_hook(microbatches: int, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average on a stream of the hook's own, which comes to it late: only the future says when the gradients are there.

    A future over gloo says nothing about streams, so this one is made here.
    """
    buffer = bucket.buffer()
    asynchronous = devices.is_asynchronous(buffer.device)
    computed = devices.record_event(buffer.device)
    own = devices.new_stream(buffer.device)
    future = torch.futures.Future[torch.Tensor](devices=[buffer.device] if asynchronous else [])
    with devices.on_stream(own):
        devices.order_after(computed, own)
        made = buffer / (microbatches * dist.get_world_size())
        dist.all_reduce(made)
        if asynchronous:
            sleep(LATE_CYCLES)
        future.set_result(made * 1)  # behind the sleep; without the wait the user finds memory that nobody has written
    return future


HOOKS = {"late": late_hook, "torch's": torchs_hook}


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", HOOKS)
def test_replicas_with_a_communication_hook_equal_plain_pytorch(name: str, view: bool) -> None:
    if name == "torch's" and os.environ.get(NCCL) != "1" and not IS_SIMULATED:
        pytest.skip("over gloo a future does not order the GPU's streams: needs `scripts/gpu --nccl`")
    model, way = row("frozen and unused parameters", True, view)
    check(model, way, functools.partial(train_with_hook, hook=HOOKS[name]))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sharded_parameters_equal_plain_pytorch(accumulation: int) -> None:
    way = way_of(accumulation=accumulation, batches=(8,) * 2 * accumulation, prepare=checkpoint)
    if os.environ.get(NCCL) != "1" and not IS_SIMULATED:
        with pytest.raises(RankFailed, match="only gloo carries tensors of cuda"):
            check("tied by a function", way)
        return
    check("tied by a function", way)
