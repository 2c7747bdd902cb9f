"""Several tensors as one block of bytes, which travels as one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from smpkit.torch import devices
from smpkit.torch.pipeline.specs import TensorSpec, spec_of

__all__ = ["pack", "packed_bytes", "unpack", "unpack_copies"]

_HOST: Final = torch.device("cpu")
_ALIGNMENT: Final = 16  # bytes; a packed tensor starts at a multiple, so that it can be viewed as any dtype


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into one block of bytes on the host.

    From a device that computes on its own the copies are only queued, on its current stream: see `devices`.
    """
    device = next((each.device for each in tensors if devices.is_asynchronous(each.device)), _HOST)
    specs = [spec_of(tensor) for tensor in tensors]
    if len(tensors) > 1 and _is_uniform(specs):
        with torch.no_grad():
            stacked = torch.stack(list(tensors))
        if device is _HOST:
            return stacked.reshape(-1).view(torch.uint8)
        tensors, specs = [stacked], [spec_of(stacked)]
    packed = devices.host_memory(packed_bytes(specs), device)
    for copy, tensor in zip(unpack(packed, specs), tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    return packed


def packed_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the size of a block that `pack` makes."""
    if _is_uniform(specs):
        return sum(spec.num_bytes for spec in specs)
    return sum(_aligned(spec.num_bytes) for spec in specs)


def unpack(packed: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return views into a block, each with the shape and dtype of its spec."""
    views, start, uniform = [], 0, _is_uniform(specs)
    for spec in specs:
        views.append(packed[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape))
        start += spec.num_bytes if uniform else _aligned(spec.num_bytes)
    return views


def unpack_copies(packed: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return copies of what lies in a block, which do not keep it alive."""
    if len(specs) > 1 and _is_uniform(specs):
        stacked = packed.view(specs[0].dtype).view(len(specs), *specs[0].shape)
        copies: tuple[torch.Tensor, ...] = torch.ops.aten.unbind_copy.int(stacked)
        return list(copies)
    return [view.clone() for view in unpack(packed, specs)]


def _is_uniform(specs: Sequence[TensorSpec]) -> bool:
    """Whether all are of one shape and dtype: such tensors lie one behind the other, without gaps."""
    first = specs[0] if specs else None
    return all(spec is first or (spec.shape, spec.dtype) == (first.shape, first.dtype) for spec in specs if first)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
