"""`multi_tensor_applier`, which calls a function of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Call functions on lists of tensors as Apex's kernels are called.

    Args:
        chunk_size: passed on.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: torch is there."""

    def __call__(
        self, op: Callable[..., Any], overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], *args: Any
    ) -> Any:
        """Return what `op(chunk_size, overflow, tensors, *args)` returns."""
        return op(self.chunk_size, overflow, tensors, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
