"""State dicts of the whole model and optimizer from the parts that ranks hold, and back.

Each kind of parallelism divides a state in its own way, and is undone by a collective of its own::

    pipeline                   a rank has some of the entries         merge_on_all_ranks, whole_value
    tensor parallelism         a rank has a piece of an entry         tensor_parallel.state_dict
    sharded data parallelism   a rank has a slice of an entry         to_full, to_shards
    shard_optimizer_state      a rank has some parameters' states     gather_all, gather_owned

The functions of the model's state are the inside of `DistributedModel`'s methods of the same names; those of the
optimizer's are what `DistributedOptimizer` composes. Optimizer states are those of a torch state dict: by the number of
the parameter in the parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import CommGroup, RankType, allgather, recv_from, send
from smpkit.torch.placement.delayed import is_delayed, set_delayed_value
from smpkit.torch.placement.dtensor import distribute_like, distribute_state, full_tensor_of, local_tensor_of
from smpkit.torch.placement.placement import Placement
from smpkit.torch.placement.shards import is_tp_shard, shard_of
from smpkit.torch.tensor_parallel.state_dict import (
    join_pieces,
    join_state,
    shard_state,
    shards_in,
    with_distributed_names,
)

__all__ = [
    "PARTIAL_KEY",
    "full_model_state",
    "gather_all",
    "gather_by_rdp_rank",
    "gather_owned",
    "load_model_state",
    "local_state_names",
    "merge_on_all_ranks",
    "merge_shards",
    "runs_here",
    "tie_of",
    "to_full",
    "to_local",
    "to_shards",
    "whole_value",
]

PARTIAL_KEY = "_smp_is_partial"
"""Marks a state dict that holds only this rank's part; SMP v1 scripts read and write it."""

_Key = TypeVar("_Key")


