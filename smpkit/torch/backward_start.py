"""The gradients that a microbatch's backward starts with, so that a step ends with the average over microbatches."""

from __future__ import annotations

import torch

__all__ = ["scaled_start"]


def scaled_start(root: torch.Tensor, grad: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """Return the gradient that backward starts with at `root`: the given one, or 1, times `scale`.

    None leaves it to torch: without a gradient a root must be a scalar, and of any other torch says what is wrong.
    """
    if scale == 1.0:
        return grad
    if grad is not None:
        return grad * scale
    return torch.full_like(root, scale) if root.numel() == 1 else None
