"""Put optimizer states that ranks keep in shards together, and take them apart again.

With `shard_optimizer_state` a rank has the states of some parameters, with sharded data parallelism a part of each.

States are those of a torch state dict: by the number of the parameter in the parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from smpkit.torch.comm import CommGroup, RankType, allgather, recv_from, send
from smpkit.torch.sharded_tensors import distribute_like, full_tensor_of, local_tensor_of
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.shards import shard_of

__all__ = ["gather_all", "gather_by_rdp_rank", "gather_owned", "merge_shards", "to_full", "to_local", "to_shards"]

States = Mapping[int, Any]


def gather_by_rdp_rank(own: States) -> States | list[States]:
    """Return the states of all exact replicas, by rdp_rank, on the first of them, and `own` on the others.

    That is SMP v1's layout of `local_state_dict()`; all ranks of RDP_GROUP call this.
    """
    if state.rdp_rank > 0:
        send(own, 0, RankType.RDP_RANK)
        return own
    return [own, *(recv_from(rank, RankType.RDP_RANK) for rank in range(1, state.rdp_size))]


def merge_shards(states: States | Sequence[States]) -> dict[int, Any]:
    """Return states that may be a list by rdp_rank as one mapping."""
    if isinstance(states, Mapping):
        return dict(states)
    return {number: entry for each in states for number, entry in each.items()}


def to_local(states: States) -> dict[int, Any]:
    """Return states with this rank's parts of tensors that sharded data parallelism divides."""
    return _map_values(states, local_tensor_of)


def to_full(states: States) -> dict[int, Any]:
    """Return states with the wholes of such tensors; all ranks of RDP_GROUP call this."""
    return _map_values(states, full_tensor_of)


def to_shards(states: States, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Return states of wholes or of this rank's parts as sharded data parallelism divides the parameters."""
    return {
        number: {key: distribute_like(value, parameters[number]) for key, value in entry.items()}
        for number, entry in states.items()
    }


def _map_values(states: States, function: Callable[[Any], Any]) -> dict[int, Any]:
    return {number: {key: function(value) for key, value in entry.items()} for number, entry in states.items()}


def gather_all(own: States, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Return the states that all data-parallel ranks keep, on each of them; all of them call this.

    Of tensor-parallel parameters these are the states of this rank's pieces.
    """
    pieces = {number for number, each in enumerate(parameters) if _is_tp_shard(each)}
    ordinary = {number: entry for number, entry in own.items() if number not in pieces}
    found = merge_shards(allgather(ordinary, CommGroup.DP_GROUP))
    if pieces:
        split = {number: entry for number, entry in own.items() if number in pieces}
        found.update(merge_shards(allgather(split, CommGroup.RDP_GROUP)))
    return dict(sorted(found.items()))


def gather_owned(
    states: States, parameters: Sequence[torch.Tensor], owns: Callable[[torch.Tensor], bool]
) -> dict[int, Any]:
    """Return the states of the parameters that this rank owns, from whatever data-parallel rank has them.

    All of them call this. Where each has its own, as after saving and loading with the same ranks, nothing but lists of
    numbers travel.
    """
    owned = {number for number, each in enumerate(parameters) if owns(each)}
    known = set().union(*allgather(set(states), CommGroup.DP_GROUP))
    if any(allgather(bool((owned & known) - set(states)), CommGroup.DP_GROUP)):
        states = gather_all(states, parameters)
    return {number: entry for number, entry in states.items() if number in owned}


def _is_tp_shard(parameter: torch.Tensor) -> bool:
    shard = shard_of(parameter)
    return shard is not None and shard.is_distributed
