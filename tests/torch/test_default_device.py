"""The engine's own tensors are where it needs them, whatever device the user has made the default one.

Where a tensor is made without a device, "meta" as the default gives it no memory: what reads it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from tests.models import CASES, Case
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks
from tests.train import KINDS, Trace, Training, TrainingInSlices, batch, check_same, flat, training

STEPS = 5  # after the second, a pipeline measures and plans anew


def values_after(trained: Training | TrainingInSlices, case: Case, numbers: Iterable[int] = range(STEPS)) -> Trace:
    """Train for some steps; return losses, gradients and weights."""
    losses = [flat(trained.step(*batch(case, number, 8))) for number in numbers]
    held = dict(trained.parameters())
    gradients = {name: each.grad for name, each in held.items()}
    return Trace(0, losses, gradients, {name: each.detach().clone() for name, each in held.items()})


def check_under_both(train: Callable[[str], Trace]) -> None:
    """Let `train` train under either default device, and compare."""
    found = []
    for default in ("cpu", "meta"):
        torch.set_default_device(default)
        found.append(train(default))
    torch.set_default_device(None)
    check_same(found[1], found[0], tolerance=0)


def train_under_both(name: str) -> None:
    case, way = KINDS[name]

    def train(_: str) -> Trace:
        with training(case, way) as trained:
            return values_after(trained, case)

    check_under_both(train)


@pytest.mark.parametrize("name", ["interleaved", "data, one parameter unused", "activations offloaded"])
def test_training_is_the_same_under_another_default_device(name: str) -> None:
    run_ranks(train_under_both, KINDS[name][1].ranks, name)


def resume_under_both(folder: Path, name: str) -> None:
    case, way = KINDS[name]

    def resume(default: str) -> Trace:
        with training(case, way) as trained:
            values_after(trained, case, range(2))
            smp.save_checkpoint(folder / default, "x")
        with training(case, way) as trained:
            smp.resume_from_checkpoint(folder / default, "x")
            return values_after(trained, case, range(2, STEPS))

    check_under_both(resume)


@pytest.mark.parametrize("name", ["fp16", "pipeline", "data, sharded state", "tensor"])
def test_checkpoints_are_the_same_under_another_default_device(name: str, tmp_path: Path) -> None:
    run_ranks(resume_under_both, KINDS[name][1].ranks, tmp_path, name)


@on_ranks(1)
def test_an_offload_model_trains_under_another_default_device() -> None:
    case = CASES["Sequential"]
    check_under_both(
        lambda _: values_after(TrainingInSlices(case, num_slices=4, checkpoint_activation=True), case),
    )


@on_ranks(2)
def test_objects_travel_under_another_default_device() -> None:
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
    assert [each["rank"] for each in everyone] == [0, 1]
    assert received["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
