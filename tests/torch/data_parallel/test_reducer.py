"""Gradients are averaged over ranks, in buckets, whatever backward reached and in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from smpkit.errors import UnsupportedError
from smpkit.plan.mesh import CommGroup
from smpkit.testing.ranks import RankFailed
from smpkit.torch.core.runtime import state
from smpkit.torch.data_parallel.reducer import Bucket, GradientReducer, ReduceTarget, plan_buckets
from tests.models import Case, Does
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, train_step, wrap
from tests.train import Trace, Training, Way, batch, same, trace_of, world


class Branches(nn.Module):
    """Layers that a forward may leave out."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for index in used:
            x = self.layers[index](x)
        return x.square().mean()


@smp.step
def branch_step(model: Any, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
    loss = model(x, used)
    model.backward(loss)
    return loss


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.cpu().clone() for each in model.parameters()]


assert_close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)


def start(**options: Any) -> Any:
    smp.init({"ddp": True, "microbatches": options.pop("microbatches", 1)})
    return smp.DistributedModel(Branches(), bucket_cap_mb=0.00005, **options)


def numbered(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(size, 3, generator=generator).double(), generator.initial_seed() % 10


def growing_step(model: Any, x: torch.Tensor, number: int) -> None:
    for _ in range(1 + number):
        model.backward(model(x, (0, 1)))


def failing_step(model: Any, x: torch.Tensor, _: int) -> None:
    model.backward(model(x, (0, 1)))
    raise ZeroDivisionError


def fail_before_each(case: Case, way: Way) -> Trace:
    with world(way):
        script, outputs = Training(case, way), []
        for number, size in enumerate(way.batches):
            with pytest.raises(ZeroDivisionError):
                smp.step(failing_step)(script.model, *batch(case, number, size, smp.rank()))
            outputs.append(script.run(number))
        return trace_of(outputs, script.model)


class Alternating(Branches):
    """Trains a layer as the critic of a GAN: in some passes only."""

    def forward(self, x: torch.Tensor, trains_critic: bool) -> torch.Tensor:  # type: ignore[override]
        self.layers[1].requires_grad_(trains_critic)
        return super().forward(x, (0, 1))


def alternating_step(model: Any, x: torch.Tensor, number: int) -> None:
    for trains_critic in (number % 2 == 0, False):
        model.backward(model(x, trains_critic))


GROWING = Case(Branches, numbered, growing_step)
GROWING_WAY = Way(replicas=2, microbatches=1, model={"bucket_cap_mb": 0.00005})


@pytest.mark.also_on("sim:copies:0")
def test_more_backwards_than_the_step_before_made_stay_right() -> None:
    same(GROWING, GROWING_WAY)


@pytest.mark.parametrize(("accumulation", "sharded"), [(1, False), (2, False), (1, True)])
def test_what_is_frozen_after_a_backward_is_reduced(accumulation: int, sharded: bool) -> None:
    config = {"shard_optimizer_state": sharded}
    way = replace(GROWING_WAY, accumulation=accumulation, batches=(8,) * 4, config=config)
    same(Case(Alternating, numbered, alternating_step), way)


@pytest.mark.also_on("sim:copies:0")
def test_an_exception_in_a_step_leaves_the_next_one_clean() -> None:
    same(GROWING, GROWING_WAY, by=fail_before_each)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "at the end"])
@on_ranks(2)
def test_a_step_sends_each_bucket_once_and_overlap_starts_them_inside_backward(overlap: bool) -> None:
    model = start(microbatches=4, overlapping_allreduce=overlap)
    reducer = model.data_parallel.reducer
    early, finish = [], reducer.finish  # how many messages had started when the last backward ended

    def counted_finish() -> None:
        early.append(len(reducer._pending))
        finish()

    reducer.finish = counted_finish
    for _ in range(2):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            branch_step(model, torch.ones(4, 3), (0, 1, 2, 3))
    assert all_reduce.call_count == len(reducer.buckets) == 4
    assert early == ([4, 4] if overlap else [0, 0])


@on_ranks(2)
def test_gradients_of_several_pipeline_ranks_wait_for_the_end_of_backward() -> None:
    smp.init({"ddp": True})
    group = state.process_group(CommGroup.DP_GROUP)
    late, early = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    targets = {late: ReduceTarget(group, may_overlap=False), early: ReduceTarget(group)}
    reducer = GradientReducer([("", each, target) for each, target in targets.items()], bucket_cap_bytes=1)
    reducer.begin_pass()
    reducer.overlap_next_backward()
    (late * early * (smp.rank() + 1)).sum().backward()
    assert [bucket.params for bucket in reducer.buckets[: len(reducer._pending)]] == [[early]]
    reducer.finish()
    assert_close([late.grad, early.grad], [torch.full((2,), 1.5)] * 2)


@pytest.mark.also_on("sim:copies:0")
@on_ranks(2)
def test_freezing_unfreezing_and_casting_after_wrapping_are_noticed() -> None:
    model = start()
    layer = model.module.get_submodule("layers.1")
    layer.requires_grad_(False)
    branch_step(model, inputs(smp.rank()), (0, 1))
    assert gradients(model)[1] is None
    model.zero_grad()
    layer.requires_grad_(True)
    branch_step(model, inputs(smp.rank()), (0, 1))
    plain = Branches()
    for rank in range(2):
        plain(inputs(rank), (0, 1)).backward()
    assert_close(gradients(model), [None if each is None else each / 2 for each in gradients(plain)])
    model.zero_grad()
    model.double()
    branch_step(model, inputs(smp.rank()).double(), (0, 1))
    assert all(each is None or each.dtype is torch.float64 for each in gradients(model))


