"""Apex's mixed precision: its decorators do nothing without `initialize`, and that and all else is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from smpkit.drop_in.removed_names import refusing

_Function = TypeVar("_Function", bound=Callable[..., Any])

__getattr__ = refusing("apex.amp", '`"fp16": true` in the model-parallel parameters, or torch.autocast')


def float_function(fn: _Function) -> _Function:
    """Return the function itself."""
    return fn


half_function = promote_function = float_function


def register_float_function(module: Any, name: str) -> None:
    """Leave the function as it is."""


register_half_function = register_promote_function = register_float_function


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]
