"""Models with marked modules, trained over any grid of ranks and in one process: both must come out the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from tests.transparency.models import Trace, batch, loss_of, optimizer_of, record

TOKENS, WIDTH = 17, 8
STEPS = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 3 * WIDTH)
        self.shrink = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(torch.tanh(self.grow(self.norm(x))))


class MarkedNet(nn.Module):
    """Embeddings, blocks and a head to be distributed; a linear layer that 4 ranks cannot divide, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.narrow = nn.Linear(WIDTH, 6)
        self.widen = nn.Linear(6, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x + self.widen(functional.gelu(self.narrow(x)))))


def build_marked() -> MarkedNet:
    torch.manual_seed(7)
    return MarkedNet().double()


def train_plainly(module: nn.Module, steps: int = STEPS) -> Trace:
    """Train in one process on whole batches."""
    optimizer = optimizer_of(module)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module, *batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return record(module, losses)


@smp.step
def train_step(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = loss_of(model, tokens, targets)
    model.backward(loss)
    return loss


def own_part(size: int = 16) -> slice:
    """Return which samples of the global batch this rank feeds: with `prescaled_batch` those of its whole tp group."""
    if smp.state.cfg.prescaled_batch:
        return slice(smp.rdp_rank(), size, smp.rdp_size())
    return slice(smp.dp_rank(), size, smp.dp_size())


def train(build: Any, config: Mapping[str, Any], *, stepwise: bool = True) -> Trace:
    """Train on this world and return whole gradients and weights of what this rank holds pieces of.

    Args:
        build: makes the model, the same on all ranks; all of it is marked.
        config: of `smp.init`.
        stepwise: use `@smp.step`; else the documented plain life at pipeline degree 1.
    """
    smp.init({"ddp": True, **config})
    module = build()
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = batch(step)
        mine = own_part()
        if stepwise:
            loss = train_step(model, tokens[mine], targets[mine]).reduce_mean()
        else:
            loss = loss_of(model, tokens[mine], targets[mine])
            loss.backward()
        losses.append(sum(smp.allgather(loss.item(), smp.DP_GROUP)) / smp.dp_size())
        optimizer.step()
    trace = Trace(losses, whole_gradients(model), dict(model.state_dict()))
    smp.shutdown()
    return trace


def whole_gradients(model: Any) -> dict[str, Tensor | None]:
    """Return the gradients of what this rank holds, joined over its tensor-parallel group."""
    from smpkit.torch.tensor_parallel.whole_state import joined

    named = {name: None if p.grad is None else p.grad.clone() for name, p in model.local_named_parameters()}
    trained = {name: gradient for name, gradient in named.items() if gradient is not None}
    return {**named, **joined(model.get_module(), trained)}
