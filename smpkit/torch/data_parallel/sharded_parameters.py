"""What scripts write and read about the parameters that sharded data parallelism divides.

They name with `smp.register_parameter` those that are used outside of the modules that own them, and read attributes
as SMP v1 and DeepSpeed name them: `ds_id`, `ds_shape` and `ds_numel` are of the whole parameter; `ds_tensor` is this
rank's part of it, with `ds_numel`. All are for reading: they show what `fully_shard` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.dtensor import local_tensor_of

_MARK: Final = "_smp_used_outside"


def register_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Say that a module uses a parameter of another module, whose forward comes first.

    With `sharded_data_parallel_degree` a block is gathered before its own forward. The one that owns the parameter then
    stays gathered from its forward to its backward. Parameters outside of repeated layers are gathered all the time,
    and need it not. Call it before `smp.DistributedModel` or afterwards.

    Args:
        module: what uses the parameter.
        param: the parameter, also one of `module` itself.

    Raises:
        UsageError: these are no module and no parameter.
    """
    arguments: tuple[Any, Any] = (module, param)
    if not (isinstance(arguments[0], nn.Module) and isinstance(arguments[1], nn.Parameter)):
        raise UsageError(
            f"register_parameter got `{type(module).__name__}` and `{type(param).__name__}`",
            hint="give it an nn.Module and an nn.Parameter",
        )
    setattr(param, _MARK, True)
    if state.model is not None and state.cfg.sharded_data_parallel_degree > 1:
        state.model.data_parallel.keep_gathered(param)


def is_registered(param: nn.Parameter) -> bool:
    """Return whether a parameter is used outside of the module that owns it."""
    return hasattr(param, _MARK)


class ShardView:
    """The part of a parameter that this rank holds, as it is now: `fully_shard` may replace the tensor behind it.

    Torch's functions take it for that tensor, without its graph.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    @property
    def ds_numel(self) -> int:
        """How many elements this rank holds."""
        return int(local_tensor_of(self._parameter).numel())

    def __getattr__(self, name: str) -> Any:
        return getattr(_part_of(self), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*map(_part_of, args), **{name: _part_of(value) for name, value in (kwargs or {}).items()})


def _part_of(value: Any) -> Any:
    return local_tensor_of(value._parameter).detach() if isinstance(value, ShardView) else value


def set_shard_attributes(parameters: Iterable[nn.Parameter]) -> None:
    """Give divided parameters the attributes; `ds_id` counts them from 0."""
    for number, parameter in enumerate(parameters):
        vars(parameter).update(
            ds_id=number, ds_shape=parameter.shape, ds_numel=parameter.numel(), ds_tensor=ShardView(parameter)
        )


def flat_shards(groups: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return, for each parameter group, a copy of this rank's parts one after the other, float32 [elements]."""
    empty = torch.empty(0, device="cpu")
    return [
        torch.cat([local_tensor_of(parameter).detach().float().reshape(-1) for parameter in group]) if group else empty
        for group in groups
    ]
