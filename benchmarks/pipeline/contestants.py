"""One training step of the same model, batch and split, by smpkit and by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

import smpkit.torch as smp

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[], float | None]
"""Runs a training step and returns the loss, or None on a rank that does not get it."""

TORCH_SCHEDULES: Mapping[str, tuple[Any, int]] = {
    "1F1B": (Schedule1F1B, 1),
    "GPipe": (ScheduleGPipe, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, 2),
    "ZBV zero bubble": (ScheduleZBVZeroBubble, 2),
}
"""Class and chunks of the model per rank."""


def train(model: Any, loss_of: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
    """Do what `smp.step` runs for each microbatch."""
    loss = loss_of(model(inputs), targets)
    model.backward(loss)
    return loss


_train = smp.step(train)


def smpkit_model(layers: nn.Sequential, chunks: Sequence[range]) -> smp.DistributedModel:
    """Place the layers; `smp.init` has been called with `auto_partition: False`.

    Args:
        chunks: one range per rank and virtual stage, in the order of execution.
    """
    for partition, chunk in enumerate(chunks):
        for index in chunk:
            smp.set_partition(layers[index], partition)
    return smp.DistributedModel(layers)


def smpkit_step(
    layers: nn.Sequential, chunks: Sequence[range], loss_of: Loss, inputs: Tensor, targets: Tensor, lr: float = 0.0
) -> Step:
    """Prepare smpkit's step; the arguments are those of `smpkit_model`, a loss and a batch."""
    model = smpkit_model(layers, chunks)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr)) if lr else None

    def step() -> float:
        if optimizer is not None:
            optimizer.zero_grad()
        loss = _train(model, loss_of, inputs, targets).reduce_mean()
        if optimizer is not None:
            optimizer.step()
        return float(loss.item())

    return step


def torch_step(
    name: str,
    layers: nn.Sequential,
    chunks: Sequence[range],
    loss_of: Loss,
    inputs: Tensor,
    targets: Tensor,
    *,
    num_microbatches: int,
    lr: float = 0.0,
) -> Step:
    """Prepare the step of a schedule of torch.distributed.pipelining; `chunks` has one range per stage."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, per_rank = TORCH_SCHEDULES[name]
    goes_back = kind is ScheduleZBVZeroBubble  # down the ranks and up again: the last stage is on the first rank
    numbers = [rank, 2 * size - 1 - rank] if goes_back else list(range(rank, len(chunks), size))
    parts = [nn.Sequential(*[layers[index] for index in chunks[number]]) for number in numbers]
    stages = [
        PipelineStage(part, number, len(chunks), torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = kind(stages if per_rank > 1 else stages[0], num_microbatches, loss_fn=loss_of)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr) if lr else None

    def step() -> float | None:
        if optimizer is not None:
            optimizer.zero_grad()
        losses: list[Tensor] = []
        last = len(chunks) - 1 in numbers
        schedule.step(*([inputs] if rank == 0 else []), target=targets if last else None, losses=losses)
        if optimizer is not None:
            optimizer.step()
        return float(torch.stack(losses).detach().mean()) if last else None

    return step


def one_process(layers: nn.Sequential, loss_of: Loss, inputs: Tensor, targets: Tensor, *, num: int, lr: float) -> Step:
    """Prepare the step of plain PyTorch on this rank alone, over the same microbatches."""
    optimizer = torch.optim.SGD(layers.parameters(), lr)

    def step() -> float:
        optimizer.zero_grad()
        losses = []
        for mine, wanted in zip(inputs.chunk(num), targets.chunk(num), strict=True):
            loss = loss_of(layers(mine), wanted) / num
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return float(torch.stack(losses).sum())

    return step
