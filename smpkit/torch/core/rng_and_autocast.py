"""What a forward depends on besides its inputs and modules (random numbers, autocast), to run it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Final

import torch

from smpkit.torch.core.devices import default_generator

__all__ = ["AutocastState", "RandomState"]

_WITHOUT_OWN: Final = frozenset({"cpu", "meta"})
"""Types of devices that have no generator, and no autocast, besides the CPU's."""
_NOTHING: Final = contextlib.nullcontext()


class RandomState:
    """The present states of the default random generators: the CPU's and those of `devices`."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        generators: list[torch.Generator] = [torch.default_generator]
        generators += [default_generator(device) for device in devices if device.type not in _WITHOUT_OWN]
        self._states = [(generator, generator.get_state()) for generator in generators]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore these states inside, and afterwards those of before."""
        present = [(generator, generator.get_state()) for generator, _ in self._states]
        for generator, state in self._states:
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in present:
                generator.set_state(state)


class AutocastState:
    """Autocast's present settings for the CPU and for the types of `devices`.

    Args:
        cache_enabled: whether casts of weights are kept in a forward that runs again; None: as at present.
    """

    def __init__(self, devices: Iterable[torch.device], *, cache_enabled: bool | None = None) -> None:
        kinds = {device.type for device in devices} - _WITHOUT_OWN | {"cpu"}
        self._dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        self._others = kinds - self._dtypes.keys()
        self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled

    def restored(self) -> AbstractContextManager[object]:
        """Return a context with these settings."""
        to_disable = [kind for kind in self._others if torch.is_autocast_enabled(kind)]
        if not self._dtypes and not to_disable:
            return _NOTHING
        stack = contextlib.ExitStack()
        for kind in to_disable:
            stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in self._dtypes.items():
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache_enabled))
        return stack
