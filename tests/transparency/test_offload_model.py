"""The proof grid of OffloadModel: after five steps everything equals the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload_model import model as module
from tests.pairwise import pairwise

CPU = torch.device("cpu")
BATCH = 7  # no multiple of 3 or 5: microbatches are ragged
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "ours": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
}
PLACES = ["host", "device"]
"""Slices compute where they rest, or with copies."""


@pytest.fixture(autouse=True)
def _at(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "device":
        monkeypatch.setattr(module, "is_the_host", lambda _: False)


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 24), nn.ReLU(inplace=True), nn.Linear(24, 1)
    )


def make_dropping_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.BatchNorm1d(16, momentum=None),
        nn.Linear(16, 1),
    )


def train(network: Any, optimizer: Any, *, clip: float | None = None, autocast: bool = False) -> list[Tensor]:
    """Train for five steps, and return losses and gradients of inputs, then the weights and buffers."""
    found = []
    torch.manual_seed(1)
    for _ in range(5):
        inputs = torch.randn(BATCH, 6).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = network(inputs).float().square().mean()
        loss.backward()
        assert inputs.grad is not None
        found += [loss.detach(), inputs.grad]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, torch.rand(1), *network.parameters(), *network.buffers()]


AXES: list[list[Any]] = [
    [False, True],  # checkpoint
    [1, 3, 5],  # microbatches
    [1, 2, 5],  # slices
    list(OPTIMIZERS),
    [False, True],  # clipping
    PLACES,
]


@pytest.mark.parametrize(
    ("checkpoint", "num_microbatches", "num_slices", "optimizer", "clipping", "place"), pairwise(AXES)
)
def test_five_steps_equal_the_plain_model(
    checkpoint: bool, num_microbatches: int, num_slices: int, optimizer: str, clipping: bool, place: str
) -> None:
    torch.manual_seed(0)
    plain = make_model()
    model = OffloadModel(copy.deepcopy(plain), CPU, CPU, num_slices, checkpoint, num_microbatches)
    rule, options = OPTIMIZERS[optimizer]
    clip = 0.1 if clipping else None
    expected = train(plain, rule(plain.parameters(), fused=True, **options), clip=clip)  # type: ignore[call-arg]
    if optimizer == "ours":
        found = train(model, OffloadOptimizer(model, rule, max_grad_norm=clip, **options))
    else:
        found = train(model, rule(model.parameters(), fused=True, **options), clip=clip)  # type: ignore[call-arg]
    # One microbatch runs the same operations in the same order; several add up gradients in another order.
    tolerance = 0.0 if num_microbatches == 1 else 2e-6
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("checkpoint", "num_slices", "autocast", "place"), pairwise([[False, True], [1, 3, 8], [False, True], PLACES])
)
def test_dropout_and_batchnorm_are_exact_under_a_seed(
    checkpoint: bool, num_slices: int, autocast: bool, place: str
) -> None:
    torch.manual_seed(0)
    plain = make_dropping_model()
    model = OffloadModel(copy.deepcopy(plain), CPU, num_slices=num_slices, checkpoint_activation=checkpoint)
    expected, found = (
        train(network, torch.optim.AdamW(network.parameters(), lr=1e-2), autocast=autocast)
        for network in (plain, model)
    )
    assert all(map(torch.equal, found, expected))
