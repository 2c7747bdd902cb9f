"""Where parameters are placed: one record for each, which whoever reduces, updates, counts or saves it reads.

`Placement` has them by parameter. It is made when the model is wrapped, and anew where that is not final: when a
pipeline applies its assignment at the first step (`keep_local_parameters`: each rank keeps the weights of its own
units, and those that several ranks use), and when sharded data parallelism has put parts in the place of parameters.
Without any parallelism the records say the trivial thing. Who has a part in what::

    parameter                        replica ranks               reduce ranks               gradient scale
    ordinary                         DP_GROUP                    DP_GROUP                   1
    piece of a tensor-parallel one   RDP_GROUP                   RDP_GROUP                  TpShard.scale
    whole, beside such pieces        DP_GROUP                    TpShard.group              TpShard.scale
    on several pipeline ranks        the same on each of them    the same, of all of them   how many ranks of one
                                                                                            pipeline hold it

A parameter on several pipeline ranks gets a part of its gradient on each, and the whole is their sum: the scale takes
back the division of the average by the number of these ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smpkit.plan.mesh import Mesh
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.init import extra_group
from smpkit.torch.placement.delayed import initialize
from smpkit.torch.placement.dtensor import is_dtensor
from smpkit.torch.placement.shards import TpShard, copy_mark_to, shard_of


def keep_local_parameters(root: nn.Module, placement: Placement, device: torch.device, seed: int) -> None:
    """Move what this rank holds to its device, and free the memory of everything else."""
    initialize(root, [record.parameter for record in placement.local], device, seed)
    for record in placement:
        parameter = record.parameter
        if record.is_here:
            parameter.data = parameter.data.to(device)
        else:
            # The object stays, with its shape: an optimizer that was made earlier holds it. Its values are one element
            # of NaN, so that using it by mistake shows, on the device: models ask a parameter where to make masks.
            filler = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
            parameter.data = torch.full((), filler, dtype=parameter.dtype, device=device).expand(parameter.shape)
    for module, names in names_by_module(root).items():
        is_here = any(placement.pp_rank_of(name) in (None, state.pp_rank) for name in names)
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


@dataclass(frozen=True, eq=False)
class ParameterPlacement:
    """The place of one parameter, seen from this rank; groups of ranks are those that it would have if it were here.

    Args:
        name: in the model; empty for a tensor that is no parameter of it.
        pp_ranks: the pipeline ranks that hold it.
        shard: its place in the whole one under tensor parallelism; None for an ordinary one.
        holders: the ranks that have the same part of it.
        replica_ranks: those of them that data parallelism keeps equal; this rank alone where there are no others.
        reduce_ranks: the ranks that average its gradient; this rank alone where there is nothing to average.
        owner: the rank that keeps its optimizer state, where `shard_optimizer_state` gives it to one; else None.
    """

    name: str
    parameter: nn.Parameter
    pp_ranks: frozenset[int]
    shard: TpShard | None
    holders: frozenset[int]
    replica_ranks: tuple[int, ...]
    reduce_ranks: tuple[int, ...]
    owner: int | None = None

    @functools.cached_property
    def is_here(self) -> bool:
        """Whether this rank holds it."""
        return state.pp_rank in self.pp_ranks

    @property
    def first_pp_rank(self) -> int:
        """The pipeline rank that stands for all that hold it."""
        return min(self.pp_ranks)

    @property
    def is_tp_shard(self) -> bool:
        """Whether the tensor-parallel ranks hold different values."""
        return self.shard is not None and self.shard.is_distributed

    @property
    def grad_scale(self) -> float:
        """What every gradient is multiplied by as it arises."""
        return len(self.pp_ranks) * (1.0 if self.shard is None else self.shard.scale)

    @functools.cached_property
    def is_owned_here(self) -> bool:
        """Whether this rank keeps its optimizer state, or would."""
        return self.is_here and self.owner in (None, state.rank)

    @property
    def state_holders(self) -> frozenset[int]:
        """The ranks that keep the same optimizer state of it."""
        return self.holders if self.owner is None else frozenset({self.owner})

    @functools.cached_property
    def is_counted_here(self) -> bool:
        """Whether this rank counts its gradient in the norm of the model's, of all ranks that have the same one."""
        is_first_of_tp = self.is_tp_shard or state.tp_rank == 0
        if self.owner is not None:
            # Each group that averages a gradient has an owner. In RDP_GROUP that is one on every tensor-parallel rank,
            # which for a whole parameter have the same gradient; in DP_GROUP it is one over all of them.
            is_one_of_many = self.shard is not None and self.shard.sees_scaled_batch
            return self.owner == state.rank and (is_first_of_tp or not is_one_of_many)
        degree = state.cfg.sharded_data_parallel_degree
        # Every sharding group has the whole model: the first one counts, and its first rank what is not divided.
        if degree > 1 and state.rdp_rank >= (degree if is_dtensor(self.parameter) else 1):
            return False
        return is_first_of_tp and state.pp_rank == self.first_pp_rank

    @functools.cached_property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The group of `replica_ranks`, after `Placement.make_groups`; None where this rank is alone."""
        return extra_group(self.replica_ranks) if len(self.replica_ranks) > 1 else None

    @functools.cached_property
    def reduce_group(self) -> dist.ProcessGroup | None:
        """The group of `reduce_ranks`, after `Placement.make_groups`; None where this rank is alone."""
        return extra_group(self.reduce_ranks) if len(self.reduce_ranks) > 1 else None


class Placement:
    """The records of all parameters of `root`, in its order, of other ranks' too; and which rank has which module.

    Args:
        pp_rank_of_unit: the assignment of a pipeline; None where every pipeline rank holds the whole model, as it does
            until the first step.
    """

    def __init__(self, root: nn.Module, pp_rank_of_unit: Mapping[str, int] | None = None) -> None:
        self._pp_rank_of_unit = pp_rank_of_unit or {}
        everywhere = frozenset(range(state.pp_size))
        on_units = {} if pp_rank_of_unit is None else pp_ranks_by_parameter(root, pp_rank_of_unit)
        records = [_record(name, p, on_units.get(id(p), everywhere)) for name, p in root.named_parameters()]
        shards_states = state.cfg.ddp and state.cfg.shard_optimizer_state
        is_final = pp_rank_of_unit is not None or state.pp_size == 1
        owners = _assign_owners([record for record in records if record.is_here]) if shards_states and is_final else {}
        # The records hold the parameters, so no other object gets one of these ids.
        self._by_id = {id(record.parameter): replace(record, owner=owners.get(record.name)) for record in records}
        # A tensor that the script has added since is this rank's own.
        self._pp_ranks_of_others = everywhere if pp_rank_of_unit is None else frozenset({state.pp_rank})

    def __iter__(self) -> Iterator[ParameterPlacement]:
        return iter(self._by_id.values())

    def __contains__(self, value: object) -> bool:
        return id(value) in self._by_id

    @property
    def local(self) -> list[ParameterPlacement]:
        """The records of the parameters that this rank holds."""
        return [record for record in self if record.is_here]

    def of(self, value: Any) -> ParameterPlacement:
        """Return the record of a parameter; for anything else, one that says what is known of any tensor."""
        record = self._by_id.get(id(value))
        return _record("", value, self._pp_ranks_of_others) if record is None else record

    def pp_rank_of(self, module: str) -> int | None:
        """Return the pipeline rank that holds a module, by name; None if it lies above the units, or there are none."""
        # A model that is one unit itself has the name "".
        return self._pp_rank_of_unit.get(enclosing_unit(module, self._pp_rank_of_unit) or "")

    def running_pp_rank_of(self, module: str) -> int | None:
        """Return the pipeline rank whose calls of a module change its buffers; None if all ranks run it.

        Besides units and what is inside, a module above whose units all lie on one rank runs there alone, and so does
        what it calls. A module without any units is called by the one around it.
        """
        pp_ranks = pp_ranks_of(module, self._pp_rank_of_unit)
        while module and not pp_ranks:
            module = module.rpartition(".")[0]
            pp_ranks = pp_ranks_of(module, self._pp_rank_of_unit)
        return pp_ranks.pop() if len(pp_ranks) == 1 else None

    def make_groups(self) -> None:
        """Make the process groups of this rank's parameters; all ranks call this."""
        # Sorted: making a group is a collective, and ranks that made theirs in different orders would deadlock.
        for ranks in sorted({ranks for record in self.local for ranks in (record.replica_ranks, record.reduce_ranks)}):
            if len(ranks) > 1:
                extra_group(ranks)


