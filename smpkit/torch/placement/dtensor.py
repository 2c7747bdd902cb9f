"""DTensors of sharded data parallelism: this rank's part, the whole, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Tell whether something is a DTensor."""
    # Without importing its module, which takes a second: before somebody else has, there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(module, "DTensor", ()))


def local_tensor_of(value: Any) -> Any:
    """Return this rank's part of a DTensor, as a plain tensor; anything else as it is."""
    # Only DTensors have this method. Asking for it is quicker than asking for the class, on the optimizer's way.
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()


def full_tensor_of(value: Any) -> Any:
    """Return the whole of a DTensor, which all ranks of its mesh call this for; anything else as it is."""
    return value.full_tensor() if is_dtensor(value) else value


def distribute_like(value: Any, parameter: torch.Tensor) -> Any:
    """Return a plain tensor (the whole, or this rank's part) as a DTensor like a parameter; anything else as it is."""
    if not is_dtensor(parameter) or not isinstance(value, torch.Tensor) or is_dtensor(value):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if value.shape == parameter.shape:
        # `src_data_rank=None`: every rank has the whole, so each takes its part and nothing is broadcast.
        return distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    # Not numbers, such as step counts, which are the same on every rank.
    if value.shape == parameter.to_local().shape and value.ndim:
        return DTensor.from_local(
            value.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,  # would compare with the other ranks, which need not call this together
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return value


def distribute_state(values: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return a state dict of whole tensors, or this rank's parts, with DTensors where the module has them."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: distribute_like(value, parameters[name]) if name in parameters else value
        for name, value in values.items()
    }
