"""Which ranks hold a parameter, and which of them average its gradient.

::

    parameter                        held by (equal values)      gradient averaged over     then multiplied by
    ordinary                         DP_GROUP                    DP_GROUP                   1
    piece of a tensor-parallel one   RDP_GROUP                   RDP_GROUP                  Shard.scale
    whole, beside such pieces        DP_GROUP                    Shard.group                Shard.scale
    on several pipeline ranks        the same on each of them    the same, of all of them   how many ranks of one
                                                                                            pipeline hold it

A parameter on several pipeline ranks gets a part of its gradient on each; the whole is their sum, so what the average
divides by too much is multiplied again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from smpkit.plan.mesh import CommGroup
from smpkit.torch.initialize import extra_group
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.shards import shard_of

__all__ = ["Held", "find_held"]


@dataclass(frozen=True)
class Held:
    """A parameter that this rank holds.

    Args:
        copies: the ranks that hold equal values; None where no other does.
        averaged: the ranks that average its gradient; None where there is nothing to average.
        pp_ranks: the pipeline ranks that hold it.
        factor: what every gradient is multiplied by as it arises.
    """

    name: str
    parameter: nn.Parameter
    copies: dist.ProcessGroup | None
    averaged: dist.ProcessGroup | None
    pp_ranks: frozenset[int]
    factor: float

    @property
    def is_piece(self) -> bool:
        """Whether the tensor-parallel ranks hold different values."""
        shard = shard_of(self.parameter)
        return shard is not None and shard.is_distributed


def find_held(module: nn.Module, holders: Mapping[int, frozenset[int]]) -> list[Held]:
    """Return this rank's parameters, in the module's order; all ranks call this.

    Args:
        holders: the pipeline ranks that hold each parameter (by its id); empty without a pipeline.
    """
    alone = frozenset({state.pp_rank})
    named = [(name, each, holders.get(id(each), alone)) for name, each in module.named_parameters()]
    mine = [(name, each, pp_ranks) for name, each, pp_ranks in named if state.pp_rank in pp_ranks]
    wanted = {(pp_ranks, kind) for _, each, pp_ranks in mine for kind in (_held_by(each), _averaged_by(each))}
    groups = _make_groups(wanted)
    held = []
    for name, each, pp_ranks in mine:
        shard = shard_of(each)
        factor = len(pp_ranks) * (1.0 if shard is None else shard.scale)
        copies, averaged = groups[pp_ranks, _held_by(each)], groups[pp_ranks, _averaged_by(each)]
        held.append(Held(name, each, copies, averaged, pp_ranks, factor))
    return held


def _held_by(parameter: nn.Parameter) -> CommGroup:
    shard = shard_of(parameter)
    return CommGroup.RDP_GROUP if shard is not None and shard.is_distributed else CommGroup.DP_GROUP


def _averaged_by(parameter: nn.Parameter) -> CommGroup:
    shard = shard_of(parameter)
    return CommGroup.DP_GROUP if shard is None else shard.group


_Key = tuple[frozenset[int], CommGroup]


def _make_groups(wanted: set[_Key]) -> dict[_Key, dist.ProcessGroup | None]:
    """Make the process groups, in an order that no two ranks see differently, or they would wait for each other."""
    groups: dict[_Key, dist.ProcessGroup | None] = {}
    for key in sorted(wanted, key=lambda key: (sorted(key[0]), key[1].value)):
        ranks = _members(*key)
        groups[key] = extra_group(ranks) if len(ranks) > 1 else None
    return groups


def _members(pp_ranks: frozenset[int], kind: CommGroup) -> tuple[int, ...]:
    """Return the global ranks, of those on `pp_ranks`, that are in this rank's group of a kind, or would be there."""
    mine = state.mesh.coordinates(state.rank)
    members = []
    for rank in range(state.size):
        place = state.mesh.coordinates(rank)
        same_tp, same_rdp = place.tp == mine.tp, place.rdp == mine.rdp
        if not state.cfg.ddp:
            included = same_tp and same_rdp
        else:
            included = same_tp or kind is CommGroup.DP_GROUP
        if included and place.pp in pp_ranks:
            members.append(rank)
    return tuple(members)
