"""Parameters are packed into buckets of one dtype, in order, below the cap."""

from __future__ import annotations

import torch
from torch import nn

from smpkit.torch.data_parallel.buckets import plan_buckets


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_buckets_keep_the_order_and_stay_below_the_cap() -> None:
    buckets = plan_buckets(parameters(4, 4, 4, 100, 1), cap_bytes=32)
    assert [bucket.numels for bucket in buckets] == [[4, 4], [4], [100], [1]]
    assert [bucket.index() for bucket in buckets] == [0, 1, 2, 3]


def test_a_bucket_holds_one_dtype() -> None:
    mixed = [
        parameter
        for pair in zip(parameters(1, 1), parameters(1, 1, dtype=torch.float64), strict=True)
        for parameter in pair
    ]
    buckets = plan_buckets(mixed, cap_bytes=1000)
    assert [{param.dtype for param in bucket.params} for bucket in buckets] == [{torch.float32}, {torch.float64}]


def test_the_first_bucket_is_small_so_that_reduction_starts_early() -> None:
    megabyte = 256 * 1024  # float32 elements
    buckets = plan_buckets(parameters(megabyte, megabyte, megabyte, megabyte), cap_bytes=25 * 1024 * 1024)
    assert [len(bucket.params) for bucket in buckets] == [1, 3]


def test_no_parameters_make_no_buckets() -> None:
    assert plan_buckets([], 100) == []


def test_packing_and_unpacking_is_exact_for_every_shape() -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (), (0,), (4,))]
    (bucket,) = plan_buckets(params, 1000)
    for slot, param in enumerate(params):
        param.grad = torch.randn(param.shape)
        bucket.used.add(slot)
    wanted = [param.grad.clone() / 2 for param in params if param.grad is not None]
    bucket.pack(2)
    bucket.unpack(as_view=False)
    for param, expected in zip(params, wanted, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, expected)


def test_a_gradient_with_other_strides_is_packed_by_value() -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    (bucket,) = plan_buckets([param], 1000)
    param.grad = torch.arange(6.0).view(3, 2).t()
    wanted = param.grad.clone()
    bucket.used.add(0)
    bucket.pack(1)
    assert torch.equal(bucket.views[0], wanted)


def test_a_gradient_that_arrives_twice_does_not_stand_for_another() -> None:
    (bucket,) = plan_buckets(parameters(2, 2), 1000)
    bucket.arrived += [0, 0]
    assert not bucket.is_ready()
    bucket.arrived.append(1)
    assert bucket.is_ready()
