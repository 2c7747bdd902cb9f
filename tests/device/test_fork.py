"""Data loaders fork processes that have pinned memory and a GPU in use: they work, and touch neither."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from smpkit import OffloadModel, OffloadOptimizer, offload_activations
from tests.device.device import cannot_be_used, gpu
from tests.device.models import Checkpointed, gradients_of, layers

_WIDTH, _BATCH = 256, 64

# Python warns of every fork of a process with threads; a loader in this mode is what scripts have.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Rows(Dataset[Tensor]):
    """Draws rows, in a process of its own that CUDA has not been started in."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def __len__(self) -> int:
        return 8 * _BATCH

    def __getitem__(self, index: int) -> Tensor:
        assert os.getpid() != self.owner
        assert cannot_be_used()
        return row(index)


def loader(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(), _BATCH, num_workers=2, multiprocessing_context="fork", timeout=60, **options)


def offloaded_activations() -> tuple[Callable[[Tensor], list[Tensor]], Callable[[], object]]:
    model = Checkpointed(*layers(_WIDTH, 4)).to(gpu())
    offload = offload_activations(model, min_bytes=0)
    return partial(gradients_of, model), offload.close


def offloaded_model() -> tuple[Callable[[Tensor], list[Tensor]], Callable[[], object]]:
    model = OffloadModel(layers(_WIDTH, 4), gpu(), num_slices=2, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, lr=0.0, overlap="forward")

    def step(x: Tensor) -> list[Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach().clone()]

    return step, model.synchronize


@pytest.mark.parametrize("make", [offloaded_activations, offloaded_model])
def test_loaders_fork_in_the_middle_of_training(make: Any) -> None:
    step, end = make()
    batches = [torch.stack([row(index) for index in range(n * _BATCH, (n + 1) * _BATCH)]) for n in range(8)]
    expected = [step(x.to(gpu())) for x in batches]
    for _ in range(2):  # the second time the parent has pinned more
        for x, wanted in zip(loader(pin_memory=True), expected, strict=True):
            assert all(map(torch.equal, step(x.to(gpu(), non_blocking=True)), wanted))
    end()


def row(index: int) -> Tensor:
    return torch.randn(_WIDTH, generator=torch.Generator().manual_seed(index))


def test_a_child_that_exits_leaves_the_parents_pinned_memory_pinned() -> None:
    step, end = offloaded_activations()
    x = torch.ones(_BATCH, _WIDTH, device=gpu())
    expected = step(x)
    child = os.fork()
    if child == 0:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    for _ in range(3):
        assert all(map(torch.equal, step(x), expected))
    end()
