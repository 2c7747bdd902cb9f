"""Replicas on the GPU: averaged gradients in buckets and views, communication hooks, sharded parameters."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.on_gpu.parts import NCCL
from tests.device.device import IS_SIMULATED, gpu
from tests.device.ranks import run_on_gpu
from tests.transparency import test_data_parallel, test_sharded_data_parallel
from tests.transparency.models import assert_same, train_plainly
from tests.transparency.test_data_parallel import STEPS, train_with_smpkit

_TOLERANCE = 1e-8  # float64 beside the CPU's; AdamW magnifies


def train_replicas(options: dict[str, Any]) -> list[Any]:
    return [train_with_smpkit(2, accumulation, bucket_cap_mb=0.001, **options) for accumulation in (1, 2)]


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapping"])
def test_replicas_equal_plain_pytorch(overlap: bool, view: bool) -> None:
    plain = [train_plainly(STEPS, accumulation) for accumulation in (1, 2)]
    options = {"overlapping_allreduce": overlap, "gradient_as_bucket_view": view}
    for traces in run_on_gpu(train_replicas, options):
        for trace, expected in zip(traces, plain, strict=True):
            assert_same(trace, expected, _TOLERANCE)


def test_training_without_a_step_function_equals_plain_pytorch() -> None:
    for trace in run_on_gpu(test_data_parallel.train_plain_style, 2, True):
        assert_same(trace, train_plainly(STEPS, 2), _TOLERANCE)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", test_data_parallel.HOOKS)
def test_replicas_with_a_communication_hook_equal_plain_pytorch(name: str, view: bool) -> None:
    if name == "torch's" and os.environ.get(NCCL) != "1" and not IS_SIMULATED:
        pytest.skip("over gloo a future does not order the GPU's streams: needs `scripts/gpu --nccl`")
    plain = train_plainly(STEPS, 1)
    for trace, seen in run_on_gpu(test_data_parallel.train_with_hook, name, view):
        assert set(seen) == {gpu().type}
        assert len(seen) > STEPS  # several buckets a step
        assert_same(trace, plain, _TOLERANCE)


def train_sharded(accumulation: int) -> dict[str, Tensor]:
    options: dict[str, Any] = {"microbatches": 2, "sdp_param_persistence_threshold": 0}
    return test_sharded_data_parallel.train(2, accumulation, checkpointed=True, **options)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sharded_parameters_equal_plain_pytorch(accumulation: int) -> None:
    expected = test_sharded_data_parallel.train_plainly(accumulation, 1.0)
    for found in run_on_gpu(train_sharded, accumulation):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=_TOLERANCE, atol=_TOLERANCE, msg=name)
