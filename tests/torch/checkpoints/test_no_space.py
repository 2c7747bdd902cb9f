"""A disk without room, as the kernel says it: the save fails on all ranks, and the checkpoint before stays."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import CheckpointError
from tests.ranks import run_ranks

WIDTH = 64
STRUCK = [("whole", 0), ("part", 0), ("part", 1)]


class Layers(nn.Module):
    """A layer on each of two pipeline ranks, 16 KiB each."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        with smp.partition(1):
            self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.second(self.first(x)).sum())


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    model.backward(loss)
    return loss


@contextlib.contextmanager
def room_for(size: int, *, on: int) -> Iterator[None]:
    """Let one rank write no file beyond so many bytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if smp.rank() == on:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def run_out_of_room(folder: Path) -> list[str]:
    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0, "microbatches": 2})
    model = smp.DistributedModel(Layers())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step(model, torch.ones(2, WIDTH))
    optimizer.step()
    kinds = {"whole": {"partial": False}, "part": {}}
    for tag, options in kinds.items():
        smp.save_checkpoint(folder, tag, **options)  # type: ignore[arg-type]
    smp.barrier()
    before, messages = listing(folder), []
    # Rank 0 writes the whole file, and each rank its part.
    for tag, rank in STRUCK:
        with room_for(1000, on=rank), pytest.raises(CheckpointError) as caught:
            smp.save_checkpoint(folder, tag, **kinds[tag])  # type: ignore[arg-type]
        messages.append(caught.value.message)
        smp.barrier()
        assert listing(folder) == before, (rank, tag)
    for tag, options in kinds.items():
        smp.resume_from_checkpoint(folder, tag, **options)  # type: ignore[arg-type]
        smp.save_checkpoint(folder, tag, **options)  # type: ignore[arg-type]
    return messages


def test_the_checkpoint_before_stays_when_a_rank_has_no_room(tmp_path: Path) -> None:
    for messages in run_ranks(run_out_of_room, 2, tmp_path):
        for message, (tag, rank) in zip(messages, STRUCK, strict=True):
            assert message.startswith(f"checkpoint `{tag}` was not saved; rank {rank}: "), message
            assert "cannot be written" in message
