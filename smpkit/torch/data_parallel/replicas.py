"""Make data-parallel replicas equal: check that they are the same model, then copy the first one's values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.placement.placement import Placement

__all__ = ["broadcast_tensors", "check_same_model"]

_Value = TypeVar("_Value")

CHUNK_BYTES = 64 * 1024 * 1024  # of one broadcast, at most: bounds the memory that packing needs


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
    digests = _all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
    if len(set(digests)) == 1:
        return
    descriptions = _all_gather_object(list(lines), group)
    ranks = dist.get_process_group_ranks(group)
    other = next(index for index, each in enumerate(digests) if each != digests[0])
    raise UsageError(
        f"the model differs between data-parallel ranks {ranks[0]} and {ranks[other]}: "
        f"{_first_difference(descriptions[0], descriptions[other])}",
        hint="build the same model on every rank",
    )


def _all_gather_object(value: _Value, group: dist.ProcessGroup) -> list[_Value]:
    values: list[Any] = [None] * dist.get_world_size(group)
    with waiting("the comparison of models", group):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensors` with the values of the rank at index `source` of `group`, in a few large messages."""
    with torch.no_grad():
        for chunk in _fill_chunks(tensors):
            packed = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
            with waiting("the broadcast of parameters and buffers", group):
                dist.broadcast(packed, group=group, group_src=source)
            pieces = torch.split(packed, [tensor.numel() for tensor in chunk])
            for tensor, piece in zip(chunk, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


def _fill_chunks(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    chunks: list[list[torch.Tensor]] = []
    filled: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        chunk, used = filled.get(key, ([], 0))
        if not chunk or used + size > CHUNK_BYTES:
            chunk, used = [], 0
            chunks.append(chunk)
        chunk.append(tensor)
        filled[key] = (chunk, used + size)
    return chunks


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
