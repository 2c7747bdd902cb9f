"""Tensor specs: shape, strides, dtype and `requires_grad` of a tensor without its data; and walks over containers.

Over a pipeline, a rank knows the values of other ranks by their specs alone. Equal specs are one object, so that
comparing them costs nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core.tree import children, rebuild


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @functools.cached_property
    def parts(self) -> tuple[Any, ...]:
        """What makes it this spec, as a key: a plain tuple is hashed without Python."""
        return self.shape, self.stride, self.dtype, self.requires_grad

    @functools.cached_property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def without_gradient(self) -> TensorSpec:
        return _interned(self.shape, self.stride, self.dtype, False)

    @functools.cached_property
    def as_sent(self) -> TensorSpec:
        """The spec on the receiving rank: the order of elements in memory stays, gaps are not sent.

        So a transposed value is transposed there, too, and `is_contiguous` and `view` behave as on the owner.
        """
        if len(self.stride) != len(self.shape):  # not strided
            return self
        with torch._C.DisableTorchFunction():
            dense = torch.empty_like(torch.empty_strided(self.shape, self.stride, device="meta"))
        return _interned(self.shape, dense.stride(), self.dtype, self.requires_grad)

    @functools.cached_property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions from the largest stride to the smallest; None if that is their usual order."""
        dims = tuple(sorted(range(len(self.stride)), key=lambda dim: -self.stride[dim]))
        return None if dims == tuple(range(len(dims))) else dims

    @functools.cached_property
    def dense_stride(self) -> tuple[int, ...]:
        """The strides of a contiguous tensor of this shape; torch is faster with given strides."""
        return _dense_strides(self.shape, None)

    @functools.cached_property
    def text(self) -> str:
        """Dtype and shape, for messages."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _interned, self.parts


_INTERNED: Final[dict[tuple[Any, ...], TensorSpec]] = {}
MAX_INTERNED: Final = 1 << 12
"""How many specs are kept. Of a spec that is dropped and made again, the two objects are equal but compare slowly."""


def _interned(*parts: Any) -> TensorSpec:
    spec = _INTERNED.get(parts)
    if spec is None:
        if len(_INTERNED) >= MAX_INTERNED:
            del _INTERNED[next(iter(_INTERNED))]
        spec = _INTERNED[parts] = TensorSpec(*parts)
    return spec


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of a tensor; a stage tensor needs no data for it."""
    with torch._C.DisableTorchFunction():
        return spec_of_unwrapped(tensor)


def spec_of_unwrapped(tensor: torch.Tensor) -> TensorSpec:
    """Return what `spec_of` does, for callers that have disabled `__torch_function__` themselves."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    parts = (tensor.shape, strides, tensor.dtype, tensor.requires_grad)
    return _INTERNED.get(parts) or _interned(*parts)


def dense_spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of a tensor as if it were contiguous: some ranks know only the shape of a parameter."""
    return _interned(tensor.shape, _dense_strides(tensor.shape, None), tensor.dtype, tensor.requires_grad)


