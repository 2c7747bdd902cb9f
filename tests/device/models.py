"""Layers for tests on a device, and their gradients; cases of other tests there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Case


class Checkpointed(nn.Sequential):
    """Layers without random numbers, checkpointed one by one, whose state cannot be read while a graph is captured."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return x


def layers(width: int, count: int) -> nn.Sequential:
    """Return equal layers, on the CPU, with the same weights each time."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)])


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return copies of the gradients of a step."""
    model.zero_grad()
    model(x).square().mean().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def on(device: str | torch.device, case: Case) -> Case:
    """Return a case whose model is built there, and whose batches lie there."""
    return replace(case, build=partial(_built, device, case.build), batch=partial(_drawn, device, case.batch))


def _built(device: str | torch.device, build: Callable[[], nn.Module]) -> nn.Module:
    return build().to(device)


def _drawn(device: str | torch.device, batch: Callable[..., tuple[Any, ...]], *size: Any) -> tuple[Any, ...]:
    return tuple(each.to(device) if isinstance(each, Tensor) else each for each in batch(*size))
