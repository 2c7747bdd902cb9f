"""Layer norm between tensor-parallel modules."""

from __future__ import annotations

from torch import nn

from smpkit.torch.tensor_parallel.layers.config import TransformerConfig
from smpkit.torch.tensor_parallel.layouts import Layout, mark_replicated


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` (the class of that name in SMP v1: torch's own kernel is fused today)."""


def optional_layernorm(wanted: bool, config: TransformerConfig, boundary: Layout) -> FusedLayerNorm | None:
    """Return a layer norm on what a rank holds between distributed modules, if it is wanted."""
    if not wanted:
        return None
    norm = FusedLayerNorm(config.hidden_size, config.layernorm_epsilon)
    for parameter in norm.parameters():
        mark_replicated(parameter, boundary)
    return norm