def placement_of(tensor: torch.Tensor) -> ParameterPlacement:
    """Return the record of a parameter of the wrapped model; where no model is wrapped, a tensor is this rank's own."""
    model = state.model
    if model is None:
        return _record("", tensor, frozenset({state.pp_rank}))
    record: ParameterPlacement = model.placement.of(tensor)
    return record


@functools.lru_cache(maxsize=1 << 10)
def _ranks_on(mesh: Mesh, own: int, pp_ranks: frozenset[int], any_tp: bool, replica_step: int) -> tuple[int, ...]:
    """Return the global ranks on `pp_ranks`, of rank `own`'s tp_rank or any, in every `replica_step`-th replica."""
    mine = mesh.coordinates(own)
    ranks = []
    for rank in range(mesh.size):
        other = mesh.coordinates(rank)
        is_in_replica = (other.rdp - mine.rdp) % replica_step == 0
        if other.pp in pp_ranks and (any_tp or other.tp == mine.tp) and is_in_replica:
            ranks.append(rank)
    return tuple(ranks)


def _record(name: str, value: Any, pp_ranks: frozenset[int]) -> ParameterPlacement:
    shard, ranks_on = shard_of(value), functools.partial(_ranks_on, state.mesh, state.rank, pp_ranks)
    is_whole = shard is None or not shard.is_distributed
    replica_step = 1 if state.cfg.ddp else state.rdp_size
    replica_ranks = ranks_on(is_whole, replica_step)
    reduce_ranks = ranks_on(shard is None or not shard.sees_scaled_batch, replica_step)
    if is_dtensor(value):  # a part of this rank's, in the same column of sharding groups
        holders = ranks_on(False, state.cfg.sharded_data_parallel_degree)
    else:  # replicas that are not kept equal count as equal, too: a checkpoint has one
        holders = ranks_on(is_whole, 1)
    return ParameterPlacement(name, value, pp_ranks, shard, frozenset(holders), replica_ranks, reduce_ranks)


