"""OffloadModels whose gradients are averaged over processes."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.testing.ranks import RankFailed
from smpkit.torch.core.runtime import state
from smpkit.torch.offload_model import OffloadModel, OffloadOptimizer
from smpkit.torch.offload_model import model as module
from tests.ranks import run_ranks
from tests.torch.offload_model.test_same import Unused

CPU = torch.device("cpu")
SIZE = 2


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, clip: float | None = None) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):  # gradients add up
            model(batch(2 * step + part).chunk(size)[rank]).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def replicas(on_device: bool, ours: bool) -> list[torch.Tensor]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    if on_device:
        module.is_the_host = lambda device: False
    model = OffloadModel(layers(), CPU, checkpoint_activation=True, process_group=dist.group.WORLD)
    optimizer: Any = (
        OffloadOptimizer(model, torch.optim.SGD, lr=0.1, max_grad_norm=0.5)
        if ours
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    train(model, optimizer, rank, SIZE)
    with pytest.raises(UsageError, match="process_group begin with different weights"):
        OffloadModel(layers(rank), CPU, process_group=dist.group.WORLD)
    with pytest.raises(UsageError, match=r"DistributedDataParallel cannot average .*\n.*process_group=torch"):
        nn.parallel.DistributedDataParallel(OffloadModel(layers(), CPU))(batch(0))
    unused = OffloadModel([Unused()], CPU, process_group=dist.group.WORLD)
    with pytest.raises(UsageError, match="2 parameters of slice 0 had no part in a backward"):
        unused(batch(0)).sum().backward()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_replicas_train_as_one(on_device: bool, ours: bool) -> None:
    plain = layers()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 0, 1, 0.5 if ours else None)
    for found in run_ranks(replicas, SIZE, on_device, ours):
        for p, q in zip(plain.parameters(), found, strict=True):
            torch.testing.assert_close(q, p.detach(), rtol=0, atol=1e-6)


def left_alone(wraps: bool) -> None:
    """Rank 1 ends, and rank 0 waits for it."""
    smp.init({"ddp": True})
    if smp.rank() == 0 or wraps:
        model = OffloadModel(layers(), CPU, process_group=smp.get_dp_process_group())
        if smp.rank() == 0:
            model(batch(0)).sum().backward()


@pytest.mark.parametrize(
    ("wraps", "what"),
    [(False, r"OffloadModel\("), (True, r"the average of the gradients of slice \d")],
    ids=["made", "backward"],
)
def test_a_replica_that_is_gone_is_named(wraps: bool, what: str) -> None:
    with pytest.raises(RankFailed, match=f"rank 0 lost rank 1 in {what}"):
        run_ranks(left_alone, SIZE, wraps)


@pytest.mark.usefixtures("world")
def test_gradients_of_a_slice_are_on_their_way_together(monkeypatch: pytest.MonkeyPatch) -> None:
    smp.init({"ddp": True})
    noted: list[str] = []
    all_reduce = dist.all_reduce

    def started(tensor: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        work = mock.Mock(wraps=all_reduce(tensor, group=group, async_op=async_op))
        noted.append("start")
        work.wait.side_effect = lambda: noted.append("wait")
        return work

    model = OffloadModel(layers()[:3], CPU, num_slices=1, process_group=smp.get_dp_process_group())
    monkeypatch.setattr(dist, "all_reduce", started)
    model(batch(0)).sum().backward()
    assert noted == ["start"] * 4 + ["wait"] * 4


@pytest.mark.usefixtures("world")
def test_other_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    smp.init({})
    monkeypatch.setitem(vars(state), "tp_size", 2)
    with pytest.raises(UnsupportedError, match="it works on one rank only"):
        smp.DistributedModel(nn.Sequential(OffloadModel(layers(), CPU)))
    monkeypatch.setitem(vars(state), "dp_size", 2)
    with pytest.raises(UnsupportedError, match=r"a DistributedModel cannot average.*\n.*process_group="):
        smp.DistributedModel(nn.Sequential(OffloadModel(layers(), CPU)))
