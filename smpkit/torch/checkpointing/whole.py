"""Checkpoint one module as a whole, if it lies on one pipeline rank."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.calls import ModuleCall, OriginalCall
from smpkit.torch.checkpointing.names import name_of
from smpkit.torch.checkpointing.region import run_checkpointed
from smpkit.torch.pipeline.units import pp_rank_of, pp_ranks_of
from smpkit.torch.state import state

__all__ = ["ModuleCheckpoint", "cannot_checkpoint", "check_checkpoint_ranks"]

_warned: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
"""Modules that were said to run un-checkpointed."""


class ModuleCheckpoint:
    """Checkpoints each call of `module`."""

    def __init__(self, module: nn.Module, preserve_rng_state: bool) -> None:
        self._module = module
        self._preserve_rng_state = preserve_rng_state

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run, original)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if pp_rank_of((args, kwargs)) is not None:
            _warn_once(self._module, "holds no parameters and no module that does, so it lies on no pipeline rank")
            return original(*args, **kwargs)
        if any(map(_is_filled, [*args, *kwargs.values()])):
            _warn_once(self._module, "is handed a cache that is filled, and filling it once more would change it")
            return original(*args, **kwargs)
        # Layers of Hugging Face append to an empty cache, in training to nobody's use; recomputing, they would again.
        args = tuple([None if _is_cache(each) else each for each in args])
        kwargs = {key: None if _is_cache(each) else each for key, each in kwargs.items()}
        name, preserve = name_of(self._module), self._preserve_rng_state
        return run_checkpointed(original, [self._module], name, args, kwargs, preserve_rng_state=preserve)


def check_checkpoint_ranks(root: nn.Module, placement: Mapping[str, int]) -> None:
    """Check that modules to be checkpointed lie on one rank each, once the partition is known.

    Raises:
        UsageError: one does not, and the user placed it so.
    """
    for name, module in root.named_modules():
        call = ModuleCall.of(module)
        if isinstance(call.checkpointing, ModuleCheckpoint) and cannot_checkpoint(module, pp_ranks_of(name, placement)):
            call.checkpointing = None


def cannot_checkpoint(module: nn.Module, pp_ranks: Collection[int]) -> bool:
    """Return whether a module on pipeline ranks `pp_ranks` cannot be checkpointed, after saying so once.

    Raises:
        UsageError: it cannot, and the user placed it so.
    """
    if len(pp_ranks) < 2:
        return False
    ranks = " and ".join(map(str, sorted(pp_ranks)))
    if not state.cfg.auto_partition:
        raise UsageError(
            f"`{name_of(module)}` is to be checkpointed, but parts of it were placed on pipeline ranks {ranks}",
            hint="place it on one rank with smp.set_partition, or checkpoint the modules in it",
        )
    _warn_once(module, f"lies on pipeline ranks {ranks}")
    return True


def _warn_once(module: nn.Module, why: str) -> None:
    if module not in _warned and (not state.initialized or state.rank == 0):
        warnings.warn(f"`{name_of(module)}` is not checkpointed: it {why}", UserWarning, stacklevel=2)
    _warned.add(module)


def _is_cache(argument: object) -> bool:
    return hasattr(argument, "get_seq_length")


def _is_filled(argument: Any) -> bool:
    return _is_cache(argument) and bool(argument.get_seq_length())
