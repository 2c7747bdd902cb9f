"""Check that tensor-parallel ranks agree: on the model that they divide, and on every call, before a collective blocks.

`compare_models` runs once, when the model is wrapped: ranks with other seeds would hold pieces of different wholes, and
ranks with other models would wait for each other.

`CallConsistencyCheck` runs at the beginning of a step (and of a forward outside any step). Ranks that call different
steps, or bring batches of different shapes, would meet in collectives that do not fit: they would hang, or go on with
wrong values. One small message finds out::

    [ checksum of the call and its shapes | of values | a random number ]

Inside a forward nothing is compared: ranks that branch differently wait in different collectives until the deadline,
whose error names both.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import as_bytes, spec_of, tensors_in
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.objects import gather_objects, object_from
from smpkit.torch.tensor_parallel.module import global_shape

# --- the model --------------------------------------------------------------------------------------------------------


def compare_models(root: nn.Module, names: Sequence[str], fresh: Mapping[str, bool]) -> tuple[int, dict[str, bool]]:
    """Raise unless all ranks of the tensor-parallel group have the same model and are about to treat the same modules.

    Args:
        names: of the modules that tensor parallelism is about to treat.
        fresh: by name, whether those that it replaces get fresh weights, as this rank sees it.

    Returns:
        The seed and `fresh` of the first rank, whose weights become those of all.
    """
    group = state.process_group(CommGroup.TP_GROUP)
    parameters = [
        f"parameter {name} {list(global_shape(param))} {param.dtype}" for name, param in root.named_parameters()
    ]
    description = [*parameters, *(f"distributed module {name}" for name in names)]
    own = description, torch.initial_seed(), dict(fresh)
    reports = gather_objects(own, group, "the comparison of models between tensor-parallel ranks")
    first_rank, (first, seed, first_fresh) = dist.get_global_rank(group, 0), reports[0]
    for rank, (theirs, _, their_fresh) in zip(dist.get_process_group_ranks(group), reports, strict=True):
        if theirs != first:
            pairs = (f"`{left}` against `{right}`" for left, right in zip(first, theirs, strict=False) if left != right)
            lengths = f"{len(first)} against {len(theirs)} parameters and distributed modules"
            raise UsageError(
                f"the model differs between ranks {first_rank} and {rank} of a tensor-parallel group:"
                f" {next(pairs, lengths)}",
                hint="build the same model on every rank",
            )
        for name, is_fresh in first_fresh.items():
            if is_fresh and not their_fresh[name]:
                raise UsageError(
                    f"weights were loaded into `{name or 'the model'}` on rank {rank}, but not on rank {first_rank},"
                    " whose weights become those of the tensor-parallel group",
                    hint="load them on every rank, or after smp.DistributedModel",
                )
    return seed, first_fresh


def weights_of_first_rank(whole: torch.Tensor) -> torch.Tensor:
    """Return tp_rank 0's tensor; all ranks of the group call this in the same order."""
    if state.tp_size == 1:
        return whole
    group = state.process_group(CommGroup.TP_GROUP)
    tensor = whole.detach().to(state.device, copy=True).contiguous()
    with waiting("the weights of tp_rank 0", group):
        dist.broadcast(tensor, group=group, group_src=0)
    return tensor.to(whole.device)


def common_seed() -> int:
    """Return the seed that the script set on tp_rank 0; all ranks of a tensor-parallel group call this."""
    seed = torch.initial_seed()
    if state.tp_size == 1:
        return seed
    return object_from(0, seed, state.process_group(CommGroup.TP_GROUP), "the seed of tp_rank 0")


# --- a call -----------------------------------------------------------------------------------------------------------


_NUM_VALUE_CHECKS: Final = 3
"""How many calls have their values compared, with `prescaled_batch`: wrongly sharded data differs from the first on."""


class CallConsistencyCheck:
    """Compares calls for one model."""

    def __init__(self) -> None:
        self._num_value_checks = 0

    def check(self, name: str, mode: str, arguments: Any, number: int = 0) -> int:
        """Raise on all ranks of the group unless they call the same with tensors of the same shapes.

        With `prescaled_batch` the first calls compare values, too. Returns the first rank's `number`, of 63 bits.
        """
        if state.tp_size == 1:
            return number
        tensors = [tensor for tensor in tensors_in(arguments) if not isinstance(tensor, nn.Parameter)]
        description = f"{name} ({mode}) with {', '.join(str(spec_of(tensor)) for tensor in tensors) or 'no tensors'}"
        values = 0
        # The other ranks of a pipeline get their batch from pp_rank 0.
        if state.cfg.prescaled_batch and state.pp_rank == 0 and self._num_value_checks < _NUM_VALUE_CHECKS:
            self._num_value_checks += 1
            for tensor in tensors:
                values = zlib.crc32(as_bytes(tensor.detach().cpu().contiguous()).numpy().data, values)
        group = state.process_group(CommGroup.TP_GROUP)
        # On the host where the group can send from there, so that no GPU is waited for.
        own = torch.tensor([zlib.crc32(description.encode()), values, number], device="cpu")
        if "cpu" not in str(dist.get_backend_config(group)):
            own = own.to(state.device)
        by_rank = [torch.empty_like(own) for _ in range(state.tp_size)]
        with waiting(f"the beginning of {name} on tensor-parallel ranks", group):
            dist.all_gather(by_rank, own, group=group)
        calls, checksums, numbers = zip(*(row.tolist() for row in by_rank), strict=True)
        ranks = dist.get_process_group_ranks(group)
        if len(set(calls)) > 1:
            texts = gather_objects(description, group, "what tensor-parallel ranks call")
            other = _first_other(texts)
            raise UsageError(
                f"ranks {ranks[0]} and {ranks[other]} of a tensor-parallel group are about to do different things:"
                f" {texts[0]}, and {texts[other]}",
                hint="all ranks of a tensor-parallel group make the same calls, with as many samples of the same"
                " length: `drop_last=True`, padding to a fixed length",
            )
        if len(set(checksums)) > 1:
            raise UsageError(
                f"prescaled_batch is on, but ranks {ranks[0]} and {ranks[_first_other(checksums)]} of a tensor-parallel"
                f" group brought different values to {name}",
                hint="feed all ranks of a tensor-parallel group the same batch: shard data by smp.rdp_rank() of"
                " smp.rdp_size(), with one seed for shuffling",
            )
        first: int = numbers[0]
        return first


def _first_other(by_tp_rank: Sequence[Any]) -> int:
    """Return the first tensor-parallel rank whose value is not that of rank 0."""
    return next(rank for rank, value in enumerate(by_tp_rank) if value != by_tp_rank[0])
