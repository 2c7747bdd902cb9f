"""Replicas on the GPU: averaged gradients in buckets, sharded parameters."""

from __future__ import annotations

import os

import pytest

from benchmarks.on_gpu.parts import NCCL
from smpkit.testing import RankFailed
from tests.device.device import IS_SIMULATED
from tests.device.ranks import run_on_gpu
from tests.models import MODELS
from tests.train import Way, check_same, reference, train
from tests.transparency.test_data_parallel import row
from tests.transparency.test_sharded_data_parallel import checkpoint, way_of

TOLERANCE = 1e-8  # float64 beside the CPU's


def check(name: str, way: Way) -> None:
    case = MODELS[name]
    plain = reference(case, way)
    for trace in run_on_gpu(train, case, way, size=way.ranks, timeout=150):
        check_same(trace, plain[trace.replica], TOLERANCE)


@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapping"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_replicas_equal_plain_pytorch(accumulation: int, overlap: bool) -> None:
    check(*row("frozen and unused parameters", overlap, accumulation))


def test_training_without_a_step_function_equals_plain_pytorch() -> None:
    check(*row("frozen and unused parameters", True, 2, stepwise=False))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sharded_parameters_equal_plain_pytorch(accumulation: int) -> None:
    way = way_of(accumulation=accumulation, batches=(8,) * 2 * accumulation, prepare=checkpoint)
    if os.environ.get(NCCL) != "1" and not IS_SIMULATED:
        with pytest.raises(RankFailed, match="only gloo carries tensors of cuda"):
            check("tied by a function", way)
        return
    check("tied by a function", way)