@on_ranks(2)
def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = wrap(nn.Embedding(5, 2, sparse=True), ddp=True)
    with pytest.raises(UnsupportedError, match="`weight` has a sparse gradient"):
        model(torch.tensor([1])).sum().backward()


def reentrant() -> nn.Module:
    again = partial(checkpoint, use_reentrant=True)
    return Does(lambda own, x: again(own.layer, again(own.layer, x)), layer=nn.Linear(2, 2))


def train_reentrant(overlap: bool) -> list[torch.Tensor | None]:
    smp.init({"ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(reentrant(), overlapping_allreduce=overlap)
    for _ in range(2):
        model.zero_grad()
        train_step(model, torch.full((1, 2), smp.rank() + 1.0, requires_grad=True))
    return gradients(model)


@pytest.mark.also_on("sim:copies:0")
def test_a_gradient_that_comes_after_its_reduction_started_is_an_error_not_a_wrong_result() -> None:
    with pytest.raises(RankFailed, match=r"`layer\.(weight|bias)` received another gradient in the same backward"):
        run_ranks(train_reentrant, 2, True)


def test_reentrant_checkpointing_works_without_overlap() -> None:
    first, second = run_ranks(train_reentrant, 2, False)
    assert_close(first, second)
    torch.manual_seed(0)
    model = reentrant()
    for rank in range(2):
        model(torch.full((1, 2), rank + 1.0, requires_grad=True)).square().mean().backward()
    assert_close(first, [p.grad / 2 for p in model.parameters() if p.grad is not None])


@on_ranks(2, fails=r"ranks 0 and 1: 4 against 3 parameters")
def test_replicas_of_different_models_are_named_not_hung_on() -> None:
    smp.init({"ddp": True})
    smp.DistributedModel(Branches(4 - smp.rank()))


@pytest.mark.usefixtures("world")
def test_views_of_buckets_are_taken_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "smpkit"):
        start(gradient_as_bucket_view=True)
    assert "gradient_as_bucket_view has no effect" in caplog.text


@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks(2)
def test_buffers_follow_the_first_replica_at_the_start_of_each_step(broadcast: bool) -> None:
    smp.init({"ddp": True})
    norm = nn.BatchNorm1d(3)
    model = smp.DistributedModel(norm, broadcast_buffers=broadcast)
    train_step(model, inputs(smp.rank()))
    norm.register_buffer("late", torch.tensor(float(smp.rank())))
    train_step(model, inputs(smp.rank()))
    assert norm.get_buffer("late").item() == (0 if broadcast else smp.rank())
    first, second = smp.allgather(norm.get_buffer("running_mean"))
    # The statistics of the first step are those of the first replica, or one's own.
    plain = nn.BatchNorm1d(3)
    for rank in (0 if broadcast else 1, 1):
        plain(inputs(rank))
    torch.testing.assert_close(second, plain.get_buffer("running_mean"))
    assert not torch.equal(first, second)


@pytest.mark.also_on("sim:copies:0")
@on_ranks(2)
def test_accumulation_sends_nothing_until_its_last_step() -> None:
    model = start(backward_passes_per_step=2)
    for messages in (0, 4, 0, 4):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            branch_step(model, torch.ones(4, 3), (0, 1, 2, 3))
        assert all_reduce.call_count == messages


USES: dict[str, Callable[[Any, Any], object]] = {
    "step": lambda _, optimizer: optimizer.step(),
    "step without smpkit": lambda _, optimizer: optimizer.optimizer.step(),
    "clip": lambda model, _: smp.clip_grad_norm_(model, 1e9),
    "clip by torch": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "unscale": lambda _, optimizer: smp.amp.GradScaler(init_scale=1.0).unscale_(optimizer),
}


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_what_is_used_before_an_accumulation_is_full_is_reduced(use: str) -> None:
    """As at the end of an epoch, in Hugging Face's Trainer and many other scripts."""
    model, plain = start(backward_passes_per_step=4), Branches()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    for passes in (3, 4):
        for each in (model, plain):
            each.zero_grad()
        for number in range(passes):
            branch_step(model, inputs(2 * number + smp.rank()), (0, 1))
            for rank in range(2):
                (plain(inputs(2 * number + rank), (0, 1)) / 2).backward()
        USES[use](model, optimizer)
        assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_what_is_cleared_before_an_accumulation_is_full_is_gone(set_to_none: bool) -> None:
    """With sharded state the owner has reduced gradients of before, to which passes add its own part of new ones."""
    smp.init({"ddp": True, "microbatches": 1, "shard_optimizer_state": True})
    model, plain = smp.DistributedModel(Branches(), backward_passes_per_step=2), Branches()
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):  # the third pass adds to what the first two gave
        branch_step(model, inputs(smp.rank()), (0, 1, 2, 3))
    model.zero_grad(set_to_none)
    branch_step(model, inputs(smp.rank()), (0, 1))
    for rank in range(2):
        (plain(inputs(rank), (0, 1)) / 2).backward()
    owned = {number: each for number, each in enumerate(gradients(model)) if each is not None}
    assert owned
    for number, each in owned.items():
        expected = gradients(plain)[number]
        assert_close(each, torch.zeros(3, 3) if expected is None else expected)


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
        bucket.pack(bucket.ids, frozenset())
    torch.optim.SGD(bucket.params).zero_grad()
    bucket.unpack(bucket.ids)
    torch.testing.assert_close([param.grad for param in bucket.params], wanted, rtol=0, atol=0)
