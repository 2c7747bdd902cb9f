"""Torch's own checkpoint in the user's model, and so Hugging Face's `gradient_checkpointing_enable()`.

People hold on to `torch.utils.checkpoint.checkpoint` itself, so two functions that it looks up when it is called are
replaced. Its boundaries are then offloaded as ours are, and its reentrant form works on values that other ranks may
hold: that one is a custom autograd.Function, whose graph would end on this rank, and torch gives no way to look at its
arguments first.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from smpkit.torch.checkpointing.names import name_of
from smpkit.torch.checkpointing.region import Region
from smpkit.torch.offload import active
from smpkit.torch.pipeline.located import between_units
from smpkit.torch.pipeline.random import will_be_recomputed
from smpkit.torch.state import state

__all__ = ["adopt"]

_GENERATOR: Final = "_checkpoint_without_reentrant_generator"
"""What `checkpoint(..., use_reentrant=False)` runs around the function that it calls; of torch 2.1 to 2.14 at least."""
_NOTHING: Final = contextlib.nullcontext()

_reentrant: Final = torch_checkpoint.CheckpointFunction
_around: Final[Callable[..., Generator[None, None, None]] | None] = getattr(torch_checkpoint, _GENERATOR, None)
_told: Final = set[str]()
"""Calls whose inputs were said to stay; one of them is enough."""


class _Reentrant:
    """Stands for torch's function: `apply` is all that is called of it."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if between_units() is None:
            with _boundary_of(function):
                return _reentrant.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]
        # The same gradients by the other way, which keeps to the ranks' own graphs.
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
    assert _around is not None
    with _boundary_of(function):
        yield from _around(function, *args, **kwargs)


def adopt() -> None:
    """Make torch's checkpoint one of ours, for the life of this process."""
    torch_checkpoint.CheckpointFunction = _Reentrant  # type: ignore[assignment, misc]
    if _around is not None:
        setattr(torch_checkpoint, _GENERATOR, _non_reentrant)


def _boundary_of(function: Callable[..., Any]) -> AbstractContextManager[object]:
    """Return what takes the positional tensors of a checkpointed call away; nothing if others see to that."""
    if active.current() is None or type(function) is Region or not torch.is_grad_enabled() or will_be_recomputed():
        return _NOTHING
    name = _name_of(function)
    scope = active.boundary(name)  # counts: this layer is checkpointed
    if between_units() is None:
        return scope
    # The call is not one rank's own: which tensors are whose, torch's checkpoint does not know.
    _tell(name)
    return _NOTHING


def _name_of(function: Callable[..., Any]) -> str:
    """Return the path of the module that a function calls, as far as one can see; else the function's own name."""
    candidates: list[Any] = [function]
    while isinstance(function, functools.partial):
        candidates += [*function.args[:1], function.func]
        function = function.func
    candidates.append(getattr(function, "__self__", None))
    module = next((each for each in candidates if isinstance(each, nn.Module)), None)
    return getattr(function, "__qualname__", type(function).__name__) if module is None else name_of(module)


def _tell(name: str) -> None:
    if not _told and state.rank == 0:
        warnings.warn(
            f"the input of `{name}` stays on the device, as that of every torch.utils.checkpoint around a call that the"
            " pipeline places: use smp.checkpoint(layer, ...) or smp.set_activation_checkpointing(layers) instead",
            UserWarning,
            stacklevel=2,
        )
    _told.add(name)
