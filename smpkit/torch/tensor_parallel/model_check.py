"""Make sure that tensor-parallel ranks take their pieces of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.placement.delayed import is_delayed
from smpkit.torch.placement.shards import shard_of
from smpkit.torch.tensor_parallel.module import global_shape

__all__ = ["ModelComparison", "common_seed", "compare_models"]


def compare_models(root: nn.Module, names: Sequence[str]) -> ModelComparison:
    """Compare this rank's model with those of the other ranks of its tensor-parallel group.

    Without this check, ranks with other seeds would hold pieces of different wholes, and ranks with other models would
    wait for each other.

    Args:
        names: of the modules that tensor parallelism is about to treat.

    Raises:
        UsageError: parameters or those modules differ.
    """
    group = state.process_group(CommGroup.TP_GROUP)
    parameters = [f"parameter {name} {list(global_shape(each))} {each.dtype}" for name, each in root.named_parameters()]
    own_description = [*parameters, *(f"distributed module {name}" for name in names)]
    reports: list[Any] = [None] * state.tp_size
    with waiting("the comparison of models between tensor-parallel ranks", group):
        dist.all_gather_object(reports, (own_description, _checksums(root), torch.initial_seed()), group=group)
    first, first_rank = reports[0][0], dist.get_global_rank(group, 0)
    for rank, (their_description, _, _) in zip(dist.get_process_group_ranks(group), reports, strict=True):
        if their_description != first:
            raise UsageError(
                f"the model differs between ranks {first_rank} and {rank} of a tensor-parallel group:"
                f" {_first_difference(first, their_description)}",
                hint="build the same model on every rank",
            )
    return ModelComparison(all(sums == reports[0][1] for _, sums, _ in reports), reports[0][2])


@dataclass(frozen=True)
class ModelComparison:
    """Which weights the ranks of a tensor-parallel group divide between them.

    Args:
        same_weights: whether all models have equal values, so nothing needs to be sent; else those of tp_rank 0 are
            taken.
        seed: that of tp_rank 0, with which delayed weights are initialised.
    """

    same_weights: bool
    seed: int

    def first(self, whole: torch.Tensor) -> torch.Tensor:
        """Return tp_rank 0's tensor; all ranks of the group call this in the same order."""
        if self.same_weights:
            return whole
        group = state.process_group(CommGroup.TP_GROUP)
        tensor = whole.detach().to(state.device, copy=True).contiguous()
        with waiting("the weights of tp_rank 0", group):
            dist.broadcast(tensor, group=group, group_src=0)
        return tensor


def _first_difference(first: Sequence[str], second: Sequence[str]) -> str:
    for left, right in zip(first, second, strict=False):
        if left != right:
            return f"`{left}` against `{right}`"
    return f"{len(first)} against {len(second)} parameters and distributed modules"


def _checksums(root: nn.Module) -> list[int]:
    """Return a checksum of each parameter; 0 for delayed ones, and for pieces, which differ between the ranks."""
    return [0 if is_delayed(each) or shard_of(each) is not None else _checksum(each) for each in root.parameters()]


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: torch.Tensor) -> int:
    # Of the bits, not the values: NaN is then equal to itself, and the sum is exact in any order.
    bits = tensor.detach().contiguous().view(_INTEGERS[min(tensor.element_size(), 8)])
    return int(bits.sum(dtype=torch.int64))


def common_seed() -> int:
    """Return the seed that the script set on tp_rank 0; all ranks of a tensor-parallel group call this."""
    seeds = [torch.initial_seed()]
    if state.tp_size > 1:
        group = state.process_group(CommGroup.TP_GROUP)
        with waiting("the seed of tp_rank 0", group):
            dist.broadcast_object_list(seeds, group=group, group_src=0)
    return seeds[0]
