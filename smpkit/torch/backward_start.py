"""The gradients that a microbatch's backward starts with, so that a step ends with the average over microbatches."""

from __future__ import annotations

import torch

__all__ = ["RootGradients", "scaled_root_gradient"]


def scaled_root_gradient(root: torch.Tensor, grad: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """Return the gradient that backward starts with at `root`: the given one, or 1, times `scale`.

    None leaves it to torch: without a gradient a root must be a scalar, and of any other torch says what is wrong.
    """
    if scale == 1.0:
        return grad
    if grad is not None:
        return grad * scale
    return torch.full_like(root, scale) if root.numel() == 1 else None


class RootGradients:
    """Root gradients; the next microbatch most often needs the one of the last."""

    def __init__(self) -> None:
        self._scale = 1.0
        self._latest: torch.Tensor | None = None

    def scaled(self, root: torch.Tensor, grad: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        """Return what `scaled_root_gradient` does."""
        latest = self._latest
        if (
            grad is None
            and latest is not None
            and scale == self._scale
            and root.shape == latest.shape
            and root.dtype is latest.dtype
            and root.device == latest.device
            and latest._version == 0  # a backward of the user's may have changed what it was given
        ):
            return latest
        gradient = scaled_root_gradient(root, grad, scale)
        if grad is None and gradient is not None:
            self._scale, self._latest = scale, gradient
        return gradient
