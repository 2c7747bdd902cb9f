"""Where an operation between units runs: with its parameter, else with its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from smpkit.torch.pipeline.located import Located
from smpkit.torch.pipeline.specs import PLAIN, tensors_in

if TYPE_CHECKING:
    from smpkit.torch.pipeline.stage import Stage

__all__ = ["home_of_operation"]


def home_of_operation(args: tuple[Any, ...], kwargs: dict[str, Any], stage: Stage) -> int:
    """Return the home of a parameter among the arguments, else where most bytes are, and then on the later rank."""
    only = None if kwargs else _only_home(args)
    if only is not None:
        return only
    weights: dict[int, int] = {}
    for tensor in tensors_in((args, kwargs)):
        if type(tensor) is Located:
            weights[tensor.home] = weights.get(tensor.home, 0) + tensor.spec.num_bytes
        elif isinstance(tensor, nn.Parameter) and (home := stage.owner_of(tensor)) is not None:
            return home
    return max(weights, key=lambda home: (weights[home], home))


def _only_home(args: tuple[Any, ...]) -> int | None:
    """Return the one home of located values among plain numbers, which is what most operations get; else None."""
    home = None
    for argument in args:
        kind = type(argument)
        if kind is Located and (home is None or home == argument.home):
            home = argument.home
        elif kind not in PLAIN:
            return None
    return home
