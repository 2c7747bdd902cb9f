"""Torch's own checkpoint in the user's model, and so Hugging Face's `gradient_checkpointing_enable()`.

People hold on to `torch.utils.checkpoint.checkpoint` itself, so two functions that it looks up when it is called are
replaced. Its boundaries are then offloaded as ours are, and it works around code that every pipeline rank runs.

[Note: around several ranks] What a function calls that every rank runs may lie on several. In backward each rank is on
its own and could not run it again: it has neither the others' weights nor what they computed. So there each unit that
the function calls is recomputed by itself, on the rank that holds it; operations between units keep what they need.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from smpkit.torch.calls import OwnCall
from smpkit.torch.checkpointing.names import name_of
from smpkit.torch.checkpointing.region import Region
from smpkit.torch.offload import active
from smpkit.torch.pipeline.located import between_units
from smpkit.torch.pipeline.random import will_be_recomputed

__all__ = ["adopt"]

_GENERATOR: Final = "_checkpoint_without_reentrant_generator"
"""What `checkpoint(..., use_reentrant=False)` runs around the function that it calls; of torch 2.1 to 2.14 at least."""

_reentrant: Final = torch_checkpoint.CheckpointFunction
_around: Final[Callable[..., Generator[None, None, None]] | None] = getattr(torch_checkpoint, _GENERATOR, None)
_NUM_SETTINGS: Final = (
    0
    if _around is None
    else sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in inspect.signature(_around).parameters.values()) - 1
)
"""How many arguments it takes between the function and the function's own."""


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
    microbatch = between_units()
    if microbatch is None:
        with _boundary_of(function):
            yield from _around(function, *args, **kwargs)
        return
    # See [Note: around several ranks].
    outer, microbatch.around_units = microbatch.around_units, functools.partial(_recomputed, args[:_NUM_SETTINGS])
    try:
        yield
    finally:
        microbatch.around_units = outer


_again: Final = contextlib.contextmanager(_non_reentrant)


def _recomputed(settings: tuple[Any, ...], own: OwnCall) -> OwnCall:
    """Return a call that is recomputed in backward, with the settings of a torch.utils.checkpoint around it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _again(own, *settings, *args, **kwargs):
            return own(*args, **kwargs)

    return run


def adopt() -> None:
    """Make torch's checkpoint one of ours, for the life of this process."""
    torch_checkpoint.CheckpointFunction = _Reentrant  # type: ignore[assignment, misc]
    if _around is not None:
        setattr(torch_checkpoint, _GENERATOR, _non_reentrant)


def _boundary_of(function: Callable[..., Any]) -> AbstractContextManager[object]:
    """Return what takes the positional tensors of a checkpointed call away; nothing if others see to that."""
    if active.current() is None or type(function) is Region or not torch.is_grad_enabled() or will_be_recomputed():
        return contextlib.nullcontext()
    return active.boundary(_name_of(function))  # counts: this layer is checkpointed


def _name_of(function: Callable[..., Any]) -> str:
    """Return the path of the module that a function calls, as far as one can see; else the function's own name."""
    candidates: list[Any] = [function]
    while isinstance(function, functools.partial):
        candidates += [*function.args[:1], function.func]
        function = function.func
    candidates.append(getattr(function, "__self__", None))
    module = next((each for each in candidates if isinstance(each, nn.Module)), None)
    return getattr(function, "__qualname__", type(function).__name__) if module is None else name_of(module)
