"""How a parameter of this rank lies in the whole model's, and over which ranks its gradient is averaged.

Parameters stay plain local tensors: what is special about one is written on it, and read by data parallelism, by
gradient norms and by everything that saves or loads.

A dimension of n is divided as `torch.chunk` (and DTensor) does it: every rank has ceil(n / tp_size), the last ones what
is left. So a vocabulary of 50257 needs no padding; where shapes must be equal, the modules refuse uneven sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smpkit.plan.mesh import CommGroup
from smpkit.torch.attributes import keep_attributes_in_copies

__all__ = ["TpShard", "copy_mark_to", "join_shards", "mark", "shard_of", "shard_range", "take_shard"]

_ATTRIBUTE = "_smp_shard"


@dataclass(frozen=True)
class TpShard:
    """The place of a local parameter in the whole one.

    Args:
        shape: of the whole parameter.
        dim: the dimension that is divided over the tensor-parallel ranks; None: each of them holds the whole parameter.
        parts: sizes along `dim`, in the whole parameter, of pieces packed into one (query, key and value, say), each of
            which is divided by itself; empty for one piece.
        tp_rank, tp_size: whose piece of how many this is.
        group: the ranks that the gradient is averaged over: RDP_GROUP where one backward on this rank has seen the
            samples of the whole tensor-parallel group ("scaled batch" in SMP v1), else DP_GROUP.
        scale: what the averaged gradient is multiplied with to become the gradient of the mean loss. A weight that saw
            `tp_size` batches holds their sum, so 1 / tp_size; with `prescaled_batch` all ranks have one batch and one
            loss, so 1. A whole parameter that saw only this rank's part of a common batch: DP_GROUP and tp_size.
    """

    shape: tuple[int, ...]
    dim: int | None
    parts: tuple[int, ...]
    tp_rank: int
    tp_size: int
    group: CommGroup
    scale: float

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        if self.dim is None:
            return self.shape
        sizes = self.parts or (self.shape[self.dim],)
        length = sum(shard_range(size, self.tp_rank, self.tp_size)[1] for size in sizes)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def is_distributed(self) -> bool:
        """Whether the ranks hold different values ("distributed parameter" in SMP v1)."""
        return self.dim is not None

    @property
    def sees_scaled_batch(self) -> bool:
        """Whether one backward accumulates the samples of all tensor-parallel ranks ("scaled batch" in SMP v1)."""
        return self.group is CommGroup.RDP_GROUP


def mark(parameter: torch.Tensor, shard: TpShard) -> None:
    """Write on a parameter (or buffer) where it lies; `copy.deepcopy` then copies that too."""
    setattr(parameter, _ATTRIBUTE, shard)
    keep_attributes_in_copies(parameter)


def copy_mark_to(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return a tensor with what is written on the one whose place it takes, if anything is."""
    shard = shard_of(before)
    if shard is not None:
        mark(tensor, shard)
    return tensor


def shard_of(parameter: torch.Tensor) -> TpShard | None:
    """Return what was written on a parameter; None for an ordinary one, equal on all ranks of the DP group."""
    shard: TpShard | None = getattr(parameter, _ATTRIBUTE, None)
    return shard


def shard_range(size: int, rank: int, of: int) -> tuple[int, int]:
    """Return start and length of a rank's piece of a dimension; the last pieces are shorter where it is uneven."""
    longest = -(-size // of)
    start = min(longest * rank, size)
    return start, min(longest, size - start)


def take_shard(whole: torch.Tensor, shard: TpShard) -> torch.Tensor:
    """Return this rank's piece of a whole tensor of `shard.shape` (or of a state shaped like it), as a copy."""
    if shard.dim is None:
        return whole.clone()
    parts = torch.split(whole, list(shard.parts) or [whole.shape[shard.dim]], shard.dim)
    pieces = [
        part.narrow(shard.dim, *shard_range(part.shape[shard.dim], shard.tp_rank, shard.tp_size)) for part in parts
    ]
    return torch.cat(pieces, shard.dim) if len(pieces) > 1 else pieces[0].clone()


def join_shards(pieces: Sequence[torch.Tensor], shard: TpShard) -> torch.Tensor:
    """Return the whole tensor from the pieces of the ranks, in their order: the reverse of `take_shard`."""
    if shard.dim is None:
        return pieces[0].clone()
    parts = shard.parts or (sum(piece.shape[shard.dim] for piece in pieces),)
    parts_by_rank = [
        torch.split(piece, [shard_range(size, rank, shard.tp_size)[1] for size in parts], shard.dim)
        for rank, piece in enumerate(pieces)
    ]
    return torch.cat([piece for part in zip(*parts_by_rank, strict=True) for piece in part], shard.dim)
