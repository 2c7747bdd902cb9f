"""Small models in training steps of each kind of parallelism, for what holds in all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit import OffloadModel, OffloadOptimizer

__all__ = ["KINDS", "Kind", "Trained", "batch", "begin", "begin_offload_model"]

WIDTH, BATCH = 16, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Linear(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.shrink = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(self.dropout(torch.tanh(self.grow(x))))


class Net(nn.Module):
    """Blocks, with a parameter that no backward reaches if `unused`."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Kind:
    """A kind of step: the configuration, on how many ranks, and what is special about the model."""

    config: Mapping[str, Any]
    ranks: int = 2
    unused: bool = False
    marked: bool = False
    checkpointed: bool = False


KINDS = {
    "plain": Kind({"microbatches": 2}, ranks=1),
    "fp16": Kind({"microbatches": 2, "fp16": True}, ranks=1),
    "pipeline": Kind({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}),
    "interleaved": Kind({"pipeline_parallel_degree": 2, "microbatches": 4, "virtual_pipeline_degree": 2, "ddp": True}),
    "data": Kind({"ddp": True, "microbatches": 2}),
    "data, one parameter unused": Kind({"ddp": True, "microbatches": 2}, unused=True),
    "data, sharded state": Kind({"ddp": True, "microbatches": 2, "shard_optimizer_state": True}),
    "tensor": Kind({"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2}, marked=True),
    "activations offloaded": Kind({"offload_activations": True, "microbatches": 2}, ranks=1, checkpointed=True),
}


@dataclass
class Trained:
    """A model that trains, and what it is trained by."""

    step: Callable[[Tensor], Tensor]
    """Runs a step with a batch, and that of the optimizer; returns the loss."""
    parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]]


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def batch(number: int) -> Tensor:
    """Return the batch of a step, on the host."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number), device="cpu")


@contextlib.contextmanager
def begin(kind: Kind) -> Iterator[Trained]:
    """Train as `kind` says on this rank."""
    smp.init(dict(kind.config))
    with torch.device("cpu"):
        torch.manual_seed(3)
        module = Net(unused=kind.unused)
        if kind.marked:
            for block in module.blocks:
                smp.set_tensor_parallelism(block)
        if kind.checkpointed:
            for block in module.blocks:
                smp.set_activation_checkpointing(block)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = train_step(model, x).reduce_mean()
        optimizer.step()
        return loss

    yield Trained(step, model.local_named_parameters)
    smp.shutdown()


def begin_offload_model() -> Trained:
    """Train an OffloadModel with its optimizer."""
    with torch.device("cpu"):
        torch.manual_seed(3)
        module = nn.Sequential(*[Block() for _ in range(4)])
    model = OffloadModel(module, torch.device("cpu"), num_slices=4, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trained(step, model.named_parameters)
