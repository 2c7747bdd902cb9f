"""A layer of which somebody chooses, call by call, whether it is kept, or has its input offloaded, or is recomputed.

::

    module(x) ─► ModuleCall ─► ChosenCheckpoint ─► watch.begin_call      may measure the call
                                      ├─ KEEP       the plain call
                                      ├─ OFFLOAD    recomputed in backward; its input leaves the device
                                      └─ RECOMPUTE  recomputed in backward; its input stays
                                   ─► watch.end_call

All three give the same gradients to the bit, so the choice may change between any two calls.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch
from torch import nn

from smpkit.plan.tune.chain import Choice
from smpkit.torch.core.module_call import OriginalCall
from smpkit.torch.core.offload_hooks import offload_inputs
from smpkit.torch.core.runtime import state
from smpkit.torch.recompute.api import ModuleCheckpoint
from smpkit.torch.recompute.region import Offload

__all__ = ["CallWatch", "ChosenCheckpoint"]

_NOTHING: Final = contextlib.nullcontext()


class CallWatch(Protocol):
    """Whoever chooses, and looks at calls for that."""

    def begin_call(
        self, layer: ChosenCheckpoint, original: OriginalCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OriginalCall:
        """Take note that a call begins, before its choice is read; return what runs it."""

    def end_call(self, output: Any) -> None:
        """Take note of what a call has returned."""


class ChosenCheckpoint(ModuleCheckpoint):
    """Runs each call of `module` as it was chosen.

    Args:
        may_keep: whether the layer may do without recomputation.
        offload: what offloads its inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        preserve_rng_state: bool = True,
        *,
        may_keep: bool = True,
        offload: Offload = offload_inputs,
    ) -> None:
        super().__init__(module, preserve_rng_state, offload)
        self.module, self.may_keep = module, may_keep
        self.choice = Choice.OFFLOAD
        """Without an engine that offloads, the same as to recompute."""
        self.watch: CallWatch | None = None
        self._recomputed = ModuleCheckpoint(module, preserve_rng_state, _offload_nothing)

    def __call__(self, original: OriginalCall) -> OriginalCall:
        return functools.partial(self._run_chosen, original)

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
        self.watch.end_call(output)
        return output


def _offload_nothing(_name: str) -> AbstractContextManager[object]:
    return _NOTHING
