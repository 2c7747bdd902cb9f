"""A model whose layers are checkpointed one by one."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Checkpointed"]


class Checkpointed(nn.Sequential):
    """Layers without random numbers, whose state cannot be read while a graph is captured."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return x
