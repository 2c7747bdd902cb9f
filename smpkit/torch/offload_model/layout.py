"""Where the parameters of a slice lie in one flat buffer, so that a slice moves in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["BufferSlot", "Layout", "compute_dtype", "with_own_storage"]

_ALIGNMENT: Final = 64  # elements: enough for the vector loads of every dtype, and equal in buffers of different dtypes


def compute_dtype(parameter: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is computed with: integers and None keep their own."""
    return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype


@dataclass(frozen=True)
class BufferSlot:
    """Where one parameter lies."""

    start: int
    """In bytes, from the start of the buffer."""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_elements(self) -> int:
        """Elements up to the next place, with padding."""
        return -(-self.shape.numel() // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """Bytes up to the next place, with padding."""
        return self.num_elements * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Return the part of a buffer of bytes that is this parameter."""
        flat = buffer[self.start : self.start + self.shape.numel() * self.dtype.itemsize]
        return flat.view(self.dtype).view(self.shape)

    def padded(self, buffer: Tensor) -> Tensor:
        """Return that part with its padding, flat."""
        return buffer[self.start : self.start + self.num_bytes].view(self.dtype)


class Layout:
    """The places of some parameters in one buffer of bytes.

    Trainable ones come first, so gradients are a prefix; then equal dtypes, then matrices before vectors, because
    optimizers group them so, and the optimizer's kernel likes long runs of one group.

    Args:
        parameters: without repetitions.
        dtype: what floating-point ones are computed in; None keeps theirs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        order = sorted(parameters, key=_rank(dtype))  # stable: the model's order within each kind
        self.parameters = tuple(order)
        slots, start = [], 0
        for parameter in order:
            slots.append(BufferSlot(start, compute_dtype(parameter, dtype), parameter.shape))
            start += slots[-1].num_bytes
        self.slots = tuple(slots)
        self.num_bytes = start

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the parameters' parts of a buffer of at least `num_bytes` bytes."""
        return [slot.view(buffer) for slot in self.slots]


def with_own_storage(view: Tensor) -> Tensor:
    """Return the same memory under a storage of its own.

    `torch.save` and copies take whole storages: one parameter's is to be its own, not that of the slice.
    """
    if view.numel() == 0:
        return view
    start = view.storage_offset() * view.itemsize
    whole: Any = view.untyped_storage()
    own = torch.empty(0, dtype=view.dtype, device=view.device)
    return own.set_(whole[start : start + view.nbytes], 0, view.shape, view.stride())


def _rank(dtype: torch.dtype | None) -> Callable[[nn.Parameter], tuple[bool, str, bool]]:
    return lambda parameter: (
        not parameter.requires_grad,
        str(compute_dtype(parameter, dtype)),
        parameter.dim() < 2,
    )
