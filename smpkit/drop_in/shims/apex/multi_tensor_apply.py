"""`multi_tensor_applier`, which calls a function of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["multi_tensor_applier"]


def multi_tensor_applier(op: Callable[..., Any], overflow: Any, tensors: Any, *args: Any) -> Any:
    """Return what `op(chunk_size, overflow, tensors, *args)` returns; the size of a chunk has no meaning here."""
    return op(2048 * 32, overflow, tensors, *args)


setattr(multi_tensor_applier, "available", True)  # noqa: B010  functions have no such attribute, say type checkers
