"""OffloadModel on a GPU: the plain model's weights, in less memory than the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from tests.device.device import gpu, scaled

_WIDTH, _LAYERS, _BATCH = 256, 12, scaled(64)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Dropout(0.1), nn.GELU()) for _ in range(_LAYERS)]
    return nn.Sequential(*layers)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(_BATCH, _WIDTH, device=gpu())).square().mean().backward()
        optimizer.step()


@pytest.mark.also_on("sim:lazy:0", checkpoint=True, overlap="backward")
@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
@pytest.mark.parametrize("overlap", ["torch", "forward", "backward"])
def test_weights_after_five_steps_are_the_plain_models(checkpoint: bool, overlap: Any) -> None:
    plain = make_model()
    model = OffloadModel(copy.deepcopy(plain), gpu(), num_slices=5, checkpoint_activation=checkpoint)
    plain.to(gpu())
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    train(plain, torch.optim.AdamW(plain.parameters(), **options))
    optimizer = (
        torch.optim.AdamW(model.parameters(), **options)
        if overlap == "torch"
        else OffloadOptimizer(model, torch.optim.AdamW, overlap=overlap, **options)
    )
    train(model, optimizer)
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected.cpu(), rtol=0, atol=1e-5)
