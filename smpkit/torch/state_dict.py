"""Put the parts of a state dict that the ranks of a pipeline hold together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import CommGroup, RankType, allgather, recv_from, send
from smpkit.torch.placement.delayed import is_delayed, run_deferred_loads, set_delayed_value
from smpkit.torch.placement.dtensor import distribute_like, distribute_state, full_tensor_of, local_tensor_of
from smpkit.torch.placement.placement import pp_rank_of, running_pp_rank_of
from smpkit.torch.placement.shards import assignment_refusal, shard_of
from smpkit.torch.tensor_parallel.module import DistributedModule
from smpkit.torch.tensor_parallel.state_dict import (
    join_state,
    shard_state,
    shards_in,
    with_distributed_names,
    with_original_names,
)

if TYPE_CHECKING:
    from smpkit.torch.data_parallel.data_parallel import DataParallel
    from smpkit.torch.pipeline.pipeline import Pipeline

__all__ = [
    "PARTIAL_KEY",
    "ModelState",
    "gather_all",
    "gather_by_rdp_rank",
    "gather_owned",
    "merge_on_all_ranks",
    "merge_on_first_rank",
    "merge_shards",
    "to_full",
    "to_local",
    "to_shards",
]

_Key = TypeVar("_Key")


def merge_on_all_ranks(part: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """Return the union of the parts of all ranks of this pipeline; all of them call this.

    Where several ranks hold an entry they hold equal ones.
    """
    merged: dict[_Key, Any] = {}
    for each in allgather(dict(part), CommGroup.PP_GROUP):
        merged.update(each)
    return merged


def merge_on_first_rank(part: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """Return the union on pp_rank 0 and an empty dict on the others, which never see more than their own part."""
    if state.pp_rank > 0:
        send(dict(part), 0, RankType.PP_RANK)
        return {}
    merged = dict(part)
    for rank in range(1, state.pp_size):
        merged.update(recv_from(rank, RankType.PP_RANK))
    return merged


# --- Put optimizer states that ranks keep in shards together, and take them apart again -------------------------------
# With `shard_optimizer_state` a rank has the states of some parameters, with sharded data parallelism a part of each.
#
# States are those of a torch state dict: by the number of the parameter in the parameter groups.


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


# --- What a wrapped model holds on this rank, under the user's own names: parameters, buffers and state dicts ---------


PARTIAL_KEY = "_smp_is_partial"
"""Marks a state dict that holds only this rank's part; SMP v1 scripts read and write it."""


