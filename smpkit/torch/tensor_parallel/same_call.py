"""Compare what tensor-parallel ranks are about to do, before their collectives wait for each other.

Ranks that call different steps, or bring batches of different shapes, would meet in exchanges that do not fit. So a
step (and a forward outside any step) begins with one small message: checksums of what is called and with what, and of
the exchanges since the groups were made, which tell of ranks that got out of step in the call before.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.deadline import waiting
from smpkit.torch.pipeline.specs import map_tensors, spec_of
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.collectives import exchanges_made

__all__ = ["SameCall"]

_COMPARED: Final = 3
"""Calls whose values are compared, with `prescaled_batch`: data that is dealt out wrongly differs from the first on."""


class SameCall:
    """Compares calls for one model."""

    def __init__(self) -> None:
        self._num_compared = 0

    def check(self, name: str, mode: str, arguments: Any, number: int = 0) -> int:
        """Raise on all ranks of the group unless they call the same with tensors of the same shapes.

        With `prescaled_batch` the first calls compare values too.

        Args:
            name: of what is called.
            mode: what else decides what will happen: training or not.
            number: any of 63 bits.

        Returns:
            The first rank's `number`.

        Raises:
            UsageError: says what differs, and between which ranks; or that their exchanges before this call differed.
        """
        if state.tp_size == 1:
            return number
        tensors = _tensors_in(arguments)
        told = f"{name} ({mode}) with {', '.join(str(spec_of(tensor)) for tensor in tensors) or 'no tensors'}"
        values = 0
        # Of a pipeline's ranks only the first one's values count.
        if state.cfg.prescaled_batch and state.pp_rank == 0 and self._num_compared < _COMPARED:
            self._num_compared += 1
            values = _checksum(tensors)
        group = state.process_group(CommGroup.TP_GROUP)
        mine = torch.tensor([zlib.crc32(told.encode()), values, exchanges_made(), number], device="cpu")
        if "cpu" not in str(dist.get_backend_config(group)):
            mine = mine.to(state.device)
        everybody = [torch.empty_like(mine) for _ in range(state.tp_size)]
        with waiting(f"the beginning of {name} on tensor-parallel ranks", group):
            dist.all_gather(everybody, mine, group=group)
        calls, checksums, exchanges, numbers = zip(*(each.tolist() for each in everybody), strict=True)
        if other := _other_than_first(exchanges):
            exchanges_made(forget=True)
            raise UsageError(
                f"{_between(other)} made different exchanges before {name}: they took different paths through the model"
                " in the call before, so its results are wrong",
                hint="conditions and random choices in a model's forward must come out alike on all ranks of a"
                " tensor-parallel group",
            )
        if _other_than_first(calls):
            _refuse_calls(told)
        if other := _other_than_first(checksums):
            raise UsageError(
                f"prescaled_batch is on, but {_between(other)} brought different values to {name}",
                hint="feed all ranks of a tensor-parallel group the same batch: shard data by smp.rdp_rank() of"
                " smp.rdp_size(), with one seed for shuffling",
            )
        first: int = numbers[0]
        return first


def _other_than_first(said: Sequence[Any]) -> int:
    """Return the first tensor-parallel rank that said something else than rank 0; 0 if none did."""
    return next((rank for rank, each in enumerate(said) if each != said[0]), 0)


def _between(other: int) -> str:
    first, second = (dist.get_global_rank(state.process_group(CommGroup.TP_GROUP), rank) for rank in (0, other))
    return f"ranks {first} and {second} of a tensor-parallel group"


def _refuse_calls(told: str) -> None:
    group = state.process_group(CommGroup.TP_GROUP)
    everybody: list[Any] = [None] * state.tp_size
    with waiting("what tensor-parallel ranks call", group):
        dist.all_gather_object(everybody, told, group=group)
    other = _other_than_first(everybody)
    raise UsageError(
        f"{_between(other)} are about to do different things: {everybody[0]}, and {everybody[other]}",
        hint="all ranks of a tensor-parallel group make the same calls, with as many samples of the same length:"
        " `drop_last=True`, padding to a fixed length",
    )


def _tensors_in(arguments: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            tensors.append(tensor)
        return tensor

    map_tensors(note, arguments)
    return tensors


def _checksum(tensors: list[torch.Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(raw.numpy().tobytes(), checksum)
    return checksum
