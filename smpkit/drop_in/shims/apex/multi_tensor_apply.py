"""`multi_tensor_applier`, which calls a function of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["multi_tensor_applier"]


class _MultiTensorApply:
    available = True

    def __call__(self, op: Callable[..., Any], overflow: Any, tensors: Any, *args: Any) -> Any:
        """Return what `op(chunk_size, overflow, tensors, *args)` returns; the size of a chunk has no meaning here."""
        return op(2048 * 32, overflow, tensors, *args)


multi_tensor_applier = _MultiTensorApply()