def pp_ranks_of(module: str, pp_rank_of_unit: Mapping[str, int]) -> set[int]:
    """Return the ranks of a module, by name: that of the unit that it is a part of, or those of all units in it."""
    unit = enclosing_unit(module, pp_rank_of_unit)
    if unit is not None:
        return {pp_rank_of_unit[unit]}
    below = f"{module}." if module else ""
    return {pp_rank for unit, pp_rank in pp_rank_of_unit.items() if unit.startswith(below)}


def enclosing_unit(module: str, units: Container[str]) -> str | None:
    """Return the unit that a module is, or is a part of; all by name."""
    while module:
        if module in units:
            return module
        module = module.rpartition(".")[0]
    return None


def pp_ranks_by_parameter(root: nn.Module, pp_rank_of_unit: Mapping[str, int]) -> dict[int, frozenset[int]]:
    """Return the pipeline ranks of each parameter (its id) of a unit: several, where units on them share it.

    What is in no unit belongs to a module that spans ranks, and is on all.
    """
    pp_ranks: dict[int, frozenset[int]] = {}
    for unit, rank in pp_rank_of_unit.items():
        for parameter in root.get_submodule(unit).parameters():
            pp_ranks[id(parameter)] = pp_ranks.get(id(parameter), frozenset()) | {rank}
    return pp_ranks


def _assign_owners(placements: Iterable[ParameterPlacement]) -> dict[str, int]:
    """Return the owner of each parameter, by name, among the ranks that average its gradient.

    All of them come to the same owners without a message. The largest parameter first, each to the rank that owns the
    fewest bytes: no rank then owns more than the mean and one parameter.
    """
    owners: dict[str, int] = {}
    bytes_owned: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for record in sorted(placements, key=_whole_bytes, reverse=True):
        ranks = record.reduce_ranks
        if len(ranks) == 1:
            continue
        # Frozen parameters are counted apart: they have no state, and would leave those that have to few ranks.
        owned = bytes_owned.setdefault((ranks, record.parameter.requires_grad), [0] * len(ranks))
        index = owned.index(min(owned))
        owned[index] += _whole_bytes(record)
        owners[record.name] = ranks[index]
    return owners


def _whole_bytes(placement: ParameterPlacement) -> int:
    """Return the size of a parameter; of a piece, that of the whole, so that all pieces of one have owners alike."""
    shape = placement.parameter.shape if placement.shard is None else placement.shard.shape
    return math.prod(shape) * placement.parameter.element_size()
