"""Attributes of divided parameters that scripts for sharded data parallelism read, as SMP v1 and DeepSpeed name them.

`ds_id`, `ds_shape` and `ds_numel` are of the whole parameter; `ds_tensor` is this rank's part of it, with `ds_numel`.
All are for reading: they show what `fully_shard` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from smpkit.torch.placement.dtensor import local_tensor_of

__all__ = ["ShardView", "flat_shards", "set_shard_attributes"]


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
        torch.cat([local_tensor_of(each).detach().float().reshape(-1) for each in group]) if group else empty
        for group in groups
    ]
