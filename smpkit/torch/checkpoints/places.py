"""Where the tensors of this rank lie in those of the whole model, as boxes.

A whole tensor is one box. A tensor-parallel piece is one box too, unless several things are packed into it: this rank's
part of a fused query-key-value weight of two ranks is three boxes of the whole one::

    whole  | q q' | k k' | v v' |        rank 0 has q, k and v, side by side: | q | k | v |

Boxes are what torch's distributed checkpoints know as chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from smpkit.torch.tensor_parallel.shards import Shard, piece_of, shard_of

__all__ = ["Box", "boxes_in", "boxes_of", "copy_boxes", "runs_of", "view_of"]


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor that a local one holds.

    Args:
        offsets: of its first element in the whole tensor, by dimension.
        sizes: by dimension.
        at: offsets of its first element in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]


def boxes_of(shape: Sequence[int], shard: Shard | None) -> list[Box]:
    """Return the boxes of a local tensor of `shape`, which lies as `shard` says; None: it is the whole one."""
    zeros = (0,) * len(shape)
    if shard is None or shard.dim is None:
        return [Box(zeros, tuple(shape), zeros)]
    boxes, start, at = [], 0, 0
    for part in shard.parts or (shard.shape[shard.dim],):
        first, length = piece_of(part, shard.tp_rank, shard.tp_size)
        offset = _with(zeros, shard.dim, start + first)
        boxes.append(Box(offset, _with(shape, shard.dim, length), _with(zeros, shard.dim, at)))
        start, at = start + part, at + length
    return boxes


def boxes_in(tensor: torch.Tensor) -> list[Box]:
    """Return the boxes of what this rank holds of a parameter or buffer, as is written on it.

    Sharded data parallelism divides (by a DTensor) what tensor parallelism has left.
    """
    boxes = boxes_of(tensor.shape, shard_of(tensor))
    if not isinstance(tensor, DTensor):
        return boxes
    parts = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    found = [_clipped(box, tuple(part.offsets), tuple(part.sizes)) for part in parts for box in boxes]
    return [box for box in found if 0 not in box.sizes]


def _clipped(box: Box, start: Sequence[int], sizes: Sequence[int]) -> Box:
    """Return what of a box is in a part of the tensor that it is in, and where in the part."""
    first = [max(at, begin) for at, begin in zip(box.at, start, strict=True)]
    ends = (min(at + size, begin + room) for at, size, begin, room in zip(box.at, box.sizes, start, sizes, strict=True))
    return Box(
        tuple(offset + begin - at for offset, begin, at in zip(box.offsets, first, box.at, strict=True)),
        tuple(max(end - begin, 0) for end, begin in zip(ends, first, strict=True)),
        tuple(begin - origin for begin, origin in zip(first, start, strict=True)),
    )


def copy_boxes(local: torch.Tensor, whole: torch.Tensor, boxes: Iterable[Box]) -> None:
    """Fill the boxes of a local tensor from the whole one."""
    with torch.no_grad():
        for box in boxes:
            view_of(local, box.at, box.sizes).copy_(view_of(whole, box.offsets, box.sizes))


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def view_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, without a copy."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def runs_of(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Iterate over the contiguous runs that a box is in a row-major whole tensor: first element and length of each.

    They come in the order of the box's own elements.
    """
    if 0 in box.sizes:
        return
    along = len(shape)  # a run goes along the last dimension that the box has not whole, and all behind it
    while along > 0 and box.sizes[along - 1] == shape[along - 1]:
        along -= 1
    along = max(along - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    first = [each[0] * stride for each, stride in zip(ranges[along:], strides[along:], strict=True)]
    for index in itertools.product(*ranges[:along]):
        outer = sum(i * stride for i, stride in zip(index, strides[:along], strict=True))
        yield outer + sum(first), math.prod(box.sizes[along:])
