"""torch.utils.checkpoint in the user's model, and so Hugging Face's `gradient_checkpointing_enable()`.

User code holds references to `torch.utils.checkpoint.checkpoint` itself, so two functions that it looks up when it runs
are replaced. Its inputs are then offloaded like those of `smp.checkpoint`, and it works in code that all pipeline ranks
run.

[Note: checkpoints around several ranks] A function in code that every rank runs may call units of several ranks. In
backward each rank works alone and could not run the function again: it has neither the others' weights nor their
results. So each unit that the function calls is recomputed by itself, on the rank that holds it; operations between
units save what they need.
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

from smpkit.torch.core import offload_hooks as active
from smpkit.torch.core.module_call import OriginalCall
from smpkit.torch.pipeline.random_streams import will_be_recomputed
from smpkit.torch.pipeline.stage_tensor import microbatch_between_units
from smpkit.torch.recompute.region import name_of

__all__ = ["patch_torch_checkpoint"]

_Generator = Generator[None, None, None]
_Wrapper = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], _Generator]
"""What `checkpoint(..., use_reentrant=False)` runs around the function that it calls, with its settings."""

_NAME_SINCE_2_14: Final = "_checkpoint_without_reentrant_generator_impl"
"""Its name in torch 2.14.1; takes a call's arguments as a tuple and a dict, and settings by keyword."""
_NAME_UNTIL_2_13: Final = "_checkpoint_without_reentrant_generator"
"""Its name in torch 2.1 to 2.13; takes settings and then a call's positional arguments. Where both exist, this one only
calls the other."""
_torch_checkpoint_function: Final = torch_checkpoint.CheckpointFunction


class _PatchedCheckpointFunction:
    """Replaces torch's class, of which `torch.utils.checkpoint` calls only `apply`."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if microbatch_between_units() is None:
            with _offloading_inputs_of(function):
                return _torch_checkpoint_function.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]
        # Non-reentrant checkpoints give the same gradients, and work with the separate graphs of ranks.
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _non_reentrant(
    wrapper: _Wrapper, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Generator:
    microbatch = microbatch_between_units()
    if microbatch is None:
        with _offloading_inputs_of(function):
            yield from wrapper(function, args, kwargs)
        return
    # See [Note: checkpoints around several ranks].
    outer, microbatch.unit_wrapper = microbatch.unit_wrapper, functools.partial(_recomputed, wrapper)
    try:
        yield
    finally:
        microbatch.unit_wrapper = outer


_recomputing: Final = contextlib.contextmanager(_non_reentrant)


def _recomputed(wrapper: _Wrapper, original: OriginalCall) -> OriginalCall:
    """Return a call that is recomputed in backward, with the settings of the torch.utils.checkpoint around it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _recomputing(wrapper, original, args, kwargs):
            return original(*args, **kwargs)

    return run


def _patched_since_2_14(original: Callable[..., _Generator]) -> Callable[..., _Generator]:
    """Return the replacement of torch's function `_NAME_SINCE_2_14`."""

    def generator(
        function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any
    ) -> _Generator:
        return _non_reentrant(functools.partial(original, **settings), function, args, kwargs)

    return generator


def _patched_until_2_13(original: Callable[..., _Generator]) -> Callable[..., _Generator]:
    """Return the replacement of torch's function `_NAME_UNTIL_2_13`."""
    kinds = [each.kind for each in inspect.signature(original).parameters.values()]
    num_settings = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1  # the function comes first

    def generator(function: Callable[..., Any], *positional: Any, **kwargs: Any) -> _Generator:
        settings, args = positional[:num_settings], positional[num_settings:]

        def wrapper(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Generator:
            return original(function, *settings, *args, **kwargs)

        return _non_reentrant(wrapper, function, args, kwargs)

    return generator


def _replacements() -> dict[str, Callable[..., _Generator]]:
    """Return the replacement of the function that this torch's `checkpoint` calls, by name."""
    for name, make_replacement in ((_NAME_SINCE_2_14, _patched_since_2_14), (_NAME_UNTIL_2_13, _patched_until_2_13)):
        original = getattr(torch_checkpoint, name, None)
        if original is not None:
            return {name: make_replacement(original)}
    return {}


_REPLACEMENTS: Final = _replacements()
"""Made once, from torch's own functions: a second call of `patch_torch_checkpoint` must not wrap a replacement."""


def patch_torch_checkpoint() -> None:
    """Replace two functions of torch.utils.checkpoint, for the life of this process."""
    torch_checkpoint.CheckpointFunction = _PatchedCheckpointFunction  # type: ignore[assignment, misc]
    for name, replacement in _REPLACEMENTS.items():
        setattr(torch_checkpoint, name, replacement)


def _offloading_inputs_of(function: Callable[..., Any]) -> AbstractContextManager[object]:
    """Return a context that offloads the positional tensors of a checkpointed call, if they are saved."""
    if active.current_offloader() is None or not torch.is_grad_enabled() or will_be_recomputed():
        return contextlib.nullcontext()
    return active.offload_inputs(_name_of(function))


def _name_of(function: Callable[..., Any]) -> str:
    """Return the path of the module that a function calls, if it can be found; else the function's own name."""
    candidates: list[Any] = [function]
    while isinstance(function, functools.partial):
        candidates += [*function.args[:1], function.func]
        function = function.func
    candidates.append(getattr(function, "__self__", None))
    module = next((each for each in candidates if isinstance(each, nn.Module)), None)
    return getattr(function, "__qualname__", type(function).__name__) if module is None else name_of(module)
