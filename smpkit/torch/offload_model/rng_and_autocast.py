"""What a slice's forward depends on besides weights and inputs (random numbers, autocast, buffers), to repeat it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smpkit.torch.core import devices

__all__ = ["AutocastState", "RandomState", "SliceBuffers", "random_state", "restored_random_state"]

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


class SliceBuffers:
    """The buffers of a slice; they stay on the device, because they are small and forward changes them.

    The first forward shows which of them it changes (BatchNorm's statistics).

    Args:
        module: the slice.
        device: where its buffers go.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._owners: list[tuple[nn.Module, str]] = []
        for holder in module.modules():
            for name, buffer in holder._buffers.items():
                if buffer is not None:
                    self._owners.append((holder, name))
                    holder._buffers[name] = buffer.to(device)
        self._module = module
        self._mutated: dict[bool, set[int]] = {}

    @contextlib.contextmanager
    def snapshot(self, into: dict[int, Tensor]) -> Iterator[None]:
        """Put copies of the buffers that the forward inside changes into `into`."""
        mode = self._module.training
        before = [self._current(index) for index in range(len(self._owners))]
        versions = [buffer._version for buffer in before]
        known = self._mutated.get(mode)
        # The first forward in this mode may change any of them.
        into.update({index: before[index].clone() for index in (range(len(before)) if known is None else known)})
        yield
        changed = set() if known is None else set(known)
        for index, (buffer, version) in enumerate(zip(before, versions, strict=True)):
            current = self._current(index)
            if current is not buffer or current._version != version:
                changed.add(index)
            elif known is None and not torch.equal(current, into[index]):
                changed.add(index)  # batch_norm writes its statistics without changing their version
        self._mutated[mode] = changed
        for index in into.keys() - changed:
            del into[index]

    @contextlib.contextmanager
    def restored(self, snapshot: dict[int, Tensor]) -> Iterator[None]:
        """Replace changed buffers inside by copies with their old values, for a repeated forward to read and change."""
        changing = self._mutated.get(self._module.training, set()) | snapshot.keys()
        current = {index: self._current(index) for index in changing}
        for index, buffer in current.items():
            self._set(index, snapshot.get(index, buffer).clone())
        try:
            yield
        finally:
            for index, buffer in current.items():
                self._set(index, buffer)

    def _current(self, index: int) -> Tensor:
        holder, name = self._owners[index]
        buffer = holder._buffers[name]
        assert buffer is not None
        return buffer

    def _set(self, index: int, buffer: Tensor) -> None:
        holder, name = self._owners[index]
        holder._buffers[name] = buffer
