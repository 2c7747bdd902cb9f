"""The same model, batch and split, run by smpkit, by torch.distributed.pipelining and by one process."""

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
"""Runs forward and backward, and returns the loss, or None on a rank that does not get it."""

TORCH_SCHEDULES: Mapping[str, tuple[Any, int]] = {
    "1F1B": (Schedule1F1B, 1),
    "GPipe": (ScheduleGPipe, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, 2),
    "ZBV zero bubble": (ScheduleZBVZeroBubble, 2),
}
"""Class and chunks of the model per rank."""


@smp.step
def train(model: Any, loss_of: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
    """Do what `smp.step` runs for each microbatch."""
    loss = loss_of(model(inputs), targets)
    model.backward(loss)
    return loss


def smpkit_model(layers: nn.Sequential, chunks: Sequence[range]) -> smp.DistributedModel:
    """Place the layers; `smp.init` has been called with `auto_partition: False`.

    Args:
        chunks: one range per rank and virtual stage, in the order of execution.
    """
    for partition, chunk in enumerate(chunks):
        for index in chunk:
            smp.set_partition(layers[index], partition)
    return smp.DistributedModel(layers)


def smpkit_step(model: Any, loss_of: Loss, inputs: Tensor, targets: Tensor) -> Step:
    return lambda: float(train(model, loss_of, inputs, targets).reduce_mean().item())


def torch_step(
    name: str, layers: nn.Sequential, chunks: Sequence[range], loss_of: Loss, batch: Sequence[Tensor], count: int
) -> tuple[nn.Module, Step]:
    """Return what this rank has of the model, and the step, of a schedule of torch.distributed.pipelining.

    Args:
        chunks: one range per stage.
        count: the number of microbatches.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, per_rank = TORCH_SCHEDULES[name]
    goes_back = kind is ScheduleZBVZeroBubble  # down the ranks and up again: the last stage is on the first rank
    numbers = [rank, 2 * size - 1 - rank] if goes_back else list(range(rank, len(chunks), size))
    parts = nn.ModuleList(nn.Sequential(*[layers[index] for index in chunks[number]]) for number in numbers)
    stages = [
        PipelineStage(part, number, len(chunks), torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = kind(stages if per_rank > 1 else stages[0], count, loss_fn=loss_of)
    inputs, targets = batch

    def step() -> float | None:
        losses: list[Tensor] = []
        last = len(chunks) - 1 in numbers
        schedule.step(*([inputs] if rank == 0 else []), target=targets if last else None, losses=losses)
        return float(torch.stack(losses).detach().mean()) if last else None

    return parts, step


def one_process(model: nn.Module, loss_of: Loss, inputs: Tensor, targets: Tensor, count: int) -> Step:
    """Return the step of plain PyTorch, over the same microbatches."""

    def step() -> float:
        losses = []
        for mine, wanted in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = loss_of(model(mine), wanted) / count
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    return step


def with_update(optimizer: torch.optim.Optimizer, run: Step) -> Step:
    """Return a whole step."""

    def step() -> float | None:
        optimizer.zero_grad()
        loss = run()
        optimizer.step()
        return loss

    return step
