"""What a slice's forward depends on besides its inputs and modules (random numbers, autocast), to repeat it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smpkit.torch.core import devices

__all__ = ["AutocastState", "RandomState", "random_state", "restored_random_state"]

RandomState = tuple[Tensor, Tensor | None]
"""State of the CPU's generator, and of the GPU's if there is one."""


def random_state(device: torch.device) -> RandomState:
    """Return the states of the random generators."""
    of_device = devices.default_generator(device).get_state() if device.type != "cpu" else None
    return torch.get_rng_state(), of_device


@contextlib.contextmanager
def restored_random_state(state: RandomState, device: torch.device) -> Iterator[None]:
    """Restore the states of the random generators inside."""
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            devices.default_generator(device).set_state(state[1])
        yield


@dataclass(frozen=True)
class AutocastState:
    """Autocast's settings during the forward."""

    kind: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def current(device: torch.device) -> AutocastState:
        """Return the current settings."""
        return AutocastState(device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))

    def restore(self) -> torch.autocast:
        """Return a context with these settings."""
        # Without autocast's cache: it would keep a cast of every weight on the device until the end of the step, and
        # return it for the same device parameter after another slice's weights have been loaded.
        return torch.autocast(self.kind, enabled=self.enabled, dtype=self.dtype, cache_enabled=False)
