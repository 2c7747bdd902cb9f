"""Where parameters are placed: which ranks hold each, and which of these average its gradient.

The ranks of a pipeline first apply an assignment (`keep_local_parameters`): each keeps the weights of its own units,
and those that several ranks use. Then `place_parameters` returns for every parameter that a rank holds::

    parameter                        replica group               reduce group               gradient scale
    ordinary                         DP_GROUP                    DP_GROUP                   1
    piece of a tensor-parallel one   RDP_GROUP                   RDP_GROUP                  TpShard.scale
    whole, beside such pieces        DP_GROUP                    TpShard.group              TpShard.scale
    on several pipeline ranks        the same on each of them    the same, of all of them   how many ranks of one
                                                                                            pipeline hold it

A parameter on several pipeline ranks gets a part of its gradient on each, and the whole is their sum: the scale takes
back the division of the average by the number of these ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.init import extra_group
from smpkit.torch.placement.delayed import initialize
from smpkit.torch.placement.shards import copy_mark_to, is_tp_shard, shard_of

__all__ = [
    "ParameterPlacement",
    "holders_of",
    "keep_local_parameters",
    "names_by_module",
    "place_parameters",
    "pp_rank_of",
    "running_pp_rank_of",
]


def holders_of(root: nn.Module, placement: Mapping[str, int], size: int) -> dict[int, frozenset[int]]:
    """Return, by parameter (its id), the pipeline ranks that hold it.

    A parameter of one unit is on one rank; one that several units share is on each of theirs; one that belongs to a
    module that spans ranks is on all.
    """
    holders: dict[int, frozenset[int]] = {}
    for unit, rank in placement.items():
        for parameter in root.get_submodule(unit).parameters():
            holders[id(parameter)] = holders.get(id(parameter), frozenset()) | {rank}
    for parameter in root.parameters():
        holders.setdefault(id(parameter), frozenset(range(size)))
    return holders


def keep_local_parameters(
    root: nn.Module,
    placement: Mapping[str, int],
    holders: Mapping[int, frozenset[int]],
    rank: int,
    device: torch.device,
) -> None:
    """Move what this rank holds to its device, and free the memory of everything else."""
    held = [parameter for parameter in root.parameters() if rank in holders[id(parameter)]]
    initialize(root, held, device, torch.initial_seed())
    for parameter in root.parameters():
        if rank in holders[id(parameter)]:
            parameter.data = parameter.data.to(device)
        else:
            # The object stays, with its shape: an optimizer that was made earlier holds it. Its values are one element
            # of NaN, so that using it by mistake shows.
            filler = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
            parameter.data = torch.full((), filler, dtype=parameter.dtype, device=parameter.device).expand(
                parameter.shape
            )
    for module, names in names_by_module(root).items():
        is_here = any(pp_rank_of(name, placement) in (None, rank) for name in names)
        target = device if is_here else torch.device("meta")
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.device != target:
                module._buffers[key] = copy_mark_to(buffer.to(target), buffer)


def names_by_module(root: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module with all of its names: layers on several ranks may share one."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def pp_rank_of(name: str, placement: Mapping[str, int]) -> int | None:
    """Return the rank that holds a module; None if it lies above those that are placed."""
    while True:
        if name in placement:
            return placement[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def running_pp_rank_of(name: str, placement: Mapping[str, int]) -> int | None:
    """Return the rank whose calls of a module change its buffers; None if all ranks run it.

    Besides what is placed, a module above whose placed parts all lie on one rank runs there alone.
    """
    pp_rank = pp_rank_of(name, placement)
    if pp_rank is not None:
        return pp_rank
    below = f"{name}." if name else ""
    pp_ranks = {rank for unit, rank in placement.items() if unit.startswith(below)}
    return pp_ranks.pop() if len(pp_ranks) == 1 else None


@dataclass(frozen=True)
class ParameterPlacement:
    """A parameter that this rank holds.

    Args:
        replica_group: the ranks that hold equal values; None where no other does.
        reduce_group: the ranks that average its gradient; None where there is nothing to average.
        pp_ranks: the pipeline ranks that hold it.
        grad_scale: what every gradient is multiplied by as it arises.
    """

    name: str
    parameter: nn.Parameter
    replica_group: dist.ProcessGroup | None
    reduce_group: dist.ProcessGroup | None
    pp_ranks: frozenset[int]
    grad_scale: float

    @property
    def is_tp_shard(self) -> bool:
        """Whether the tensor-parallel ranks hold different values."""
        return is_tp_shard(self.parameter)


def place_parameters(module: nn.Module, holders: Mapping[int, frozenset[int]]) -> list[ParameterPlacement]:
    """Return this rank's parameters, in the module's order; all ranks call this.

    Args:
        holders: the pipeline ranks that hold each parameter (by its id); empty without a pipeline.
    """
    alone = frozenset({state.pp_rank})
    named = [(name, each, holders.get(id(each), alone)) for name, each in module.named_parameters()]
    local = [(name, each, pp_ranks) for name, each, pp_ranks in named if state.pp_rank in pp_ranks]
    needed_groups: set[_GroupKey] = set()
    for _, each, pp_ranks in local:
        needed_groups |= {(pp_ranks, _replica_group_kind(each)), (pp_ranks, _reduce_group_kind(each))}
    groups = _make_groups(needed_groups)
    placements = []
    for name, each, pp_ranks in local:
        shard = shard_of(each)
        grad_scale = len(pp_ranks) * (1.0 if shard is None else shard.scale)
        replica_group = groups[pp_ranks, _replica_group_kind(each)]
        reduce_group = groups[pp_ranks, _reduce_group_kind(each)]
        placements.append(ParameterPlacement(name, each, replica_group, reduce_group, pp_ranks, grad_scale))
    return placements


def _replica_group_kind(parameter: nn.Parameter) -> CommGroup:
    return CommGroup.RDP_GROUP if is_tp_shard(parameter) else CommGroup.DP_GROUP


def _reduce_group_kind(parameter: nn.Parameter) -> CommGroup:
    shard = shard_of(parameter)
    return CommGroup.DP_GROUP if shard is None else shard.group


_GroupKey = tuple[frozenset[int], CommGroup]


def _make_groups(needed_groups: set[_GroupKey]) -> dict[_GroupKey, dist.ProcessGroup | None]:
    groups: dict[_GroupKey, dist.ProcessGroup | None] = {}
    # Sorted: making a group is a collective, and ranks that made theirs in different orders would deadlock.
    for key in sorted(needed_groups, key=lambda key: (sorted(key[0]), key[1].value)):
        ranks = _members(*key)
        groups[key] = extra_group(ranks) if len(ranks) > 1 else None
    return groups


def _members(pp_ranks: frozenset[int], kind: CommGroup) -> tuple[int, ...]:
    """Return the global ranks on `pp_ranks` that a group of this kind has, seen from this rank's tp and rdp rank."""
    local = state.mesh.coordinates(state.rank)
    members = []
    for rank in range(state.size):
        position = state.mesh.coordinates(rank)
        same_tp, same_rdp = position.tp == local.tp, position.rdp == local.rdp
        if not state.cfg.ddp:
            included = same_tp and same_rdp
        else:
            included = same_tp or kind is CommGroup.DP_GROUP
        if included and position.pp in pp_ranks:
            members.append(rank)
    return tuple(members)
