"""Give every rank of a pipeline the batch of pp_rank 0, as SMP v1 did.

The tensors are handed on from rank to rank, each of which needs them later than the one before, so pp_rank 0 sends one
message and waits for nobody. Its size is what the step before needed, which all ranks know: a checksum of the shapes,
so that ranks with different batches find out before anything else is sent, then what fits of the tensors, most often
all.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.pipeline.specs import TensorSpec, spec_of
from smpkit.torch.pipeline.transport import Tag, Transport, pack, packed_bytes, unpack

__all__ = ["FIRST_BYTES", "inputs_of_first", "message_bytes"]

FIRST_BYTES: Final = 64 * 1024
"""Of the first message, as long as no step has told what is needed; and the most that it has."""
_CHECKSUM_BYTES: Final = 16  # with padding, so that what follows is aligned
_WHAT: Final = "the inputs of the step"


def message_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return how large the first message should be for a step with such tensors."""
    return min(FIRST_BYTES, _CHECKSUM_BYTES + packed_bytes([spec_of(tensor) for tensor in tensors]))


def inputs_of_first(
    transport: Transport,
    rank: int,
    size: int,
    device: torch.device,
    tensors: Sequence[torch.Tensor],
    head_bytes: int = FIRST_BYTES,
) -> list[torch.Tensor]:
    """Return the tensors that pp_rank 0 passed; all ranks call this with tensors of the same shapes and dtypes.

    Args:
        head_bytes: the size of the first message, the same on all ranks.

    Raises:
        UsageError: the shapes or dtypes are not those of pp_rank 0.
    """
    specs = [spec_of(tensor) for tensor in tensors]
    checksum = _checksum(tuple(specs))
    tag = Tag.INPUTS_REST + (checksum & 0xFFFFFF)
    if rank == 0:
        framed = _framed(checksum, tensors, head_bytes)
        _hand_on(transport, rank, size, tag, framed[:head_bytes], framed[head_bytes:])
        return [tensor.detach().to(device) for tensor in tensors]
    head = transport.receive_bytes(head_bytes, rank - 1, Tag.INPUTS_HEAD + head_bytes, _WHAT)
    if int(head[:8].view(torch.int64)) != checksum:
        raise UsageError(
            f"pipeline rank {rank} was given tensors {_shapes(specs) or 'none'} for the step, and pipeline rank 0"
            " others",
            hint="feed every rank of a pipeline the same batches: shard data by smp.dp_rank(), not by smp.rank()",
        )
    num_bytes = _CHECKSUM_BYTES + packed_bytes(specs)
    rest = head[:0]
    if num_bytes > head_bytes:
        rest = transport.receive_bytes(num_bytes - head_bytes, rank - 1, tag, _WHAT)
    _hand_on(transport, rank, size, tag, head, rest)
    # A copy, because the messages are still on their way to the next rank and a step may change its inputs.
    packed = torch.cat([head[_CHECKSUM_BYTES:num_bytes], rest])
    return [tensor.to(device) for tensor in unpack(packed, specs)]


def _framed(checksum: int, tensors: Sequence[torch.Tensor], at_least: int) -> torch.Tensor:
    """Return the bytes that travel."""
    parts = [torch.tensor([checksum, 0]).view(torch.uint8), pack(tensors)]
    missing = at_least - sum(map(len, parts))
    if missing > 0:
        parts.append(torch.zeros(missing, dtype=torch.uint8))
    return torch.cat(parts)


@functools.lru_cache(maxsize=256)
def _checksum(specs: tuple[TensorSpec, ...]) -> int:
    return zlib.crc32(_shapes(specs).encode())


def _shapes(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))


def _hand_on(transport: Transport, rank: int, size: int, tag: int, head: torch.Tensor, rest: torch.Tensor) -> None:
    if rank < size - 1:
        transport.send_bytes(head, rank + 1, Tag.INPUTS_HEAD + len(head))
        if len(rest):
            transport.send_bytes(rest, rank + 1, tag)
