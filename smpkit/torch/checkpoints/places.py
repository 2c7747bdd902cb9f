"""Where the tensors of this rank lie in those of the whole model, as chunks.

A whole tensor is one chunk. A tensor-parallel piece is one chunk too, unless several things are packed into it: this
rank's part of a fused query-key-value weight of two ranks is three chunks of the whole one::

    whole  | q q' | k k' | v v' |        rank 0 has q, k and v, side by side: | q | k | v |

They are the chunks of torch's distributed checkpoints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from smpkit.torch.tensor_parallel.shards import TpShard, shard_of, shard_range

__all__ = ["Chunk", "chunks_in", "chunks_of", "copy_chunks", "runs_of", "view_of"]


@dataclass(frozen=True)
class Chunk:
    """A part of a whole tensor that a local one holds.

    Args:
        offsets: of its first element in the whole tensor, by dimension.
        sizes: by dimension.
        local_start: offsets of its first element in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_start: tuple[int, ...]


def chunks_of(shape: Sequence[int], shard: TpShard | None) -> list[Chunk]:
    """Return the chunks of a local tensor of `shape`, which lies as `shard` says; None: it is the whole one."""
    zeros = (0,) * len(shape)
    if shard is None or shard.dim is None:
        return [Chunk(zeros, tuple(shape), zeros)]
    chunks, start, local_start = [], 0, 0
    for part in shard.parts or (shard.shape[shard.dim],):
        first, length = shard_range(part, shard.tp_rank, shard.tp_size)
        offset = _with(zeros, shard.dim, start + first)
        chunks.append(Chunk(offset, _with(shape, shard.dim, length), _with(zeros, shard.dim, local_start)))
        start, local_start = start + part, local_start + length
    return chunks


def chunks_in(tensor: torch.Tensor) -> list[Chunk]:
    """Return the chunks of what this rank holds of a parameter or buffer, as is written on it.

    Sharded data parallelism divides (by a DTensor) what tensor parallelism has left.
    """
    chunks = chunks_of(tensor.shape, shard_of(tensor))
    if not isinstance(tensor, DTensor):
        return chunks
    parts = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    found = [_clipped(chunk, tuple(part.offsets), tuple(part.sizes)) for part in parts for chunk in chunks]
    return [chunk for chunk in found if 0 not in chunk.sizes]


def _clipped(chunk: Chunk, start: Sequence[int], sizes: Sequence[int]) -> Chunk:
    """Return what of a chunk is in a part of the tensor that it is in, and where in the part."""
    first = [max(local_start, begin) for local_start, begin in zip(chunk.local_start, start, strict=True)]
    ends = (
        min(local_start + size, begin + room)
        for local_start, size, begin, room in zip(chunk.local_start, chunk.sizes, start, sizes, strict=True)
    )
    return Chunk(
        tuple(
            offset + begin - local_start
            for offset, begin, local_start in zip(chunk.offsets, first, chunk.local_start, strict=True)
        ),
        tuple(max(end - begin, 0) for end, begin in zip(ends, first, strict=True)),
        tuple(begin - origin for begin, origin in zip(first, start, strict=True)),
    )


def copy_chunks(local: torch.Tensor, whole: torch.Tensor, chunks: Iterable[Chunk]) -> None:
    """Fill the chunks of a local tensor from the whole one."""
    with torch.no_grad():
        for chunk in chunks:
            view_of(local, chunk.local_start, chunk.sizes).copy_(view_of(whole, chunk.offsets, chunk.sizes))


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def view_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a chunk of a tensor, without a copy."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def runs_of(shape: Sequence[int], chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Iterate over the contiguous runs that a chunk is in a row-major whole tensor: first element and length of each.

    They come in the order of the chunk's own elements.
    """
    if 0 in chunk.sizes:
        return
    along = len(shape)  # a run goes along the last dimension that the chunk has not whole, and all behind it
    while along > 0 and chunk.sizes[along - 1] == shape[along - 1]:
        along -= 1
    along = max(along - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    first = [each[0] * stride for each, stride in zip(ranges[along:], strides[along:], strict=True)]
    for index in itertools.product(*ranges[:along]):
        outer = sum(i * stride for i, stride in zip(index, strides[:along], strict=True))
        yield outer + sum(first), math.prod(chunk.sizes[along:])
