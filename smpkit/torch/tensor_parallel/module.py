"""`smp.nn.DistributedModule`: the base of all modules whose weights lie on several tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.placement.delayed import is_delayed, set_delayed_value
from smpkit.torch.placement.shards import assignment_refusal, shard_of, take_shard
from smpkit.torch.tensor_parallel.layouts import Layout, default_layout


class DistributedModule(nn.Module):
    """A module that the ranks of a tensor-parallel group hold and compute together (the class of that name in SMP v1).

    Sizes given to constructors are those of the whole module; parameters are this rank's pieces, each with a mark that
    `shard_of` returns. All ranks of the group call the module together, with values of the same shape.

    Args:
        boundary: what the values that it takes and returns are; None for what the configuration says.
    """

    initializes_shards: ClassVar[bool] = True
    """Whether `reset_parameters()` makes this rank's pieces; delayed initialisation then calls only that."""
    options: ClassVar[tuple[str, ...]] = ()
    """What the constructor takes as `**options`."""

    def __init__(self, *, boundary: Layout | None = None) -> None:
        super().__init__()
        self.boundary = default_layout() if boundary is None else boundary
        self.register_load_state_dict_pre_hook(_refuse_assignment)  # type: ignore[no-untyped-call]

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's piece of every parameter and saved buffer from the state dict of the whole module.

        Raises:
            UsageError: a name is missing or unknown, or a shape is not that of the whole tensor.
        """
        own = named_tensors(self)
        loaded = {id(own[name]) for name in state if name in own}
        problems = [f"`{name}` is missing" for name, tensor in own.items() if id(tensor) not in loaded]
        problems += [f"`{name}` is unknown" for name in state if name not in own]
        problems += [
            f"`{name}` is {list(whole.shape)}, not {list(global_shape(own[name]))}"
            for name, whole in state.items()
            if name in own and whole.shape != global_shape(own[name])
        ]
        if problems:
            raise UsageError(f"this is not the state of a whole {type(self).__name__}: {'; '.join(problems)}")
        for name, whole in state.items():
            load_shard(own[name], whole)


def global_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape that a local parameter has in the whole model."""
    shard = shard_of(tensor)
    return tensor.shape if shard is None else torch.Size(shard.shape)


def load_shard(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Give a local parameter its piece of the whole one, and memory if it has none yet."""
    shard = shard_of(tensor)
    piece = whole if shard is None else take_shard(whole, shard)
    if isinstance(tensor, nn.Parameter) and is_delayed(tensor):
        set_delayed_value(tensor, piece)
        return
    with torch.no_grad():
        tensor.copy_(piece)


def initialize_shard(parameter: nn.Parameter, initialize: Callable[[torch.Tensor], object]) -> None:
    """Initialise a local parameter as this rank's piece of a whole one.

    Ranks that draw the same random numbers then hold pieces of the same whole: one seed gives one model at every
    degree.
    """
    if is_delayed(parameter):
        return
    shard = shard_of(parameter)
    with torch.no_grad():
        if shard is None or not shard.is_distributed:
            initialize(parameter)
            return
        whole = torch.empty(shard.shape, dtype=parameter.dtype, device=parameter.device)
        initialize(whole)
        parameter.copy_(take_shard(whole, shard))


def _refuse_assignment(_module: nn.Module, _state: Any, _prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    # Marks are attributes of parameters. The new ones would be reduced and saved as if each rank had the whole.
    if metadata.get("assign_to_params_buffers"):
        raise assignment_refusal()


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and saved buffers of a module by name, tied ones under all of theirs."""
    entries = module.state_dict(keep_vars=True)
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
