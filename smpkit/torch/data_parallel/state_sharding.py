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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from smpkit.torch.data_parallel.buckets import ReduceTarget
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.placement.placement import ParameterPlacement

__all__ = ["Zero1Partition"]

_CHUNK_BYTES = 25 * 1024 * 1024
_CHUNKS_IN_FLIGHT = 4  # bounds the memory that packing needs


class Zero1Partition:
    """Assigns each parameter an owner among the ranks that hold it.

    Args:
        placements: of this rank's parameters; in the same order on all ranks that hold the same, which must come to
            the same owners without a message.
    """

    def __init__(self, placements: Sequence[ParameterPlacement]) -> None:
        self._placements = list(placements)
        self._owners = _assign_owners(self._placements)
        groups = {id(each.parameter): each.reduce_group for each in self._placements}
        self._owned = {id_ for id_, owner in self._owners.items() if owner == dist.get_rank(groups[id_])}

    def reduce_target_of(self, placement: ParameterPlacement) -> ReduceTarget:
        """Return where a parameter's gradient goes."""
        return ReduceTarget(placement.reduce_group, self._owners.get(id(placement.parameter)))

    def owns(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank keeps the optimizer state of a parameter that it holds."""
        return id(parameter) in self._owned or id(parameter) not in self._owners

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Tell whether several ranks share the states of parameters like this one."""
        return id(parameter) in self._owners

    @contextlib.contextmanager
    def hide_unowned_gradients(self) -> Iterator[None]:
        """Hide gradients of parameters that others own: the optimizer would make states for them."""
        hidden = [(each.parameter, each.parameter.grad) for each in self._placements if not self.owns(each.parameter)]
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
            pending.append(_PendingBroadcast.start(chunk, self.reduce_target_of(chunk[0])))
        for pending_broadcast in pending:
            pending_broadcast.finish()

    def _chunks(self) -> list[list[ParameterPlacement]]:
        """Group parameters into broadcasts: equal ones in the same order on all ranks, or these would deadlock."""
        chunks: list[list[ParameterPlacement]] = []
        filled: dict[object, tuple[list[ParameterPlacement], int]] = {}
        for each in self._placements:
            target = self.reduce_target_of(each)
            if target.owner is None or not each.parameter.requires_grad:
                continue
            key = (target, each.parameter.dtype, each.parameter.device)
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


def _assign_owners(placements: Sequence[ParameterPlacement]) -> dict[int, int]:
    """Return the owner of each parameter (by its id), as an index in the group that averages its gradient.

    The largest parameter first, each to the rank that owns the fewest bytes: no rank then owns more than the mean and
    one parameter.
    """
    owners: dict[int, int] = {}
    bytes_owned: dict[tuple[dist.ProcessGroup, bool], list[int]] = {}
    for each in sorted(
        placements, key=lambda each: each.parameter.numel() * each.parameter.element_size(), reverse=True
    ):
        if each.reduce_group is None:
            continue
        # Frozen parameters are counted apart: they have no state, and would leave those that have to few ranks.
        key = (each.reduce_group, each.parameter.requires_grad)
        owned = bytes_owned.setdefault(key, [0] * dist.get_world_size(each.reduce_group))
        owner = owned.index(min(owned))
        owned[owner] += each.parameter.numel() * each.parameter.element_size()
        owners[id(each.parameter)] = owner
    return owners
