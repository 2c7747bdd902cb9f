"""What a wrapped model holds on this rank, under the user's own names: parameters, buffers and state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.gathering import merge_everywhere, merge_on_first
from smpkit.torch.partitioning.delayed import fill, is_delayed
from smpkit.torch.state import state

if TYPE_CHECKING:
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
        return (pair for pair in self.module.named_buffers() if pair[1].device.type != "meta")

    def local_modules(self) -> Iterator[nn.Module]:
        return self.module.modules()

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        named: Iterator[tuple[str, nn.Module]] = self.module.named_modules()
        return named

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the whole model's state under the user's names; all ranks of a pipeline call this.

        Args:
            gather_to_rank0: give every rank of the model but the first an empty dict, to save memory.
        """
        whole: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        if self.pipeline is None or not self.partitioned:
            return {} if gather_to_rank0 and state.mp_rank != 0 else whole
        own = {name: value for name, value in whole.items() if name in self._held_names()}
        merged = merge_on_first(own) if gather_to_rank0 else merge_everywhere(own)
        return {name: merged[name] for name in whole if name in merged}

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, plus `_smp_is_partial` = True."""
        held = self._held_names()
        own: dict[str, Any] = {name: value for name, value in self.module.state_dict().items() if name in held}
        return {**own, PARTIAL_KEY: True}

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False, **kwargs: Any
    ) -> Any:
        """Load a full or partial state dict; for a partial one all ranks of a pipeline call this.

        Args:
            strict: raise if names do not match, as `nn.Module.load_state_dict` does.
            same_partition_load: promise that a partial dict comes from this very partition, so it needs no merging.
        """
        values = {name: value for name, value in state_dict.items() if name != PARTIAL_KEY}
        for name, parameter in self.module.named_parameters():
            if is_delayed(parameter) and name in values:
                fill(parameter, values[name])
        if self.pipeline is None:
            return self.module.load_state_dict(values, strict=strict, **kwargs)
        partial = bool(state_dict.get(PARTIAL_KEY))
        if partial and not same_partition_load:
            values = merge_everywhere(values)
        if not self.partitioned:
            return self.module.load_state_dict(
                values, strict=strict and not (partial and same_partition_load), **kwargs
            )
        held = self._held_names()
        if strict:
            self._check_names(values, held if partial and same_partition_load else set(self.module.state_dict()))
        own = {name: value for name, value in values.items() if name in held}
        return self.module.load_state_dict(own, strict=False, **kwargs)

    def _held_names(self) -> set[str]:
        """Return the names of the entries of `state_dict()` that this rank holds."""
        parameters = {name: self.holds(p) for name, p in self.module.named_parameters(remove_duplicate=False)}
        return {
            name
            for name, value in self.module.state_dict().items()
            if parameters.get(name, not isinstance(value, torch.Tensor) or value.device.type != "meta")
        }

    def _check_names(self, values: Mapping[str, Any], expected: set[str]) -> None:
        missing, surplus = sorted(expected - values.keys()), sorted(values.keys() - expected)
        if missing or surplus:
            raise UsageError(
                f"the state dict does not fit the model: missing {missing or 'nothing'}, "
                f"unexpected {surplus or 'nothing'}",
                hint="load it with strict=False to take what fits",
            )

    # --- tensor parallelism: at degree 1 nothing is distributed ---------------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Iterate over the tensor-parallel modules."""
        return iter(())

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        return False

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        return False

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        return False

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters whose gradients are reduced over DP_GROUP."""
        return self.module.named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters whose gradients are reduced over RDP_GROUP."""
        return iter(())

    def holds(self, parameter: nn.Parameter) -> bool:
        """Tell whether this rank holds the data of a parameter."""
        if self.pipeline is None or not self.partitioned:
            return True
        return state.pp_rank in self.pipeline.holders[id(parameter)]
