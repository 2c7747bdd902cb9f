"""Give every rank of a pipeline the batch of pp_rank 0, as SMP v1 did.

The tensors are handed on from rank to rank, each of which needs them later than the one before, so pp_rank 0 sends one
message and waits for nobody. The first message has a fixed size: a checksum of the shapes, so that ranks with different
batches find out before anything else is sent, then what fits of the tensors, which for tokens is most often all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.pipeline.specs import spec_of
from smpkit.torch.pipeline.transport import Tag, Transport, pack, packed_bytes, unpack

__all__ = ["inputs_of_first"]

_HEAD_BYTES: Final = 64 * 1024
_CHECKSUM_BYTES: Final = 16  # with padding, so that what follows is aligned
_ROOM_BYTES: Final = _HEAD_BYTES - _CHECKSUM_BYTES
_WHAT: Final = "the inputs of the step"


def inputs_of_first(
    transport: Transport, rank: int, size: int, device: torch.device, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors that pp_rank 0 passed; all ranks call this with tensors of the same shapes and dtypes.

    Raises:
        UsageError: the shapes or dtypes are not those of pp_rank 0.
    """
    shapes = ", ".join(str(spec_of(tensor)) for tensor in tensors)
    checksum = zlib.crc32(shapes.encode())
    tag = Tag.INPUTS_REST + (checksum & 0xFFFFFF)
    if rank == 0:
        head, rest = _framed(checksum, pack(tensors))
        _hand_on(transport, rank, size, tag, head, rest)
        return [tensor.detach().to(device) for tensor in tensors]
    head = transport.receive_bytes(_HEAD_BYTES, rank - 1, Tag.INPUTS_HEAD, _WHAT)
    if int(head[:8].view(torch.int64)) != checksum:
        raise UsageError(
            f"pipeline rank {rank} was given tensors {shapes or 'none'} for the step, and pipeline rank 0 others",
            hint="feed every rank of a pipeline the same batches: shard data by smp.dp_rank(), not by smp.rank()",
        )
    specs = [spec_of(tensor) for tensor in tensors]
    num_bytes = packed_bytes(specs)
    rest = head[:0]
    if num_bytes > _ROOM_BYTES:
        rest = transport.receive_bytes(num_bytes - _ROOM_BYTES, rank - 1, tag, _WHAT)
    _hand_on(transport, rank, size, tag, head, rest)
    # A copy, because the messages are still on their way to the next rank and a step may change its inputs.
    packed = torch.cat([head[_CHECKSUM_BYTES : _CHECKSUM_BYTES + num_bytes], rest])
    return [tensor.to(device) for tensor in unpack(packed, specs)]


def _framed(checksum: int, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first message, and the bytes that do not fit into it."""
    head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
    head[:8].view(torch.int64).fill_(checksum)
    fits = packed[:_ROOM_BYTES]
    head[_CHECKSUM_BYTES : _CHECKSUM_BYTES + len(fits)] = fits
    return head, packed[len(fits) :]


def _hand_on(transport: Transport, rank: int, size: int, tag: int, head: torch.Tensor, rest: torch.Tensor) -> None:
    if rank < size - 1:
        transport.send_bytes(head, rank + 1, Tag.INPUTS_HEAD)
        if len(rest):
            transport.send_bytes(rest, rank + 1, tag)
