"""`shard_optimizer_state`: each parameter's optimizer state on one of the ranks that hold the parameter, its owner.

::

    backward           gradients of a parameter ──reduce──► its owner; the other ranks drop theirs
    optimizer.step()   the owner updates; the others see no gradient, so they make no state
                       new values ──broadcast──► all that hold the parameter

Together that moves as many bytes as an all-reduce of gradients does. Parameters stay whole tensors with an owner each,
dealt out so that all ranks own about as many bytes; the user's optimizer keeps its parameter groups as they are, so
schedulers and settings per group need to know nothing of this.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from smpkit.torch.data_parallel.buckets import ReduceTarget
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.placement.placement import ParameterPlacement

__all__ = ["Zero1Partition", "reduce_target_of"]

_CHUNK_BYTES = 25 * 1024 * 1024
_CHUNKS_IN_FLIGHT = 4  # bounds the memory that packing needs


def reduce_target_of(placement: ParameterPlacement) -> ReduceTarget:
    """Return where a parameter's gradient goes."""
    owner = None if placement.owner is None else placement.reduce_ranks.index(placement.owner)
    return ReduceTarget(placement.reduce_group, owner)


class Zero1Partition:
    """Lets the owner of each parameter alone update it, and gives the result to the others.

    Args:
        placements: of this rank's parameters; in the same order on all ranks that hold the same.
    """

    def __init__(self, placements: Iterable[ParameterPlacement]) -> None:
        self._placements = [each for each in placements if each.owner is not None]

    @contextlib.contextmanager
    def hide_unowned_gradients(self) -> Iterator[None]:
        """Hide gradients of parameters that others own: the optimizer would make states for them."""
        hidden = [(each.parameter, each.parameter.grad) for each in self._placements if not each.is_owned_here]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    @torch.no_grad()
    def broadcast_updated(self) -> None:
        """Broadcast each updated parameter from its owner; every rank calls this, after a step."""
        pending: deque[_PendingBroadcast] = deque()
        for chunk in self._chunks():
            if len(pending) == _CHUNKS_IN_FLIGHT:  # before the next is packed
                pending.popleft().finish()
            pending.append(_PendingBroadcast.start(chunk, reduce_target_of(chunk[0])))
        for pending_broadcast in pending:
            pending_broadcast.finish()

    def _chunks(self) -> list[list[ParameterPlacement]]:
        """Group parameters into broadcasts: equal ones in the same order on all ranks, or these would deadlock."""
        chunks: list[list[ParameterPlacement]] = []
        filled: dict[object, tuple[list[ParameterPlacement], int]] = {}
        for each in self._placements:
            if not each.parameter.requires_grad:
                continue
            key = (each.reduce_ranks, each.owner, each.parameter.dtype, each.parameter.device)
            size = each.parameter.numel() * each.parameter.element_size()
            chunk, used = filled.get(key, ([], 0))
            if not chunk or used + size > _CHUNK_BYTES:
                chunk, used = [], 0
                chunks.append(chunk)
            chunk.append(each)
            filled[key] = (chunk, used + size)
        return chunks


@dataclass
class _PendingBroadcast:
    """A broadcast of packed parameters from their owner, under way."""

    chunk: list[ParameterPlacement]
    target: ReduceTarget
    packed: torch.Tensor
    work: dist.Work

    @classmethod
    def start(cls, chunk: list[ParameterPlacement], target: ReduceTarget) -> _PendingBroadcast:
        assert target.group is not None
        assert target.owner is not None
        if target.owner == dist.get_rank(target.group):
            packed = torch.cat([each.parameter.detach().reshape(-1) for each in chunk])
        else:
            packed = chunk[0].parameter.new_empty(sum(each.parameter.numel() for each in chunk))
        work = dist.broadcast(packed, group=target.group, group_src=target.owner, async_op=True)
        assert work is not None
        return cls(chunk, target, packed, work)

    def finish(self) -> None:
        assert self.target.group is not None
        with waiting("the updated parameters of another rank", self.target.group):
            self.work.wait()
        if self.target.owner == dist.get_rank(self.target.group):
            return
        pieces = torch.split(self.packed, [each.parameter.numel() for each in self.chunk])
        # Into the same memory: the model, gradients and the optimizer's groups all refer to these objects.
        for each, piece in zip(self.chunk, pieces, strict=True):
            each.parameter.copy_(piece.view(each.parameter.shape))
