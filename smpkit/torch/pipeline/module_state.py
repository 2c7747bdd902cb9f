"""Module state that microbatches in flight together would share: what modules keep from one call to the next.

Where a microbatch comes back to a rank, other microbatches run there in between. What a module has kept from the first
visit (a hidden state that each forward resets, a counter, running statistics) then belongs to another microbatch. So
while the first microbatch of a kind of step runs, each rank compares the state of its modules wherever a new segment
begins, a *cut*. Where one side of a cut may read what has changed on the other, microbatches run one after the other,
as in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import NON_TENSOR_TYPES
from smpkit.torch.core.warn import warn_user
from smpkit.torch.pipeline.stage_tensor import StageTensor

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Microbatch
    from smpkit.torch.pipeline.stage_context import StageContext

__all__ = ["ModuleStateTracker", "gather_conflicts", "refuse_kept_graph", "warn_of_conflicts"]

_OWNED_BY_TORCH: Final = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
_CONTAINERS: Final = (list, tuple, set, deque)
_NUM_NAMED: Final = 3
_BACKWARD_TWICE: Final = "backward through the graph a second time"
"""Torch's error where the backward of one segment reaches the graph of another one that has run."""
_WHAT: Final = "what modules keep between calls"

_ModuleState = Mapping[str, tuple[object, object]]
"""By attribute, its value and its fingerprint; the value stays alive, so that no other object gets its id."""


class ModuleStateTracker:
    """Tracks the state of this rank's modules while the first microbatch of a kind of step runs.

    Args:
        modules: those that code of this rank may call or inspect, by name.
        container_modules: the names of those that lie on several ranks, or hold nothing: code between units reads them.
    """

    def __init__(self, modules: Mapping[str, nn.Module], container_modules: Collection[str]) -> None:
        self._modules = modules
        self._container_modules = container_modules
        self._at_first = {name: _state_of(module) for name, module in modules.items()}
        self._changed: dict[str, str] = {}
        self._num_cuts = 0
        self._calls: dict[str, set[int]] = {}
        """By module of this rank, the numbers of cuts before its calls."""
        self.conflicts: set[str] = set()
        """Attributes that change on one side of a cut and may be read on the other."""

    def cut(self) -> None:
        """Note that a new segment begins here."""
        self._num_cuts += 1
        self._compare()

    def on_call(self, target: object) -> None:
        """Note that modules of this rank are called: `target` is a name, a tuple of names, or an operation."""
        names: tuple[str, ...] = ()
        if isinstance(target, str):
            names = (target,)
        elif isinstance(target, tuple):
            names = target
        for name in names:
            self._calls.setdefault(name, set()).add(self._num_cuts)
            self.conflicts.update(self._changed_in(name))

    def end(self) -> None:
        """Note that the microbatch's forward has ended; what has changed by now, the next one reads before a cut."""
        self._compare()
        if not self._num_cuts:
            return
        for name, changed in self._changed.items():
            if name in self._container_modules:
                self.conflicts.add(changed)
        for name, cuts in self._calls.items():
            if len(cuts) > 1:
                self.conflicts.update(self._changed_in(name))

    def _compare(self) -> None:
        for name, module in self._modules.items():
            known, now = self._at_first[name], _state_of(module)
            for key in now:
                if key not in known or known[key][1] != now[key][1]:
                    self._changed[name] = f"{name}.{key}" if name else key
                    break

    def _changed_in(self, name: str) -> list[str]:
        """Return the changed attributes of a module and of those in it."""
        return [what for each, what in self._changed.items() if each == name or each.startswith(f"{name}.")]


def _state_of(module: nn.Module) -> _ModuleState:
    own = {key: value for key, value in vars(module).items() if key not in _OWNED_BY_TORCH}
    return {key: (value, _fingerprint(value)) for key, value in {**own, **module._buffers}.items()}


def _fingerprint(value: Any) -> object:
    """Return a key that differs once a value has been changed or replaced."""
    if type(value) in NON_TENSOR_TYPES:
        return value
    if isinstance(value, torch.Tensor) and type(value) is not StageTensor and not value.is_inference():
        return id(value), value._version
    if isinstance(value, _CONTAINERS):
        return id(value), tuple(map(id, value))
    if isinstance(value, dict):
        return id(value), tuple(map(id, value.values()))
    return id(value)


def gather_conflicts(microbatch: Microbatch, stage: StageContext) -> list[str]:
    """Return the attributes, on any rank, that microbatches would share; all ranks call this, and exchange them."""
    state_tracker, microbatch.state_tracker = microbatch.state_tracker, None
    if state_tracker is None or max(microbatch.num_segments) == 1:
        return []
    state_tracker.end()
    conflicts: set[str] = set()
    for rank in range(stage.size):
        if rank == stage.rank:
            stage.transport.broadcast_object(sorted(state_tracker.conflicts), what=_WHAT)
            conflicts |= state_tracker.conflicts
        else:
            conflicts.update(stage.transport.receive_object(rank, _WHAT))
    return sorted(conflicts)


def warn_of_conflicts(conflicts: list[str]) -> None:
    """Warn that microbatches run one after the other, and why."""
    names = ", ".join(f"`{name}`" for name in conflicts[:_NUM_NAMED])
    if len(conflicts) > _NUM_NAMED:
        names += ", ..."
    warn_user(
        f"{names} changed while a microbatch was on its way that comes back to the rank later: microbatches run one"
        " after the other, so that none sees what another has left there, and ranks wait for each other. To train"
        " faster, put the calls between which it must stay into one module on one rank (smp.set_partition), or hand"
        " it on as an argument and a result",
    )


def refuse_kept_graph(error: Exception, microbatch: Microbatch) -> None:
    """Raise UsageError in place of torch's error where a module has kept a tensor with its graph over a cut."""
    if isinstance(error, RuntimeError) and _BACKWARD_TWICE in str(error) and microbatch.num_own_segments > 1:
        raise UsageError(
            "backward came twice through the same graph, and the microbatch visits this pipeline rank more than once:"
            " a module keeps a tensor that needs gradients from one visit to the next (a hidden state, a cache)",
            hint="return it from the module's forward and hand it back as an argument, as nn.LSTM does, or put the"
            " calls into one module on one rank (smp.set_partition)",
        ) from error
