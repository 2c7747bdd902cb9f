"""Parameters are packed into buckets of one dtype, in order, below the cap."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smpkit.torch.data_parallel.reducer import Bucket, ReduceTarget, plan_buckets

TARGET = ReduceTarget(mock.sentinel.group)
FLOAT, DOUBLE = torch.float32, torch.float64
MEGABYTE = 256 * 1024
"""Elements of float32."""


def planned(*kinds: tuple[Any, torch.dtype], cap: int = 1000) -> list[Bucket]:
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in kinds]
    return plan_buckets(params, cap, lambda _: TARGET)


@pytest.mark.parametrize(
    ("kinds", "cap", "numels"),
    [
        ([(size, FLOAT) for size in (4, 4, 4, 100, 1)], 32, [[4, 4], [4], [100], [1]]),
        ([(1, FLOAT), (2, DOUBLE), (3, FLOAT), (4, DOUBLE)], 1000, [[1, 3], [2, 4]]),
        # The first is small, so that its reduction starts early.
        ([(MEGABYTE, FLOAT)] * 4, 25 * 1024 * 1024, [[MEGABYTE], [MEGABYTE] * 3]),
        ([], 100, []),
    ],
    ids=["below the cap", "one dtype each", "a small first one", "none"],
)
def test_buckets_keep_the_order(kinds: list[Any], cap: int, numels: list[list[int]]) -> None:
    assert [[param.numel() for param in bucket.params] for bucket in planned(*kinds, cap=cap)] == numels


def test_packing_and_unpacking_is_exact_for_every_shape_and_stride() -> None:
    (bucket,) = planned(*((shape, FLOAT) for shape in ((2, 3), (), (0,), (4,))))
    for param in bucket.params:
        param.grad = torch.randn(param.shape)
    bucket.params[0].grad = torch.randn(3, 2).t()
    wanted = [param.grad / 2 for param in bucket.params if param.grad is not None]
    with mock.patch.object(dist, "get_world_size", return_value=2):
        bucket.pack(bucket.ids)
    last = bucket.params[-1]
    for earlier in ({}, {id(last): torch.ones(4)}):
        torch.optim.SGD(bucket.params).zero_grad()
        bucket.unpack(bucket.ids, earlier)
        wanted[-1] += earlier.get(id(last), 0)
        for param, expected in zip(bucket.params, wanted, strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, expected)
