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

from smpkit.torch.calls import OriginalCall
from smpkit.torch.checkpointing.names import name_of
from smpkit.torch.checkpointing.region import Region
from smpkit.torch.offload import active
from smpkit.torch.pipeline.located import microbatch_between_units
from smpkit.torch.pipeline.random import will_be_recomputed

__all__ = ["adopt"]

_Generator = Generator[None, None, None]
_Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], _Generator]
"""What `checkpoint(..., use_reentrant=False)` runs around the function that it calls, with its settings."""

_APART: Final = "_checkpoint_without_reentrant_generator_impl"
"""Its name in torch 2.14.1; takes a call's arguments as a tuple and a dict, and settings by name."""

_SPREAD: Final = "_checkpoint_without_reentrant_generator"
"""Its name in torch 2.1 to 2.13; takes settings and a call's positional arguments in one row. Where both are, this one
only calls the other."""

_reentrant: Final = torch_checkpoint.CheckpointFunction


class _Reentrant:
    """Stands for torch's function: `apply` is all that is called of it."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if microbatch_between_units() is None:
            with _boundary_of(function):
                return _reentrant.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]
        # The same gradients by the other way, which keeps to the ranks' own graphs.
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _non_reentrant(
    around: _Around, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Generator:
    microbatch = microbatch_between_units()
    if microbatch is None:
        with _boundary_of(function):
            yield from around(function, args, kwargs)
        return
    # See [Note: around several ranks].
    outer, microbatch.unit_wrapper = microbatch.unit_wrapper, functools.partial(_recomputed, around)
    try:
        yield
    finally:
        microbatch.unit_wrapper = outer


_again: Final = contextlib.contextmanager(_non_reentrant)


def _recomputed(around: _Around, original: OriginalCall) -> OriginalCall:
    """Return a call that is recomputed in backward, with the settings of a torch.utils.checkpoint around it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _again(around, original, args, kwargs):
            return original(*args, **kwargs)

    return run


def _apart(theirs: Callable[..., _Generator]) -> Callable[..., _Generator]:
    """Return what stands for torch's function of the name `_APART`."""

    def generator(
        function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any
    ) -> _Generator:
        return _non_reentrant(functools.partial(theirs, **settings), function, args, kwargs)

    return generator


def _spread(theirs: Callable[..., _Generator]) -> Callable[..., _Generator]:
    """Return what stands for torch's function of the name `_SPREAD`."""
    kinds = [each.kind for each in inspect.signature(theirs).parameters.values()]
    num_settings = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1  # the function comes first

    def generator(function: Callable[..., Any], *row: Any, **kwargs: Any) -> _Generator:
        settings, args = row[:num_settings], row[num_settings:]

        def around(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Generator:
            return theirs(function, *settings, *args, **kwargs)

        return _non_reentrant(around, function, args, kwargs)

    return generator


def _standing() -> dict[str, Callable[..., _Generator]]:
    """Return what stands for which of torch's functions: for the one that `checkpoint` calls."""
    for name, stand_for in ((_APART, _apart), (_SPREAD, _spread)):
        theirs = getattr(torch_checkpoint, name, None)
        if theirs is not None:
            return {name: stand_for(theirs)}
    return {}


_STANDING: Final = _standing()
"""Made once, from torch's own: `adopt` is called for each model."""


def adopt() -> None:
    """Make torch's checkpoint one of ours, for the life of this process."""
    torch_checkpoint.CheckpointFunction = _Reentrant  # type: ignore[assignment, misc]
    for name, standing in _STANDING.items():
        setattr(torch_checkpoint, name, standing)


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