class ModelState(nn.Module):
    """The half of `DistributedModel` that answers for what is where.

    `module` is the user's model, `pipeline` what spreads it over ranks (None at degree 1), and `partitioned` tells
    whether that has happened.
    """

    module: nn.Module
    pipeline: Pipeline | None
    data_parallel: DataParallel | None
    partitioned: bool

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that this rank holds."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (pair for pair in self.module.named_parameters() if self.holds(pair[1]))

    def local_buffers(self) -> Iterator[torch.Tensor]:
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (pair for pair in self.module.named_buffers() if self._holds_buffer(*pair))

    def local_modules(self) -> Iterator[nn.Module]:
        """Iterate over the modules that this rank holds, and those above them."""
        return (module for _, module in self.local_named_modules())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules that this rank holds, and those above them, with their names."""
        assignment = None if self.pipeline is None else self.pipeline.assignment
        placement = {} if assignment is None else assignment.partition_of
        return (
            (name, module)
            for name, module in self.module.named_modules()
            if pp_rank_of(name, placement) in (None, state.pp_rank)
        )

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the whole model's state under the names of its modules; all ranks that hold a model call this.

        Modules that tensor parallelism has replaced have names of their own: `original_state_dict` gives the user's.

        Args:
            gather_to_rank0: give every rank of the model but the first an empty dict, to save memory.
        """
        run_deferred_loads()
        whole: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        if state.cfg.sharded_data_parallel_degree > 1:
            keeps = not gather_to_rank0 or state.rdp_rank == 0
            whole = {
                name: value for name, each in whole.items() if (value := full_tensor_of(each)) is not None and keeps
            }
            if not keeps:  # nor do the others of this replica
                return {}
        prefix: str = kwargs.get("prefix", "")
        is_partitioned = self.pipeline is not None and self.partitioned
        if is_partitioned:
            held = {prefix + name for name in self._held_names()}
            merged = {name: value for name, value in whole.items() if name in held}
        else:
            merged = whole
        if state.tp_size > 1:
            merged = join_state(self.module, merged, prefix=prefix, on_first=gather_to_rank0)
            if gather_to_rank0 and state.tp_rank > 0:
                return {}
        if is_partitioned:
            merged = merge_on_first_rank(merged) if gather_to_rank0 else merge_on_all_ranks(merged)
        if gather_to_rank0 and state.mp_rank != 0:
            return {}
        return {name: merged[name] for name in whole if name in merged}

    def original_state_dict(self, *, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Return the whole model's state under the names it had before tensor parallelism replaced modules.

        Parts whose translation is not known keep the names of `state_dict()`. All ranks that hold a model call this.

        Args:
            gather_to_rank0: as for `state_dict`.
        """
        return with_original_names(self.module, self.state_dict(gather_to_rank0=gather_to_rank0))

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, plus `_smp_is_partial` = True."""
        run_deferred_loads()
        held = self._held_names()
        own = {name: local_tensor_of(value) for name, value in self.module.state_dict().items() if name in held}
        return {**own, PARTIAL_KEY: True}

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False, **kwargs: Any
    ) -> Any:
        """Load a full or partial state dict; for a partial one all ranks of a pipeline call this.

        Of whole tensors each rank takes its piece. A full dict under the names that modules had before tensor
        parallelism replaced them is translated, unless it has the key `_smp_is_partial`.

        Args:
            strict: raise if names do not match, as `nn.Module.load_state_dict` does.
            same_partition_load: promise that a partial dict comes from this very partition, so it needs no merging.

        Raises:
            UnsupportedError: with `assign=True`, which would put tensors in the place of parameters that the optimizer
                and data parallelism know.
        """
        if kwargs.get("assign"):
            raise assignment_refusal()
        run_deferred_loads()
        values = {name: value for name, value in state_dict.items() if name != PARTIAL_KEY}
        partial = bool(state_dict.get(PARTIAL_KEY))
        is_partitioned = self.pipeline is not None and self.partitioned
        held = self._held_names() if is_partitioned else set(self.module.state_dict())
        if PARTIAL_KEY not in state_dict:
            values = with_distributed_names(self.module, values, held)
        if self.pipeline is not None and partial and not same_partition_load:
            values = merge_on_all_ranks(values)
        if is_partitioned:
            if strict:
                self._check_names(values, held if partial and same_partition_load else set(self.module.state_dict()))
            values = {name: value for name, value in values.items() if name in held}
        values = shard_state(values, shards_in(self.module))
        for name, parameter in self.module.named_parameters():
            if is_delayed(parameter) and name in values:
                set_delayed_value(parameter, values[name])
        values = distribute_state(values, self.module)
        parts = self.pipeline is not None and partial and same_partition_load
        return self.module.load_state_dict(values, strict=strict and not (is_partitioned or parts), **kwargs)

    def _held_names(self) -> set[str]:
        """Return the names of the entries of `state_dict()` that this rank holds."""
        parameters = {name: self.holds(p) for name, p in self.module.named_parameters(remove_duplicate=False)}
        return {
            name
            for name, value in self.module.state_dict().items()
            if (parameters[name] if name in parameters else self._holds_buffer(name, value))
        }

    def _holds_buffer(self, name: str, value: Any) -> bool:
        """Tell whether a buffer (or extra state) is this rank's: its data are here, and its module runs here."""
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            return False
        assignment = None if self.pipeline is None else self.pipeline.assignment
        if assignment is None:
            return True
        return running_pp_rank_of(name.rpartition(".")[0], assignment.partition_of) in (None, state.pp_rank)

    def _check_names(self, values: Mapping[str, Any], expected: set[str]) -> None:
        missing, surplus = sorted(expected - values.keys()), sorted(values.keys() - expected)
        if missing or surplus:
            raise UsageError(
                f"the state dict does not fit the model: missing {missing or 'nothing'}, "
                f"unexpected {surplus or 'nothing'}",
                hint="load it with strict=False to take what fits",
            )

    # --- tensor parallelism --------------------------------------------------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Iterate over the tensor-parallel modules."""
        return (module for module in self.module.modules() if isinstance(module, DistributedModule))

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter is this rank's piece of a larger one."""
        return _is_distributed(parameter)

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Tell whether a buffer is this rank's piece of a larger one."""
        return _is_distributed(buffer)

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Tell whether one backward gives a parameter the samples of all tensor-parallel ranks."""
        return _sees_scaled_batch(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Tell whether a buffer sees the samples of all tensor-parallel ranks."""
        return _sees_scaled_batch(buffer)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters whose gradients are reduced over DP_GROUP."""
        return (pair for pair in self.module.named_parameters() if not _sees_scaled_batch(pair[1]))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters whose gradients are reduced over RDP_GROUP."""
        return (pair for pair in self.module.named_parameters() if _sees_scaled_batch(pair[1]))

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank holds the data of a parameter."""
        if self.pipeline is None or not self.partitioned:
            return True
        return state.pp_rank in self.pipeline.holders[id(parameter)]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank keeps the optimizer's state of a parameter, or would."""
        zero1 = None if self.data_parallel is None else self.data_parallel.zero1
        return self.holds(parameter) and (zero1 is None or zero1.owns(parameter))

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters whose optimizer state this rank keeps.

        With `shard_optimizer_state` these are the parameters that this rank owns, whole; else all that it holds.
        """
        return (pair for pair in self.local_named_parameters() if self.owns(pair[1]))


def _is_distributed(tensor: torch.Tensor) -> bool:
    shard = shard_of(tensor)
    return shard is not None and shard.is_distributed


def _sees_scaled_batch(tensor: torch.Tensor) -> bool:
    shard = shard_of(tensor)
    return shard is not None and shard.sees_scaled_batch
