"""What a rank knows of a value that another rank holds: its structure, shapes, dtypes and need of gradients.

The first time a call meets arguments of given shapes, the rank that runs it tells the others what came out; from then
on everyone makes the result's *ghosts* from memory, and nothing but tensor bytes travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smpkit.torch.containers import children, rebuild

__all__ = ["Call", "TensorSpec", "map_tensors", "signature", "spec_of", "template_of"]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Call:
    """A call as the cache knows it: what is called, in which modes, with arguments of which kind."""

    target: Any
    modes: tuple[Any, ...]
    arguments: tuple[Any, ...]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return shape, strides, dtype and need of gradients of a tensor; for a located one, without its data."""
    with torch._C.DisableTorchFunctionSubclass():
        strided = tensor.layout is torch.strided
        stride = tensor.stride() if strided else ()
        return TensorSpec(tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `function` to every tensor in a nested container; everything else stays, and so does what does not change.

    The common containers are taken apart here and not by `containers.children`: this runs for every call of every
    layer on every rank.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind is tuple:
        parts = [map_tensors(function, part) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else tuple(parts)
    if kind is dict:
        made = {key: map_tensors(function, part) for key, part in value.items()}
        return value if all(made[key] is part for key, part in value.items()) else made
    if kind is list:
        return [map_tensors(function, part) for part in value]
    if kind in _PLAIN:
        return value
    inside = children(value)
    if inside is None:
        return value
    mapped = {key: map_tensors(function, part) for key, part in inside.items()}
    return value if all(mapped[key] is part for key, part in inside.items()) else rebuild(value, mapped)


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})


def signature(value: Any) -> Any:
    """Return a hashable description of arguments: equal ones make results of equal structure and shapes."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.shape, value.dtype, value.requires_grad
    kind = type(value)
    if kind in _PLAIN:
        return value if kind is not float else (float, value)
    if kind is tuple or kind is list:
        return kind, *[signature(part) for part in value]
    if kind is dict:
        return dict, *[(key, signature(part)) for key, part in value.items()]
    inside = children(value)
    if inside is not None:
        return kind, *[(key, signature(part)) for key, part in inside.items()]
    # An object of the user's: what it holds may matter, but only its kind can be compared between ranks.
    return kind if not isinstance(value, slice) else (slice, value.start, value.stop, value.step)


def template_of(value: Any) -> Any:
    """Return a result with every tensor replaced by its TensorSpec, to be sent to the other ranks."""
    return map_tensors(spec_of, value)
