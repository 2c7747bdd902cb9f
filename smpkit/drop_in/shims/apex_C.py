"""Apex's functions that make one tensor of many, and back: torch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors, one tensor after the other, [elements]."""
    flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat tensor with the shapes of the tensors."""
    return list(torch._utils._unflatten_dense_tensors(flat, tensors))
