"""The calls of one layer: checkpointed, or as somebody chooses from call to call.

::

    module(x) ─► ModuleCall ─┬─► ModuleCheckpoint               recomputed in backward; its input may leave the device
                             └─► ChosenCheckpoint ─► watch ─► run_chosen
                                                                 KEEP       the plain call
                                                                 OFFLOAD    as checkpointed
                                                                 RECOMPUTE  the same, but the input stays

All three give the same gradients to the bit, so the choice may change between any two calls.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

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

_ORDINARY: Final = frozenset({torch.Tensor, *NON_TENSOR_TYPES})
"""Types of arguments that are neither stage tensors nor caches."""
_warned: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
"""Modules whose user has been warned that they are not checkpointed."""


class ModuleCheckpoint:
    """Checkpoints each call of `module`; `keeper` has its inputs until backward, as for `run_checkpointed`."""

    def __init__(self, module: nn.Module, preserve_rng_state: bool = True, keeper: Offloader | None = None) -> None:
        self.module, self.preserve_rng_state, self._keeper = module, preserve_rng_state, keeper

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run, original)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        return self._checkpointed(original, args, kwargs, self._keeper)

    def _checkpointed(self, call: OriginalCall, args: Any, kwargs: Any, keeper: Offloader | None) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if not _ORDINARY.issuperset(map(type, (*args, *kwargs.values()))):
            if pp_rank_of((args, kwargs)) is not None:
                warn_once(self.module, "holds no parameters and no module that does, so it lies on no pipeline rank")
                return call(*args, **kwargs)
            if any(_is_cache(value) and value.get_seq_length() for value in (*args, *kwargs.values())):
                warn_once(self.module, "is handed a cache that is filled, and filling it once more would change it")
                return call(*args, **kwargs)
            # Hugging Face's layers append to an empty cache, which training does not use; recomputation would append
            # again.
            args = tuple([None if _is_cache(value) else value for value in args])
            kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
        preserve = self.preserve_rng_state
        return run_checkpointed(call, [self.module], args, kwargs, preserve_rng_state=preserve, keeper=keeper)


class ChosenCheckpoint(ModuleCheckpoint):
    """Runs each call of `module` as it was chosen; without a watch it checkpoints."""

    choice = Choice.OFFLOAD
    """Without an engine that offloads, the same as RECOMPUTE."""
    watch: Callable[[ChosenCheckpoint, OriginalCall, Any, Any], Any] | None = None
    """Runs a call that trains: it is given the layer, what runs the call, and the call's arguments."""
    may_keep = True
    """Whether the layer may do without recomputation."""

    def run_chosen(self, call: OriginalCall, args: Any, kwargs: Any) -> Any:
        """Run a call as it was chosen."""
        if self.choice is Choice.KEEP:
            return call(*args, **kwargs)
        return self._checkpointed(call, args, kwargs, self._keeper if self.choice is Choice.OFFLOAD else KEEPING)

    def _run(self, original: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        # A trial of the step finds out what layers cost; it takes them for checkpointed, as they are at first.
        if self.watch is None or not torch.is_grad_enabled() or state.tracing or torch.compiler.is_compiling():
            return super()._run(original, *args, **kwargs)
        return self.watch(self, original, args, kwargs)


def warn_once(module: nn.Module, why: str) -> None:
    """Warn, once for each module, that it is not checkpointed."""
    if module not in _warned:
        warn_user(f"`{name_of(module)}` is not checkpointed: it {why}")
    _warned.add(module)


def _is_cache(argument: object) -> bool:
    return hasattr(argument, "get_seq_length")
