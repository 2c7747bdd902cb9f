"""Multiply gradients as they arise, so that averages of averages stay right (see the note in reducer.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["GradientScaling"]


class GradientScaling:
    """Multiplies what every backward adds to the gradient of some parameters.

    Args:
        grad_scales: parameters, and what their gradients are multiplied by.
    """

    def __init__(self, grad_scales: Iterable[tuple[nn.Parameter, float]]) -> None:
        self._grad_scales = [(parameter, grad_scale) for parameter, grad_scale in grad_scales if grad_scale != 1]
        self._handles: dict[int, RemovableHandle] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in parameters that were frozen until now; a hook outlives freezing, unfreezing and casts."""
        for parameter, grad_scale in self._grad_scales:
            if parameter.requires_grad and id(parameter) not in self._handles:
                self._handles[id(parameter)] = _register_scaling(parameter, grad_scale)

    def release(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._grad_scales = {}, []


def _register_scaling(parameter: nn.Parameter, grad_scale: float) -> RemovableHandle:
    def scale(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * grad_scale

    handle: RemovableHandle = parameter.register_hook(scale)  # type: ignore[no-untyped-call]
    return handle
