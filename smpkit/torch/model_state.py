"""What a wrapped model holds on this rank, under the user's own names: parameters, buffers and state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.attributes import assignment_refusal
from smpkit.torch.gathering import merge_on_all_ranks, merge_on_first_rank
from smpkit.torch.partitioning.apply import pp_rank_of, running_pp_rank_of
from smpkit.torch.partitioning.delayed import is_delayed, set_delayed_value
from smpkit.torch.sharded_tensors import distribute_state, full_tensor_of, local_tensor_of
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.module import DistributedModule
from smpkit.torch.tensor_parallel.shards import shard_of
from smpkit.torch.tensor_parallel.whole_state import (
    join_state,
    shard_state,
    shards_in,
    with_distributed_names,
    with_original_names,
)
from smpkit.torch.unread import run_deferred_loads

if TYPE_CHECKING:
    from smpkit.torch.data_parallel import DataParallel
    from smpkit.torch.pipeline.pipeline import Pipeline

__all__ = ["PARTIAL_KEY", "ModelState"]

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
