"""Make data-parallel replicas equal: check that they are the same model, then copy the first one's values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.deadline import waiting

__all__ = ["broadcast_tensors", "check_same_model"]

CHUNK_BYTES = 64 * 1024 * 1024  # what one broadcast copies at most: bounds the memory that packing needs


def check_same_model(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise on every rank if the replicas of `group` differ in names, shapes, dtypes or trainability.

    Without this check the first differing tensor would end in a hang or in silently mixed weights.

    Raises:
        UsageError: names the first difference and the two ranks.
    """
    lines = _describe(module)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    descriptions: list[list[str] | None] = [None] * len(digests)
    dist.all_gather_object(descriptions, lines, group=group)
    ranks = dist.get_process_group_ranks(group)
    other = next(index for index, each in enumerate(digests) if each != digests[0])
    first, second = descriptions[0] or [], descriptions[other] or []
    raise UsageError(
        f"the model differs between data-parallel ranks {ranks[0]} and {ranks[other]}: "
        f"{_first_difference(first, second)}",
        hint="build the same model on every rank",
    )


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensors` with the values of the rank at index `source` of `group`, in a few large messages."""
    with torch.no_grad():
        for chunk in _chunks(tensors):
            packed = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
            with waiting("the broadcast of parameters and buffers", group):
                dist.broadcast(packed, group=group, group_src=source)
            pieces = torch.split(packed, [tensor.numel() for tensor in chunk])
            for tensor, piece in zip(chunk, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


def _chunks(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
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


def _describe(module: nn.Module) -> list[str]:
    parameters = [
        f"parameter {name} {tuple(param.shape)} {param.dtype}" + ("" if param.requires_grad else " frozen")
        for name, param in module.named_parameters()
    ]
    return parameters + [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()]


def _first_difference(first: Sequence[str], second: Sequence[str]) -> str:
    for left, right in zip(first, second, strict=False):
        if left != right:
            return f"`{left}` against `{right}`"
    return f"{len(first)} against {len(second)} parameters and buffers"
