"""Multiply gradients as they arise, so that averages of averages stay right (see the note in reducer.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["GradientFactors"]


class GradientFactors:
    """Multiplies what every backward adds to the gradient of some parameters.

    Args:
        factors: parameters, and what theirs are multiplied by.
    """

    def __init__(self, factors: Iterable[tuple[nn.Parameter, float]]) -> None:
        self._factors = [(parameter, factor) for parameter, factor in factors if factor != 1]
        self._handles: dict[int, RemovableHandle] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in parameters that were frozen until now; a hook outlives freezing, unfreezing and casts."""
        for parameter, factor in self._factors:
            if parameter.requires_grad and id(parameter) not in self._handles:
                self._handles[id(parameter)] = _multiply(parameter, factor)

    def release(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._factors = {}, []


def _multiply(parameter: nn.Parameter, factor: float) -> RemovableHandle:
    def multiplied(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * factor

    handle: RemovableHandle = parameter.register_hook(multiplied)  # type: ignore[no-untyped-call]
    return handle
