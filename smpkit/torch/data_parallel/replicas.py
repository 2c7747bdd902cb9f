"""Make data-parallel replicas equal: check that they are the same model, then copy the first one's values."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.data_parallel.buckets import chunks_of
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.objects import gather_objects
from smpkit.torch.placement.placement import Placement

__all__ = ["Messages", "broadcast_messages", "broadcast_tensors", "check_same_model", "messages_of"]

Source = tuple[dist.ProcessGroup, int]
"""A group, and the index in it of the rank whose values all get."""
Messages = Sequence[tuple[Source, list[torch.Tensor]]]

_COMPARISON: Final = "the comparison of models"
_MESSAGE_BYTES: Final = 25 * 1024 * 1024
_MESSAGES_IN_FLIGHT: Final = 4  # bounds the memory that packing needs


def check_same_model(module: nn.Module, placement: Placement) -> None:
    """Raise on every data-parallel rank if their models differ in names, shapes, dtypes or trainability.

    Pieces of tensor-parallel parameters are compared among the ranks that hold the same piece. Without this check the
    first differing tensor would end in a hang or in silently mixed weights.

    Raises:
        UsageError: names the first difference and the two ranks.
    """
    pieces, whole = _describe(module, placement)
    _check_same(whole, state.process_group(CommGroup.DP_GROUP))
    if pieces:
        _check_same(pieces, state.process_group(CommGroup.RDP_GROUP))


def _check_same(lines: Sequence[str], group: dist.ProcessGroup) -> None:
    # Hashes first: the lines of a large model are long, and equal nearly always.
    digests = gather_objects(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group, _COMPARISON)
    if len(set(digests)) == 1:
        return
    descriptions = gather_objects(list(lines), group, _COMPARISON)
    ranks = dist.get_process_group_ranks(group)
    other = next(index for index, each in enumerate(digests) if each != digests[0])
    raise UsageError(
        f"the model differs between data-parallel ranks {ranks[0]} and {ranks[other]}: "
        f"{_first_difference(descriptions[0], descriptions[other])}",
        hint="build the same model on every rank",
    )


def broadcast_tensors(tensors: Iterable[tuple[torch.Tensor, Source]], what: str) -> None:
    """Overwrite each tensor by that of the rank at an index of a group, in a few large messages.

    The ranks of a group name its tensors in the same order, or they would wait for each other.

    Args:
        what: they are, for errors.
    """
    broadcast_messages(messages_of(tensors), what)


def messages_of(tensors: Iterable[tuple[torch.Tensor, Source]]) -> Messages:
    """Group tensors into the messages of a broadcast; those that are sent again and again need it once."""
    return chunks_of(tensors, _MESSAGE_BYTES)


@torch.no_grad()
def broadcast_messages(messages: Messages, what: str) -> None:
    """Do what `broadcast_tensors` does, with tensors that `messages_of` has grouped."""
    pending: deque[_PendingBroadcast] = deque()
    for (group, source), chunk in messages:
        if len(pending) == _MESSAGES_IN_FLIGHT:  # before the next is packed
            pending.popleft().finish(what)
        pending.append(_PendingBroadcast.start(chunk, group, source))
    for broadcast in pending:
        broadcast.finish(what)


@dataclass(frozen=True)
class _PendingBroadcast:
    """A broadcast of packed tensors, under way."""

    chunk: list[torch.Tensor]
    group: dist.ProcessGroup
    is_source: bool
    packed: torch.Tensor
    work: dist.Work

    @classmethod
    def start(cls, chunk: list[torch.Tensor], group: dist.ProcessGroup, source: int) -> _PendingBroadcast:
        is_source = source == dist.get_rank(group)
        if is_source:
            packed = torch.cat([each.detach().reshape(-1) for each in chunk])
        else:
            packed = chunk[0].new_empty(sum(each.numel() for each in chunk))
        work = dist.broadcast(packed, group=group, group_src=source, async_op=True)
        assert work is not None
        return cls(chunk, group, is_source, packed, work)

    def finish(self, what: str) -> None:
        with waiting(what, self.group):
            self.work.wait()
        if not self.is_source:
            pieces = torch.split(self.packed, [each.numel() for each in self.chunk])
            # Into the same memory: the model, gradients and the optimizer's groups all refer to these objects.
            for each, piece in zip(self.chunk, pieces, strict=True):
                each.copy_(piece.view(each.shape))


def _describe(module: nn.Module, placement: Placement) -> tuple[list[str], list[str]]:
    """Return lines that describe the pieces of tensor-parallel parameters, and lines for everything else."""
    pieces: list[str] = []
    whole: list[str] = []
    for each in placement:
        param, shard = each.parameter, each.shard
        line = f"parameter {each.name} {tuple(param.shape)} {param.dtype}" + ("" if param.requires_grad else " frozen")
        if shard is not None:
            line += f" of {shard.shape} along {shard.dim} in {shard.parts}, {shard.group.value} x {shard.scale}"
        (pieces if each.is_tp_shard else whole).append(line)
    return pieces, whole + [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]


def _first_difference(first: Sequence[str], second: Sequence[str]) -> str:
    for left, right in zip(first, second, strict=False):
        if left != right:
            return f"`{left}` against `{right}`"
    return f"{len(first)} against {len(second)} parameters and buffers"
