"""Measure how many bytes this rank holds, by kind, while a step runs.

Weights, gradients and optimizer states are the storages of tensors that are known; what offloading keeps on the device
and on the host it counts itself. The rest of what the allocator has handed out is divided by time: what was there when
the step began is `other` (inputs, buckets of gradients), and what has come since then is `activations`. Torch's
allocator counts on a GPU. Without one, the C library's does, which takes 4 µs: there `other` would be Python and all
that was imported, beside which a model is not seen, and is left out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final, TypeAlias

import torch

from smpkit.observe.events import UNKNOWN, HeldBytes
from smpkit.torch.core import devices, offloader
from smpkit.torch.core.runtime import state

_NoTorchFunction: Final = torch._C.DisableTorchFunction

Held: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]
"""The values of a `HeldBytes`, in the order of its fields: one is made after each action of a step."""
HELD: Final = tuple(field.name for field in fields(HeldBytes))


class HeldMemory:
    """Measures this rank's memory; one for the life of a job."""

    def __init__(self) -> None:
        self._weights = self._states = self._gradients = self._all_gradients = 0
        self._other = UNKNOWN
        self._parameters: list[tuple[torch.Tensor, int]] = []
        """Those that may have gradients, and how large these would be."""
        self._device = state.device

    def begin_step(self) -> Held:
        """Measure what changes between steps only, and what there is now."""
        self._device = state.device  # asked for once in a step: it costs more than what is measured
        if (model := state.model) is not None:
            tensors = [*(parameter for _, parameter in model.local_named_parameters()), *model.local_buffers()]
            self._weights = _storage_bytes(tensors)
            trained = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad]
            self._parameters = [(parameter, _local(parameter).nbytes) for parameter in trained]
            self._all_gradients = sum(size for _, size in self._parameters)
        if (optimizer := state.optimizer) is not None:
            states: Any = getattr(optimizer.optimizer, "state", {})
            values = [value for kept in states.values() if isinstance(kept, dict) for value in kept.values()]
            masters = [] if optimizer.masters is None else optimizer.masters.masters().values()
            self._states = _storage_bytes([*(value for value in values if isinstance(value, torch.Tensor)), *masters])
        self._gradients = self._gradient_bytes()
        self._other = self._rest(offloader.current().use().parked)
        return self.now()

    def now(self, *, gradients_may_be_new: bool = True) -> Held:
        """Measure; gradients only where a backward may have run since the last time."""
        if gradients_may_be_new and self._gradients < self._all_gradients:
            self._gradients = self._gradient_bytes()
        use = offloader.current().use()
        rest = self._rest(use.parked)
        activations = UNKNOWN if UNKNOWN in (rest, self._other) else max(0, rest - self._other)
        known = (self._weights, self._gradients, self._states, activations, use.parked)
        other = self._other if self._other == UNKNOWN or devices.is_asynchronous(self._device) else 0
        return (*known, use.offloaded, other, use.bytes_out, use.bytes_back)

    def _rest(self, parked: int) -> int:
        """Return what the allocator has handed out beside what is known; UNKNOWN where it does not tell."""
        allocated = _allocated_bytes(self._device)
        if allocated is None or allocated < self._weights:  # less: another allocator serves torch than is asked
            return UNKNOWN
        return max(0, allocated - self._weights - self._gradients - self._states - parked)

    def _gradient_bytes(self) -> int:
        with _NoTorchFunction():  # the streams of random numbers see what is asked of tensors during a step
            return sum([size for parameter, size in self._parameters if parameter.grad is not None])


class MostHeld:
    """The most bytes that a rank has held in a step: of each kind, and at once with offloaded ones and without."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        """The moments of these may differ."""
        self.on_device = 0
        self.with_offloaded = 0
        """What it would have been with everything kept on the device."""

    def add(self, samples: Sequence[Held]) -> None:
        """Take in what was measured during a step."""
        for name, values in zip(HELD, zip(*samples, strict=True), strict=False):
            if (value := max(values)) != UNKNOWN:
                self.kinds[name] = max(value, self.kinds.get(name, 0))
        for held in samples:
            on_device = bytes_on_device(held)
            self.on_device = max(self.on_device, on_device)
            self.with_offloaded = max(self.with_offloaded, on_device + held[_OFFLOADED])


_OFFLOADED: Final = HELD.index("offloaded")


def bytes_on_device(held: Held) -> int:
    """Return what a rank held on its device, without what is unknown."""
    weights, gradients, states, activations, parked, _, other, _, _ = held
    return weights + gradients + states + max(0, activations) + parked + max(0, other)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of distinct storages."""
    parts = [part for part in map(_local, tensors) if part.device.type != "meta" and part.layout is torch.strided]
    storages = {storage._cdata: storage.nbytes() for storage in (part.untyped_storage() for part in parts)}
    return sum(storages.values())


# --- the allocator ----------------------------------------------------------------------------------------------------


class _MallInfo(ctypes.Structure):
    """The result of `mallinfo2`, of glibc 2.33 and later."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_mallinfo: Final = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _MallInfo


def _allocated_bytes(device: torch.device) -> int | None:
    """Return what the allocator of a device has handed out; None if it does not tell."""
    if devices.is_asynchronous(device):
        return devices.memory_bytes(device)
    if _mallinfo is None:
        return None
    counted = _mallinfo()
    return int(counted.uordblks + counted.hblkhd)
