"""Threads and arguments that are refused by name, of `OffloadModel` and of `offload_activations`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, offload_activations
from smpkit.errors import UsageError
from smpkit.torch import set_activation_checkpointing


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def test_two_threads_at_once_are_refused() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert leave.wait(60)
            return x

    model = OffloadModel(nn.Sequential(linear(), Waits(), linear()), "cpu")
    thread = threading.Thread(target=lambda: model(torch.randn(2, 4)), name="first")
    thread.start()
    assert inside.wait(60)
    with pytest.raises(UsageError, match="at once: `MainThread` called it while `first` was in its forward"):
        model(torch.randn(2, 4))
    leave.set()
    thread.join(60)
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16"},
        {"balance": None},
        {"balance": [float("nan"), 1]},
        {"device": "nowhere"},
        {"device": "cpu:1"},
        {"offload_device": "nowhere"},
        {"host_budget_bytes": -1},
        {"host_budget_bytes": "1"},
        {"host_budget_bytes": 1.5},
        {"host_budget_bytes": True},
        {"checkpoint_activation": "yes"},
        {"checkpoint_activation": None},
        {"prefetch": "no"},
        {"links": 3},
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_with_its_value(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UsageError) as caught:
        OffloadModel(nn.Sequential(linear(), linear()), **{"device": "cpu", **given})
    assert str(caught.value).startswith(name)
    assert value is None or str(value).strip("[]") in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        *({"min_bytes": value} for value in (-1, 1.5, "a")),
        *({"host_budget_bytes": value} for value in (True, "1G")),
        *({"deadline_seconds": value} for value in (float("nan"), "x", 0, True)),
        {"link": 3},
    ],
    ids=str,
)
def test_a_wrong_argument_of_offload_activations_is_named_with_its_value(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UsageError) as caught:
        offload_activations(linear(), **given)
    assert str(caught.value).startswith(f"{name} is {value!r}")


def test_a_checkpointed_sequential_leaves_layer_by_layer() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    set_activation_checkpointing(model)
    with offload_activations(model, lead=1) as offload:
        model(torch.randn(32, 64, requires_grad=True)).sum().backward()
        [step] = offload.report().steps
    boundary = 32 * 64 * 4
    assert (step.bytes_out, step.peak_device_bytes) == (8 * boundary, 2 * boundary)
