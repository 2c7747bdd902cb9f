"""OffloadModel on a GPU: the plain model's weights, in less memory than the plain model."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from tests.device.device import allocated_bytes, gpu, in_device_time, peak_bytes, reserved_bytes, reset_peak, scaled
from tests.device.workspaces import workspace_bytes

_WIDTH, _LAYERS, _BATCH = scaled(1024), 12, scaled(64)
_SLICE_BYTES = 4 * _WIDTH * _WIDTH


def make_model(width: int = _WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Dropout(0.1), nn.GELU()) for _ in range(_LAYERS)]
    return nn.Sequential(*layers)


def train(model: Any, optimizer: torch.optim.Optimizer, width: int = _WIDTH, steps: int = 5) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(_BATCH, width, device=gpu())).square().mean().backward()
        optimizer.step()


@pytest.mark.also_on("sim:lazy:0", checkpoint=True, overlap="backward")
@pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
@pytest.mark.parametrize("overlap", ["torch", "forward", "backward"])
def test_weights_after_five_steps_are_the_plain_models(checkpoint: bool, overlap: Any) -> None:
    plain = make_model(256)
    model = OffloadModel(copy.deepcopy(plain), gpu(), num_slices=5, checkpoint_activation=checkpoint)
    plain.to(gpu())
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    train(plain, torch.optim.AdamW(plain.parameters(), **options), 256)
    optimizer = (
        torch.optim.AdamW(model.parameters(), **options)
        if overlap == "torch"
        else OffloadOptimizer(model, torch.optim.AdamW, overlap=overlap, **options)
    )
    train(model, optimizer, 256)
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected.cpu(), rtol=0, atol=1e-5)


@in_device_time()
def test_two_slices_of_weights_and_gradients_are_on_the_device() -> None:
    peaks = {}
    workspace_bytes()  # those of cuBLAS are taken once, and stay
    for checkpoint in (False, True):
        gc.collect()
        others = allocated_bytes()
        model = OffloadModel(
            make_model(), gpu(), num_slices=_LAYERS, checkpoint_activation=checkpoint, num_microbatches=4
        )
        optimizer = OffloadOptimizer(model, max_grad_norm=1.0)
        train(model, optimizer, steps=1)
        reset_peak()
        before = reserved_bytes()
        train(model, optimizer, steps=3)
        peaks[checkpoint] = peak_bytes() - others
        assert reserved_bytes() == before  # no stream has memory of its own, so nothing creeps
        del model, optimizer
    assert peaks[True] <= peaks[False]
    # While a second microbatch's gradient is added to the first one's, it is there three times, and a slice is one
    # parameter; activations are small here.
    assert peaks[True] <= 6 * _SLICE_BYTES + 64 * 4 * _BATCH * _WIDTH