def to_layout(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Return a dense tensor whose dimensions lie in memory in `order` (None: as in a contiguous tensor)."""
    if tensor.layout is not torch.strided:
        return tensor
    strides = _dense_strides(tensor.shape, order)
    if tensor.stride() == strides:
        return tensor
    # `contiguous` may keep other strides of dimensions of size 1: `as_layout` sets them all.
    return as_layout(permute_to_memory(tensor, order).contiguous(), tensor.shape, order)


def permute_to_memory(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Return a view of a tensor with its dimensions in `order`, that of its memory (None: as they are)."""
    return tensor if order is None else tensor.permute(order)


def as_layout(
    dense: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...] | None, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return a view of dense memory with this shape, and its dimensions in memory in `order`.

    Args:
        strides: they fit `order`, but dimensions of size 1 may have any; None: those that follow from the shape.
    """
    return dense.as_strided(shape, _dense_strides(shape, order) if strides is None else strides)


@functools.lru_cache(maxsize=256)
def _dense_strides(shape: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    strides, step = [1] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, one byte after the other, without a copy."""
    flat = dense.reshape(-1)
    # A tensor of one element is contiguous whatever its stride, but `view` takes it with a stride of 1 only.
    return (flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat).view(torch.uint8)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a key that tensors in the same memory share, as long as they live."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    address: int = tensor.untyped_storage()._cdata
    return address


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory has been changed in place; inference tensors have no count."""
    return 0 if tensor.is_inference() else tensor._version


NON_TENSOR_TYPES: Final = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})
"""Common types of leaves that are no tensors and hold none."""


def map_tensors(function: Callable[[Any], Any], value: Any, kind: type = torch.Tensor) -> Any:
    """Apply `function` to every tensor in a nested container; a container in which nothing changes stays the same.

    Args:
        kind: the class of what is mapped, in place of tensors.
    """
    # Common containers are handled here and not by `tree.children`: this runs for every call of every layer.
    if isinstance(value, kind):
        return function(value)
    container = type(value)
    if container in NON_TENSOR_TYPES:
        return value
    if container is tuple:
        parts = [map_tensors(function, part, kind) for part in value]
        return value if all(map(is_, parts, value)) else tuple(parts)
    if container is list:
        return [map_tensors(function, part, kind) for part in value]
    inside = value if container is dict else children(value)
    if inside is None:
        return value
    mapped = {key: map_tensors(function, part, kind) for key, part in inside.items()}
    return value if all(map(is_, mapped.values(), inside.values())) else rebuild(value, mapped)


def describe(value: Any, key: list[Any], visit: Callable[[torch.Tensor], Any]) -> Any:
    """Append a hashable description of arguments to `key`; return them with `visit(tensor)` in place of each tensor.

    Calls whose arguments have equal descriptions return results of equal structure and shapes. `visit` appends the
    description of its tensor itself.
    """
    kind = type(value)
    if kind in NON_TENSOR_TYPES:
        key += kind, value  # the kind too: 1, 1.0 and True are equal
        return value
    if isinstance(value, torch.Tensor):
        return visit(value)
    if kind is tuple or kind is list:
        key += kind, len(value)
        parts = [describe(part, key, visit) for part in value]
        return value if all(map(is_, parts, value)) else kind(parts)
    inside = value if kind is dict else children(value)
    if inside is None:
        # An object of the user's: its contents may matter, but ranks can compare no more than its type.
        key += (slice, value.start, value.stop, value.step) if kind is slice else (kind,)
        return value
    if isinstance(value, set | frozenset) and len(value) > 1 and tensors_in(value):
        raise UsageError(
            f"a set of {len(value)} tensors is an argument, and each pipeline rank has its members in another order",
            hint="use a list or a tuple",
        )
    key += kind, len(inside), *inside
    described = {name: describe(part, key, visit) for name, part in inside.items()}
    return value if all(map(is_, described.values(), inside.values())) else rebuild(value, described)


def signature(value: Any) -> tuple[Any, ...]:
    """Return a hashable description of arguments that hold plain tensors."""
    key: list[Any] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        key.append((tensor.shape, tensor.dtype, tensor.requires_grad))
        return tensor

    describe(value, key, note)
    return tuple(key)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested container, in order."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, value)
    return tensors


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a structure."""

    index: int


@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors, so that it holds no memory of the device."""

    skeleton: Any

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with these tensors in it."""
        return map_tensors(lambda slot: tensors[slot.index], self.skeleton, _Slot)


def flatten(value: Any, weights: list[torch.Tensor] | None = None) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors of a nested value, each once, and the structure without them.

    Args:
        weights: a list to add the parameters to, which then stay in the structure; None: they are tensors like others.
    """
    tensors: list[torch.Tensor] = []
    slots: dict[int, _Slot] = {}

    def take(tensor: torch.Tensor) -> Any:
        if weights is not None and isinstance(tensor, torch.nn.Parameter):
            weights.append(tensor)
            return tensor
        if id(tensor) not in slots:
            slots[id(tensor)] = _Slot(len(tensors))
            tensors.append(tensor)
        return slots[id(tensor)]

    skeleton = map_tensors(take, value)
    return tensors, Structure(skeleton)