def merge_on_all_ranks(part: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """Return the union of the parts of all ranks of this pipeline; all of them call this.

    Where several ranks hold an entry they hold equal ones.
    """
    merged: dict[_Key, Any] = {}
    for each in allgather(dict(part), CommGroup.PP_GROUP):
        merged.update(each)
    return merged


# --- The state of the model -------------------------------------------------------------------------------------------


def local_state_names(module: nn.Module, placement: Placement) -> set[str]:
    """Return the names of the entries of `module.state_dict()` that this rank holds."""
    named = module.named_parameters(remove_duplicate=False)
    held_parameters = {name: placement.of(each).is_here for name, each in named}
    return {
        name
        for name, value in module.state_dict().items()
        if (held_parameters[name] if name in held_parameters else runs_here(name, value, placement))
    }


def runs_here(name: str, value: Any, placement: Placement) -> bool:
    """Tell whether a buffer (or extra state) is this rank's: its data are here, and its module runs here."""
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return False
    return placement.running_pp_rank_of(name.rpartition(".")[0]) in (None, state.pp_rank)


def full_model_state(
    module: nn.Module,
    local: dict[str, Any],
    held: AbstractSet[str] | None,
    placement: Placement,
    *,
    prefix: str,
    gather_to_rank0: bool,
) -> dict[str, Any]:
    """Return the whole model's state, in the order of `local`; all ranks that hold a model call this.

    Args:
        local: what `module.state_dict(prefix=prefix)` returns on this rank.
        held: the names, without `prefix`, of the entries that this rank holds; None if those are all.
        gather_to_rank0: return an empty dict on every rank of the model but the first.
    """
    if gather_to_rank0:
        return _gather_on_first_rank(module, local, placement, prefix=prefix)
    if state.cfg.sharded_data_parallel_degree > 1:
        local = {name: full_tensor_of(value) for name, value in local.items()}
    merged = local
    if held is not None:
        held_keys = {prefix + name for name in held}
        merged = {name: value for name, value in local.items() if name in held_keys}
    # Tensor-parallel pieces first: their group lies on one pipeline rank, which alone knows how to join them.
    if state.tp_size > 1:
        merged = join_state(module, merged, prefix=prefix)
    if held is not None:
        merged = merge_on_all_ranks(merged)
    return {name: merged[name] for name in local if name in merged}


def _gather_on_first_rank(
    module: nn.Module, local: Mapping[str, Any], placement: Placement, *, prefix: str
) -> dict[str, Any]:
    """Return the whole model's state on its first rank, and an empty dict on the others, one entry after the other."""
    own = module.state_dict(keep_vars=True)
    keeps = state.mp_rank == 0 and (state.cfg.sharded_data_parallel_degree == 1 or state.rdp_rank == 0)
    whole: dict[str, Any] = {}
    first: dict[object, str] = {}
    for name in local:
        value = own[name.removeprefix(prefix)]
        known = first.setdefault(tie_of(name, value), name)  # tied weights come once, and stay one
        found = whole.get(known) if known != name else whole_value(name.removeprefix(prefix), value, placement)
        if keeps and not (isinstance(found, torch.Tensor) and found.device.type == "meta"):
            whole[name] = local[name] if found is value else found
    return whole


def tie_of(name: str, value: Any) -> object:
    """Return what the names of a tied weight have in common, on all ranks."""
    # Only parameters stay the objects that they are when a pipeline takes the model apart.
    return id(value) if isinstance(value, nn.Parameter) else name


def whole_value(name: str, value: Any, placement: Placement) -> Any:
    """Return one whole entry of a model's state on the first rank of the model; what the others get has no meaning.

    All ranks of the model call this for the same entries in the same order; with sharded data parallelism, those of all
    its replicas.

    Args:
        name, value: of `module.state_dict(keep_vars=True)`.
    """
    if isinstance(value, nn.Parameter):
        source = placement.of(value).first_pp_rank
    else:
        source = placement.running_pp_rank_of(name.rpartition(".")[0]) or 0
    if state.pp_rank == source:
        original, value = value, full_tensor_of(value)
        if state.cfg.sharded_data_parallel_degree > 1 and state.rdp_rank > 0:
            return None  # it has taken part in gathering
        shard = shard_of(original) if isinstance(original, torch.Tensor) else None
        if shard is not None and shard.is_distributed:
            value = join_pieces(value.detach(), shard, on_first=True)
    if source > 0 and state.tp_rank == 0 and (state.cfg.sharded_data_parallel_degree == 1 or state.rdp_rank == 0):
        if state.pp_rank == source:
            send(value.detach() if isinstance(value, torch.Tensor) else value, 0, RankType.PP_RANK)
        elif state.pp_rank == 0:
            value = recv_from(source, RankType.PP_RANK)
    return value


def load_model_state(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    held: AbstractSet[str] | None,
    *,
    strict: bool,
    same_partition_load: bool,
    has_pipeline: bool,
    **options: Any,
) -> Any:
    """Load a full or partial state dict into the part of `module` that this rank holds.

    Args:
        held: the names of the entries that this rank holds; None if those are all.
        strict, same_partition_load: those of `DistributedModel.load_state_dict`.
        has_pipeline: whether there are other parts, on other pipeline ranks or here after the first step.
        options: go to `module.load_state_dict`, whose result is returned.

    Raises:
        UsageError: with `strict`, names of a partitioned model do not match.
    """
    values = {name: value for name, value in state_dict.items() if name != PARTIAL_KEY}
    is_partial = bool(state_dict.get(PARTIAL_KEY))
    if PARTIAL_KEY not in state_dict:  # what `state_dict()` returned has the distributed names already
        values = with_distributed_names(module, values, set(module.state_dict()) if held is None else set(held))
    if has_pipeline and is_partial and not same_partition_load:
        values = merge_on_all_ranks(values)
    if held is not None:
        if strict:
            expected = held if is_partial and same_partition_load else set(module.state_dict())
            _check_names(values.keys(), expected)
        # Also another rank's buffers that are here: in a module that is not called, code between units uses them.
        live = {name for name, each in module.named_buffers(remove_duplicate=False) if each.device.type != "meta"}
        values = {name: value for name, value in values.items() if name in held or name in live}
    # What is left are wholes, or this rank's own pieces: tensor parallelism takes its piece, then delayed parameters
    # get their memory, then sharded data parallelism takes its slice. The last looks at tensors that must exist.
    values = shard_state(values, shards_in(module))
    for name, parameter in module.named_parameters():
        if is_delayed(parameter) and name in values:
            set_delayed_value(parameter, values[name])
    values = distribute_state(values, module)
    # Torch would miss the entries of other ranks; where that is so, names have been checked above, or cannot be.
    lacks_entries = held is not None or (has_pipeline and is_partial and same_partition_load)
    return module.load_state_dict(values, strict=strict and not lacks_entries, **options)


def _check_names(found: AbstractSet[str], expected: AbstractSet[str]) -> None:
    missing, surplus = sorted(expected - found), sorted(found - expected)
    if missing or surplus:
        raise UsageError(
            f"the state dict does not fit the model: missing {missing or 'nothing'}, unexpected {surplus or 'nothing'}",
            hint="load it with strict=False to take what fits",
        )


# --- The state of the optimizer ---------------------------------------------------------------------------------------


States = Mapping[int, Any]


def gather_by_rdp_rank(own: States) -> States | list[States]:
    """Return the states of all exact replicas, by rdp_rank, on the first of them, and `own` on the others.

    That is SMP v1's layout of `local_state_dict()`; all ranks of RDP_GROUP call this.
    """
    # Messages to the first rank, not an all-gather: the others have no use for all states, and no memory to spare.
    if state.rdp_rank > 0:
        send(own, 0, RankType.RDP_RANK)
        return own
    return [own, *(recv_from(rank, RankType.RDP_RANK) for rank in range(1, state.rdp_size))]


def merge_shards(states: States | Sequence[States]) -> dict[int, Any]:
    """Return one mapping of states that may be a list of them, by rdp_rank."""
    if isinstance(states, Mapping):
        return dict(states)
    return {number: entry for each in states for number, entry in each.items()}


def to_local(states: States) -> dict[int, Any]:
    """Return states with DTensors (of sharded data parallelism) replaced by this rank's parts of them."""
    return _map_values(states, local_tensor_of)


def to_full(states: States) -> dict[int, Any]:
    """Return states with DTensors replaced by the whole tensors; all ranks of RDP_GROUP call this."""
    return _map_values(states, full_tensor_of)


def to_shards(states: States, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Return states with whole tensors, or this rank's parts, replaced by DTensors divided as the parameters are."""
    return {
        number: {key: distribute_like(value, parameters[number]) for key, value in entry.items()}
        for number, entry in states.items()
    }


def _map_values(states: States, function: Callable[[Any], Any]) -> dict[int, Any]:
    return {number: {key: function(value) for key, value in entry.items()} for number, entry in states.items()}


def gather_all(own: States, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Return the states of all data-parallel ranks, on each of them; all of them call this.

    Of tensor-parallel parameters only the ranks with the same piece are asked: the others have states of other pieces.
    """
    pieces = {number for number, each in enumerate(parameters) if is_tp_shard(each)}
    ordinary = {number: entry for number, entry in own.items() if number not in pieces}
    found = merge_shards(allgather(ordinary, CommGroup.DP_GROUP))
    if pieces:
        split = {number: entry for number, entry in own.items() if number in pieces}
        found.update(merge_shards(allgather(split, CommGroup.RDP_GROUP)))
    return dict(sorted(found.items()))


def gather_owned(
    states: States, parameters: Sequence[torch.Tensor], owns: Callable[[torch.Tensor], bool]
) -> dict[int, Any]:
    """Return the states of the parameters that this rank owns, from whichever data-parallel rank has them.

    All data-parallel ranks call this.
    """
    owned = {number for number, each in enumerate(parameters) if owns(each)}
    # First the numbers only: after saving and loading with the same ranks, each has its own states already. All ranks
    # must come to the same decision, because `gather_all` is collective.
    known = set().union(*allgather(set(states), CommGroup.DP_GROUP))
    if any(allgather(bool((owned & known) - set(states)), CommGroup.DP_GROUP)):
        states = gather_all(states, parameters)
    return {number: entry for number, entry in states.items() if number in owned}
