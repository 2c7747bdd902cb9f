"""What autograd saves while a slice runs: nothing if it will run again, else all but the weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["discarding", "without_weights"]


class _BufferOwner(Protocol):
    def buffer(self, index: int) -> Tensor: ...


@dataclass(frozen=True)
class _Weight:
    """A part of the buffer in which a slice's weights lie whenever its backward runs."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def discarding() -> saved_tensors_hooks:
    """Save nothing: the graph is only made to see which outputs have a gradient, and as the plain model makes it."""
    return _untraced(lambda _: None, _no_backward)


def _no_backward(_: None) -> Tensor:
    raise AssertionError("backward through the forward that is run again")


def without_weights(device_weights: _BufferOwner, index: int) -> saved_tensors_hooks:
    """Save where weights are instead of weights: their memory is another slice's by the time of the backward.

    Everything else goes to the hooks that are active outside (which torch would pass over), or stays as it is.
    """
    storage = device_weights.buffer(index).untyped_storage().data_ptr()
    outer_pack, outer_unpack = _outer_hooks()

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() == storage:
            return _Weight(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return outer_pack(tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _Weight):
            flat = device_weights.buffer(index).view(packed.dtype)
            return flat.as_strided(packed.shape, packed.stride, packed.offset)
        return outer_unpack(packed)

    return _untraced(pack, unpack)


def _untraced(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
    """Return hooks that torch.compile leaves alone where a compiled layer calls them: it would trace each as code."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and asking would import it
        disable: Any = torch.compiler.disable
        pack, unpack = disable(pack), disable(unpack)
    return saved_tensors_hooks(pack, unpack)


def _outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None else (_same, _same)


def _same(value: Any) -> Any:
    return value
