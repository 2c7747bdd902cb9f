"""The engine's own tensors are where it needs them, whatever device the user has made the default one.

Where a tensor is made without a device, "meta" as the default gives it no memory: what reads it fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smpkit.torch as smp
from smpkit.torch import resume_from_checkpoint, save_checkpoint
from tests.ranks import run_ranks
from tests.torch.small_steps import KINDS, Trained, batch, begin, begin_offload_model

STEPS = 5  # after the second, a pipeline measures and plans anew


def values_after(trained: Trained, first: int = 0, steps: int = STEPS) -> dict[str, Tensor]:
    """Return losses, gradients and weights."""
    values = {f"loss {number}": trained.step(batch(number)) for number in range(first, first + steps)}
    for name, parameter in trained.parameters():
        values[name] = parameter.detach().clone()
        if parameter.grad is not None:
            values[f"gradient of {name}"] = parameter.grad.clone()
    return values


def equal(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> bool:
    assert not any(value.is_meta for value in ours.values())
    assert ours.keys() == plain.keys()
    return all(torch.equal(ours[name], plain[name]) for name in plain)


def train_under_both(name: str) -> bool:
    found = []
    for default in (None, "meta"):
        torch.set_default_device(default)
        with begin(KINDS[name]) as trained:
            found.append(values_after(trained))
    return equal(*reversed(found))


@pytest.mark.parametrize("name", KINDS)
def test_training_is_the_same_under_another_default_device(name: str) -> None:
    assert all(run_ranks(train_under_both, KINDS[name].ranks, name))


def save_and_resume(folder: Path, name: str) -> bool:
    found = []
    for number, default in enumerate((None, "meta")):
        torch.set_default_device(default)
        path, partial = folder / str(number), KINDS[name].ranks > 1
        with begin(KINDS[name]) as trained:
            values_after(trained, steps=2)
            save_checkpoint(path, "x", partial=partial)
            values_after(trained, first=2, steps=1)
        with begin(KINDS[name]) as trained:
            resume_from_checkpoint(path, "x", partial=partial)
            found.append(values_after(trained, first=2))
    return equal(*reversed(found))


@pytest.mark.parametrize("name", ["plain", "fp16", "pipeline", "data, sharded state", "tensor"])
def test_checkpoints_are_saved_and_loaded_under_another_default_device(name: str, tmp_path: Path) -> None:
    assert all(run_ranks(save_and_resume, KINDS[name].ranks, tmp_path, name))


def slices() -> bool:
    found = []
    for default in (None, "meta"):
        torch.set_default_device(default)
        found.append(values_after(begin_offload_model()))
    return equal(*reversed(found))


def test_an_offload_model_trains_under_another_default_device() -> None:
    assert all(run_ranks(slices, 1))


def talk() -> list[Any]:
    torch.set_default_device("meta")
    smp.init({"pipeline_parallel_degree": 2, "ddp": True})
    sent: dict[str, Any] = {"weight": torch.arange(4.0, device="cpu"), "rank": smp.rank()}
    everyone = smp.allgather(sent)
    assert not smp.stop_requested()
    if smp.rank() == 0:
        smp.broadcast(sent)
        received = sent
    else:
        received = smp.recv_from(0)
    smp.barrier()
    smp.shutdown()
    return [[each["rank"] for each in everyone], received["weight"].tolist()]


def test_objects_travel_under_another_default_device() -> None:
    assert run_ranks(talk, 2) == [[[0, 1], [0.0, 1.0, 2.0, 3.0]]] * 2
