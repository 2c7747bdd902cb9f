"""Layers for tests on a device, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
