"""The calls of one layer: checkpointed, or as somebody chooses from call to call.

::

    module(x) ─► ModuleCall ─► ChosenCheckpoint ─► watch.begin_call      may measure the call
                                      ├─ KEEP       the plain call
                                      ├─ OFFLOAD    recomputed in backward; its input leaves the device
                                      └─ RECOMPUTE  recomputed in backward; its input stays
                                   ─► watch.end_call

All three give the same gradients to the bit, so the choice may change between any two calls.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Final, Protocol

import torch
from torch import nn

from smpkit.plan.tune.chain import Choice
from smpkit.torch.core.module_call import OriginalCall
from smpkit.torch.core.offloader import KEEPING, Offloader
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import NON_TENSOR_TYPES
from smpkit.torch.core.warn import warn_user
from smpkit.torch.pipeline.units import pp_rank_of
from smpkit.torch.recompute.region import name_of, run_checkpointed

__all__ = ["CallWatch", "ChosenCheckpoint", "ModuleCheckpoint", "warn_once"]

_ORDINARY: Final = frozenset({torch.Tensor, *NON_TENSOR_TYPES})
"""Types of arguments that are neither stage tensors nor caches."""
_warned: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
"""Modules whose user has been warned that they are not checkpointed."""


class ModuleCheckpoint:
    """Checkpoints each call of `module`.

    Args:
        keeper: has its inputs until backward; None: what is installed in this process.
    """

    def __init__(self, module: nn.Module, preserve_rng_state: bool, keeper: Offloader | None = None) -> None:
        self.module, self.preserve_rng_state = module, preserve_rng_state
        self._keeper = keeper

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run, original)

    def for_module(self, module: nn.Module) -> ModuleCheckpoint:
        return ModuleCheckpoint(module, self.preserve_rng_state, self._keeper)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if not _ORDINARY.issuperset(map(type, (*args, *kwargs.values()))):
            if pp_rank_of((args, kwargs)) is not None:
                warn_once(self.module, "holds no parameters and no module that does, so it lies on no pipeline rank")
                return original(*args, **kwargs)
            if any(map(_is_filled, [*args, *kwargs.values()])):
                warn_once(self.module, "is handed a cache that is filled, and filling it once more would change it")
                return original(*args, **kwargs)
            # Hugging Face's layers append to an empty cache, which training does not use; recomputation would append
            # again.
            args = tuple([None if _is_cache(each) else each for each in args])
            kwargs = {key: None if _is_cache(each) else each for key, each in kwargs.items()}
        return run_checkpointed(
            original,
            [self.module],
            args,
            kwargs,
            preserve_rng_state=self.preserve_rng_state,
            keeper=self._keeper,
        )


class CallWatch(Protocol):
    """Whoever chooses, and looks at calls for that."""

    def begin_call(
        self, layer: ChosenCheckpoint, original: OriginalCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OriginalCall:
        """Take note that a call begins, before its choice is read; return what runs it."""

    def end_call(self, layer: ChosenCheckpoint, output: Any) -> None:
        """Take note of what a call has returned."""


class ChosenCheckpoint(ModuleCheckpoint):
    """Runs each call of `module` as it was chosen.

    Args:
        may_keep: whether the layer may do without recomputation.
        keeper: has its inputs until backward; None: what is installed in this process.
    """

    def __init__(
        self,
        module: nn.Module,
        preserve_rng_state: bool = True,
        *,
        may_keep: bool = True,
        keeper: Offloader | None = None,
    ) -> None:
        super().__init__(module, preserve_rng_state, keeper)
        self.may_keep = may_keep
        self.choice = Choice.OFFLOAD
        """Without an engine that offloads, the same as to recompute."""
        self.watch: CallWatch | None = None
        self._recomputed = ModuleCheckpoint(module, preserve_rng_state, KEEPING)

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run_chosen, original)

    def for_module(self, module: nn.Module) -> ChosenCheckpoint:
        return ChosenCheckpoint(module, self.preserve_rng_state, may_keep=self.may_keep, keeper=self._keeper)

    def _run_chosen(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if self.watch is None or state.tracing or torch.compiler.is_compiling():
            # A trial of the step finds out what layers cost; it takes them for checkpointed, as they are at first.
            return self._run(original, *args, **kwargs)
        watched = self.watch.begin_call(self, original, args, kwargs)
        if self.choice is Choice.OFFLOAD:
            output = self._run(watched, *args, **kwargs)
        elif self.choice is Choice.RECOMPUTE:
            output = self._recomputed._run(watched, *args, **kwargs)
        else:
            output = watched(*args, **kwargs)
        self.watch.end_call(self, output)
        return output


def warn_once(module: nn.Module, why: str) -> None:
    """Warn, once for each module, that it is not checkpointed."""
    if module not in _warned:
        warn_user(f"`{name_of(module)}` is not checkpointed: it {why}")
    _warned.add(module)


def _is_cache(argument: object) -> bool:
    return hasattr(argument, "get_seq_length")


def _is_filled(argument: Any) -> bool:
    return _is_cache(argument) and bool(argument.get_seq_length())
