"""State dicts of the whole model and optimizer from the parts that ranks hold, and back.

Each kind of parallelism divides a state in its own way, and is undone by a collective of its own::

    pipeline                   a rank has some of the entries         merge_on_all_ranks, whole_value
    tensor parallelism         a rank has a piece of an entry         tensor_parallel.state_dict, to_whole, to_parts
    sharded data parallelism   a rank has a slice of an entry         to_whole, to_parts
    shard_optimizer_state      a rank has some parameters' states     gather_all, gather_owned

`DistributedModel` (model_parts.py) and `DistributedOptimizer` compose them. Optimizer states are those of a torch state
dict: by the number of the parameter in the parameter groups.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import RankType, allgather, recv_from, send
from smpkit.torch.placement.dtensor import distribute_like, full_tensor_of, local_tensor_of
from smpkit.torch.placement.placement import Placement
from smpkit.torch.placement.shards import TpShard, is_tp_shard, shard_of
from smpkit.torch.tensor_parallel.state_dict import join_pieces, shard_value

PARTIAL_KEY = "_smp_is_partial"
"""Marks a state dict that holds only this rank's part; SMP v1 scripts read and write it."""
_PART_KEY: Final = "_smp_part"
"""With sharded data parallelism, which part that is, out of how many: those of other ranks have the same shapes."""
_STAGE_KEY: Final = "_smp_stage"
"""In a part of an optimizer's state over a pipeline: which stage's, of how many. States that are missing begin anew."""
MARKS: Final = {PARTIAL_KEY, _PART_KEY, _STAGE_KEY}

_Key = TypeVar("_Key")


def _own_part() -> dict[str, tuple[int, int]]:
    degree = state.cfg.sharded_data_parallel_degree
    return {_PART_KEY: (state.rdp_rank % degree, degree)} if degree > 1 else {}


def marked(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a state, marked as that."""
    return {**own, PARTIAL_KEY: True, **_own_part()}


def unmarked(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without marks; raise UsageError if it has the parts of another rank's tensors."""
    part, own = state_dict.get(_PART_KEY), _own_part().get(_PART_KEY)
    if part is not None and tuple(part) != own:
        mine = "part {} of {}".format(*own) if own else "the whole of each"
        raise UsageError(
            f"a state dict has part {part[0]} of {part[1]} of the tensors that sharded data parallelism divides, and"
            f" this rank has {mine}",
            hint="let all ranks save their own, `smp.save(..., v3=True)`, or use smp.save_checkpoint, which resumes at"
            " any degrees",
        )
    return {key: value for key, value in state_dict.items() if key not in MARKS}


def stage_mark() -> dict[str, tuple[int, int]]:
    """Return the mark of this rank's part of an optimizer's state."""
    return {_STAGE_KEY: (state.pp_rank, state.pp_size)} if state.pp_size > 1 else {}


def refuse_missing_stages(state_dict: Mapping[str, Any]) -> None:
    """Raise UsageError if the ranks of this pipeline, all of which call this, load some stages' states of several."""
    marks = allgather(state_dict.get(_STAGE_KEY), CommGroup.PP_GROUP)
    stages = {tuple(mark) for mark in marks if mark is not None}
    missing = {number for _, count in stages for number in range(count)} - {number for number, _ in stages}
    if missing:
        raise UsageError(
            f"the optimizer states that the ranks of this pipeline load lack those of stage {min(missing)}: they were"
            f" saved by {max(count for _, count in stages)} stages, and this job has {state.pp_size}",
            hint="resume with the degrees that saved them, or use smp.save_checkpoint, which resumes at any degrees",
        )


def merge_on_all_ranks(part: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """Return the union of the parts of all ranks of this pipeline; all of them call this.

    Where several ranks hold an entry they hold equal ones.
    """
    return {key: value for other in allgather(dict(part), CommGroup.PP_GROUP) for key, value in other.items()}


def with_versions(source: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the versions of modules that a state dict of torch has: some load nothing without them."""
    versioned = OrderedDict(values)
    vars(versioned)["_metadata"] = getattr(source, "_metadata", None)
    return versioned


def tie_of(name: str, value: Any) -> object:
    """Return a key that all names of a tied weight share, on all ranks."""
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
    return {number: entry for states_of_rank in states for number, entry in states_of_rank.items()}


def to_local(states: States) -> dict[int, Any]:
    """Return states with DTensors (of sharded data parallelism) replaced by this rank's parts of them."""
    return {number: {key: local_tensor_of(value) for key, value in entry.items()} for number, entry in states.items()}


def to_whole(states: States, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Return states with whole tensors in place of parts; all ranks of TP_GROUP and of RDP_GROUP call this."""

    def whole(value: Any, shard: TpShard | None) -> Any:
        value = full_tensor_of(value)
        if shard is None or not shard.is_distributed or getattr(value, "shape", None) != shard.local_shape:
            return value
        return join_pieces(value, shard, on_first=False)

    return {
        number: {key: whole(value, shard_of(parameters[number])) for key, value in entry.items()}
        for number, entry in states.items()
    }


def to_parts(states: States, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Return states with this rank's parts in place of whole tensors; what is a part already stays one."""
    return {
        number: {
            key: distribute_like(shard_value(value, shard_of(parameters[number])), parameters[number])
            for key, value in entry.items()
        }
        for number, entry in states.items()
        if number < len(parameters)  # else torch refuses the groups of another model
    }


def gather_all(own: States, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Return the states of all data-parallel ranks, on each of them; all of them call this.

    Of tensor-parallel parameters only the ranks with the same piece are asked: the others have states of other pieces.
    """
    pieces = {number for number, parameter in enumerate(parameters) if is_tp_shard(parameter)}
    ordinary = {number: entry for number, entry in own.items() if number not in pieces}
    states = merge_shards(allgather(ordinary, CommGroup.DP_GROUP))
    if pieces:
        split = {number: entry for number, entry in own.items() if number in pieces}
        states.update(merge_shards(allgather(split, CommGroup.RDP_GROUP)))
    return dict(sorted(states.items()))


def gather_owned(
    states: States, parameters: Sequence[torch.Tensor], owns: Callable[[torch.Tensor], bool]
) -> dict[int, Any]:
    """Return the states of the parameters that this rank owns, from whichever data-parallel rank has them.

    All data-parallel ranks call this.
    """
    owned = {number for number, parameter in enumerate(parameters) if owns(parameter)}
    # First the numbers only: after saving and loading with the same ranks, each has its own states already. All ranks
    # must come to the same decision, because `gather_all` is collective.
    known = set().union(*allgather(set(states), CommGroup.DP_GROUP))
    if any(allgather(bool((owned & known) - set(states)), CommGroup.DP_GROUP)):
        states = gather_all(states, parameters)
    return {number: entry for number, entry in states.items() if number in owned}
