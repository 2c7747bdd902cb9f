"""Layer norm between tensor-parallel modules."""

from __future__ import annotations

import torch
from torch import nn

from smpkit.torch.tensor_parallel.layers.config import TransformerConfig
from smpkit.torch.tensor_parallel.layouts import Layout, mark_replicated


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


def optional_layernorm(wanted: bool, config: TransformerConfig, boundary: Layout) -> FusedLayerNorm | None:
    """Return a layer norm on what a rank holds between distributed modules, if it is wanted."""
    if not wanted:
        return None
    norm = FusedLayerNorm(config.hidden_size, config.layernorm_epsilon)
    for parameter in norm.parameters():
        mark_replicated(parameter, boundary)
    return norm
