"""OffloadModels whose gradients are averaged over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.offload_model import OffloadModel, OffloadOptimizer
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SIZE = 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step).chunk(size)[rank]).square().mean().backward()
        optimizer.step()


def torchs_replicas(rank: int) -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    model = OffloadModel(layers(), CPU, checkpoint_activation=True)
    replica = nn.parallel.DistributedDataParallel(model)
    train(replica, torch.optim.SGD(replica.parameters(), lr=0.1), rank, SIZE)
    with pytest.raises(UsageError, match="DistributedDataParallel averages the gradients of parameters"):
        OffloadOptimizer(model)
    other = OffloadModel(layers(), CPU)
    optimizer = OffloadOptimizer(other)
    with pytest.raises(UsageError, match="DistributedDataParallel averages the gradients of parameters"):
        train(nn.parallel.DistributedDataParallel(other), optimizer, rank, SIZE)
    return [parameter.detach().clone() for parameter in model.parameters()]


def own_replicas(rank: int) -> list[torch.Tensor]:
    smp.init({"ddp": True})
    refused = OffloadModel(layers(), CPU)
    optimizer = OffloadOptimizer(refused)
    with pytest.raises(UsageError, match=r"smp\.DistributedModel averages the gradients of parameters"):
        smp.DistributedModel(refused)
    del optimizer
    model = OffloadModel(layers(), CPU, checkpoint_activation=True)
    replica = smp.DistributedModel(model)
    with pytest.raises(UsageError, match=r"smp\.DistributedModel averages the gradients of parameters"):
        OffloadOptimizer(model)
    own = smp.DistributedOptimizer(torch.optim.SGD(replica.parameters(), lr=0.1))

    @smp.step
    def step(network: Any, inputs: torch.Tensor) -> torch.Tensor:
        loss = network(inputs).square().mean()
        network.backward(loss)
        return loss

    for number in range(3):
        own.zero_grad()
        step(replica, batch(number).chunk(SIZE)[rank])
        own.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def call(way: Any) -> list[torch.Tensor]:
    import os

    found: list[torch.Tensor] = way(int(os.environ["RANK"]))
    return found


@pytest.mark.parametrize("way", [torchs_replicas, own_replicas], ids=["DistributedDataParallel", "DistributedModel"])
def test_replicas_train_as_one_and_an_offload_optimizer_is_refused(way: Any) -> None:
    plain = layers()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 0, 1)
    for found in run_ranks(call, SIZE, way):
        for p, q in zip(plain.parameters(), found, strict=True):
            torch.testing.assert_close(q, p.detach(), rtol=0, atol=1e-6)


def test_other_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    smp.init({})
    monkeypatch.setattr(type(state), "tp_size", 2)
    with pytest.raises(UnsupportedError, match="it works with data parallelism only"):
        smp.DistributedModel(nn.Sequential(OffloadModel(layers(), CPU)))
