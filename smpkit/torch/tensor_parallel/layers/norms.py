"""Layer norm between tensor-parallel modules."""

from __future__ import annotations

import torch
from torch import nn

from smpkit.torch.tensor_parallel.layers.config import TransformerConfig
from smpkit.torch.tensor_parallel.layouts import Layout, mark_replicated
from smpkit.torch.tensor_parallel.module import KeepsShardMarks

__all__ = ["FusedLayerNorm", "ParallelLayerNorm", "optional_layernorm"]


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` (the class of that name in SMP v1: torch's own kernel is fused today).

    Args:
        normalized_shape, eps, elementwise_affine: as in torch.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)


class ParallelLayerNorm(KeepsShardMarks, FusedLayerNorm):
    """A layer norm on what a rank holds between distributed modules; its parameters say how they are reduced.

    Args:
        hidden_size: the last dimension.
        eps: added to the variance.
        boundary: what the values are.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        boundary: Layout,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)
        self.boundary = boundary
        for parameter in self.parameters(recurse=False):
            mark_replicated(parameter, boundary)


def optional_layernorm(wanted: bool, config: TransformerConfig, boundary: Layout) -> ParallelLayerNorm | None:
    """Return a layer norm if it is wanted."""
    return ParallelLayerNorm(config.hidden_size, config.layernorm_epsilon, boundary=boundary) if wanted else None
