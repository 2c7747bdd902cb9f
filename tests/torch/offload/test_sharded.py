"""Models whose weights lie in parts on several ranks, by either of torch's FSDPs, with activations offloaded around."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from smpkit.torch.offload import activations
from tests.ranks import run_ranks
from tests.torch.offload.chains import BATCH, BOUNDARY_BYTES, WIDTH, assert_idle, slow

NUM_LAYERS, STEPS = 4, 3


class Layer(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._run, x, use_reentrant=False) if self.checkpoints else self._run(x)
        return result

    def _run(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x)) + x


def first_kind(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=torch.device("cpu"))


def second_kind(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, offload: Any = None) -> list[Tensor]:
    """Return the losses, and this rank's part of all gradients and weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        if offload is None:
            loss = model(x).square().sum()
        else:
            with offload:
                loss = model(x).square().sum()
        loss.backward()
        found += [loss.detach(), *(local(each.grad).clone() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
    return [*found, *(local(each).detach().clone() for each in model.parameters())]


def compare(shard: Callable[[nn.Module], nn.Module]) -> list[list[int]]:
    """Train with and without offloading, with and without checkpoints; return the bytes that left in each step."""
    dist.init_process_group("gloo")
    sent = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(checkpoints) for _ in range(NUM_LAYERS)))
        expected = train(shard(copy.deepcopy(model)))
        assert len(expected) > STEPS
        for link in (None, slow()):
            ours = shard(copy.deepcopy(model))
            offload = activations(ours, lead=1, link=link)
            found = train(ours, offload)
            assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
            assert_idle(offload._engine)
            sent.append([step.bytes_out for step in offload.report().steps[:STEPS]])
            offload.close()
    dist.destroy_process_group()
    return sent


@pytest.mark.parametrize("shard", [first_kind, second_kind])
def test_10_sharded_weights_train_as_without_and_do_not_leave(shard: Callable[[nn.Module], nn.Module]) -> None:
    for sent in run_ranks(compare, 2, shard):
        # What `linear` and `gelu` keep of each layer, or its input if it is checkpointed, and the result: no weight.
        plain, checkpointed = (
            [(2 * NUM_LAYERS + 1) * BOUNDARY_BYTES] * STEPS,
            [(NUM_LAYERS + 1) * BOUNDARY_BYTES] * STEPS,
        )
        assert sent == [plain, plain, checkpointed, checkpointed]
