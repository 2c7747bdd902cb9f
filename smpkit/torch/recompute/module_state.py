"""What a module reads and changes besides its arguments, so that recomputation finds and leaves it as forward did.

Torch's checkpoint knows arguments and the default generators only. A mask that the caller has put on the module, a
counter, a generator of its own would be those of a later microbatch by the time of backward; BatchNorm would count
every microbatch twice, and spectral normalisation would take two steps and compute with other weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["ModuleStateSnapshot"]

_COMMON: Final = frozenset(vars(nn.Module()))
"""What every module has; this is looked through at every call."""

_SIMPLE: Final = frozenset({bool, int, float, str, type(None)})
"""Attributes of these kinds are put back for recomputation; others are the user's objects, too dear to copy."""

_mutated_buffers: Final[weakref.WeakKeyDictionary[nn.Module, set[str]]] = weakref.WeakKeyDictionary()
"""The buffers that a module's forward was seen to change; a module is listed from its first call on."""


@dataclass(frozen=True)
class _Buffer:
    """A buffer at the time of a call."""

    module: nn.Module
    name: str
    value: Tensor
    version: int
    copy: Tensor | None
    """What it held; None if nobody needs to know."""

    @property
    def now(self) -> Tensor | None:
        return self.module._buffers.get(self.name)

    def has_changed(self) -> bool:
        return self.now is not self.value or _version(self.value) != self.version or _updates_statistics(self.module)


class ModuleStateSnapshot:
    """What the modules of one checkpointed call read besides their arguments.

    Args:
        modules: the roots of what is called.
        keep: stands in for a tensor that is kept for backward; called for each tensor attribute.
        generators: whether generators are to draw the same numbers again.
    """

    def __init__(self, modules: Sequence[nn.Module], keep: Callable[[Tensor], Any], *, generators: bool) -> None:
        everything = list({id(each): each for root in modules for each in root.modules()}.values())
        self._modes = [(each, each.training) for each in everything]
        self._custom_modules = [each for each in everything if _is_custom(type(each))]
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        for module in self._custom_modules:
            for name, value in vars(module).items():
                if name in _COMMON:
                    continue
                if type(value) in _SIMPLE:
                    self._attributes.append((module, name, value))
                elif isinstance(value, Tensor):
                    self._attributes.append((module, name, keep(value)))
                elif generators and isinstance(value, torch.Generator):
                    self._generators.append((value, value.get_state()))
        self._buffers = [
            _snapshot_of(each, name, value)
            for each in everything
            if each._buffers
            for name, value in each._buffers.items()
            if value is not None
        ]

    def end_forward(self) -> None:
        """Note which buffers the call has changed, and forget the others."""
        for buffer in self._buffers:
            _mutated_buffers.setdefault(buffer.module, set())
        self._buffers = [buffer for buffer in self._buffers if buffer.has_changed()]
        for buffer in self._buffers:
            _mutated_buffers[buffer.module].add(buffer.name)

    @contextlib.contextmanager
    def restored(self, kept: Callable[[Any], Any]) -> Iterator[None]:
        """Restore what the call found, for the length of this block.

        Args:
            kept: returns the tensor for what `keep` returned; everything else as it is.
        """
        switched = [(each, each.training) for each, mode in self._modes if each.training is not mode]
        attributes = [(vars(each), dict(vars(each))) for each in self._custom_modules]
        states = [(generator, generator.get_state()) for generator, _ in self._generators]
        buffers = [(buffer, buffer.now) for buffer in self._buffers]
        try:
            for each, mode in switched:
                each.training = not mode
            for module, name, value in self._attributes:
                vars(module)[name] = kept(value)
            for generator, state in self._generators:
                generator.set_state(state)
            for buffer, now in buffers:
                found = now if buffer.copy is None else buffer.copy
                buffer.module._buffers[buffer.name] = None if found is None else found.clone()
            yield
        finally:
            for each, mode in switched:
                each.training = mode
            for where, content in attributes:
                where.clear()
                where.update(content)
            for generator, state in states:
                generator.set_state(state)
            for buffer, now in buffers:
                buffer.module._buffers[buffer.name] = now


def _snapshot_of(module: nn.Module, name: str, value: Tensor) -> _Buffer:
    # Whether a buffer changes is known after the first call; the copies that this one makes live no longer than it.
    needed = name in _mutated_buffers.get(module, (name,)) and not isinstance(module, _NormBase)
    return _Buffer(module, name, value, _version(value), value.clone() if needed else None)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _updates_statistics(module: nn.Module) -> bool:
    """Return whether this is a torch norm that updates statistics, which the versions of its buffers do not show."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _is_custom(kind: type[nn.Module]) -> bool:
    """Return whether a module is more than one of torch's, which keep nothing between calls but buffers."""
    return not kind.__module__.startswith("torch.nn.modules.")
