"""Where an operation between units runs: with its parameter, else with its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from smpkit.torch.pipeline.located import StageTensor
from smpkit.torch.pipeline.specs import NON_TENSOR_TYPES, tensors_in

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage import StageContext

__all__ = ["owner_of_operation"]


def owner_of_operation(args: tuple[Any, ...], kwargs: dict[str, Any], stage: StageContext) -> int:
    """Return the owner of a parameter among the arguments, else where most bytes are, and then on the later rank."""
    only = None if kwargs else _only_owner(args)
    if only is not None:
        return only
    weights: dict[int, int] = {}
    for tensor in tensors_in((args, kwargs)):
        if type(tensor) is StageTensor:
            weights[tensor.owner] = weights.get(tensor.owner, 0) + tensor.spec.num_bytes
        elif isinstance(tensor, nn.Parameter) and (owner := stage.owner_of(tensor)) is not None:
            return owner
    return max(weights, key=lambda owner: (weights[owner], owner))


def _only_owner(args: tuple[Any, ...]) -> int | None:
    """Return the one owner of stage tensors among plain numbers, which is what most operations get; else None."""
    owner = None
    for argument in args:
        kind = type(argument)
        if kind is StageTensor and (owner is None or owner == argument.owner):
            owner = argument.owner
        elif kind not in NON_TENSOR_TYPES:
            return None
    return owner
