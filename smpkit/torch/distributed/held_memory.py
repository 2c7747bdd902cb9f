"""Measure how many bytes this rank holds, by kind, while a step runs.

Weights, gradients and optimizer states are the storages of tensors that are known; what offloading keeps on the device
and on the host it counts itself. The rest of what the allocator has handed out is divided by time: what was there when
the step began is `other` (inputs, buckets of gradients, without a GPU also Python), and what has come since then is
`activations`. Torch's allocator counts on a GPU. Without one, the C library's does, which takes 4 µs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

import torch

from smpkit.observe.events import UNKNOWN
from smpkit.torch.core import devices, offloader
from smpkit.torch.core.runtime import state

__all__ = ["Held", "HeldMemory"]

_NoTorchFunction: Final = torch._C.DisableTorchFunction
_SETTLED: Final = 4
_EVERY: Final = 64
"""How many steps lie between two looks at all parameters of a model, after its first ones."""


Held: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]
"""The values of a `HeldBytes`, in the order of its fields: one is made after each action of a step."""


class HeldMemory:
    """Measures this rank's memory; one for the life of a job."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._weights = 0
        self._parameters: list[tuple[torch.Tensor, int]] = []
        """Those that may have gradients, and how large these would be."""
        self._all_gradients = 0
        self._gradients = 0
        self._states = 0
        self._num_states = -1
        self._other = UNKNOWN
        self._device = state.device

    def begin_step(self) -> Held:
        """Measure again what changes between steps only."""
        # Parameters seldom change after the first steps, which place, cast and shard them.
        if self._num_steps < _SETTLED or self._num_steps % _EVERY == 0:
            self._measure_model()
        self._num_steps += 1
        self._device = state.device  # asked for once in a step: it costs more than what is measured
        self._measure_optimizer()
        self._gradients = self._gradient_bytes()
        use, allocated = offloader.current().use(), _allocated_bytes(self._device)
        known = self._weights + self._gradients + self._states + use.parked
        # Less than the weights: another allocator serves torch than the one that was asked.
        self._other = UNKNOWN if allocated is None or allocated < self._weights else max(0, allocated - known)
        return self.now()

    def now(self, *, gradients_may_be_new: bool = True) -> Held:
        """Measure.

        Args:
            gradients_may_be_new: whether a backward may have run since the last time.
        """
        if gradients_may_be_new and self._gradients < self._all_gradients:
            self._gradients = self._gradient_bytes()
        use, activations = offloader.current().use(), UNKNOWN
        allocated = _allocated_bytes(self._device)
        if self._other != UNKNOWN and allocated is not None:
            known = self._weights + self._gradients + self._states + use.parked + self._other
            activations = max(0, allocated - known)
        return (
            self._weights,
            self._gradients,
            self._states,
            activations,
            use.parked,
            use.offloaded,
            self._other,
            use.bytes_out,
            use.bytes_back,
        )

    # --- what is held between steps -----------------------------------------------------------------------------------

    def _measure_model(self) -> None:
        model = state.model
        if model is None:
            return
        tensors = [*model.local_parameters(), *_local_buffers(model)]
        self._weights = _storage_bytes(tensors)
        self._parameters = [
            (each, _num_bytes(each)) for each in tensors if isinstance(each, torch.nn.Parameter) and each.requires_grad
        ]
        self._all_gradients = sum(size for _, size in self._parameters)

    def _measure_optimizer(self) -> None:
        optimizer = state.optimizer
        if optimizer is None:
            return
        states: Any = getattr(optimizer.optimizer, "state", {})
        if len(states) == self._num_states:
            return
        self._num_states = len(states)
        masters = [] if optimizer.masters is None else optimizer.masters.masters().values()
        self._states = _storage_bytes([*_tensors_of(states), *masters])

    def _gradient_bytes(self) -> int:
        with _NoTorchFunction():  # the streams of random numbers see what is asked of tensors during a step
            return sum([size for parameter, size in self._parameters if parameter.grad is not None])


def _local_buffers(model: Any) -> Iterable[torch.Tensor]:
    found = getattr(model, "local_buffers", None)
    return () if found is None else found()


def _tensors_of(states: Any) -> Iterator[torch.Tensor]:
    for kept in states.values():
        for value in kept.values() if isinstance(kept, dict) else ():
            if isinstance(value, torch.Tensor):
                yield value


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of distinct storages."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        part = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if part.device.type != "meta" and part.layout is torch.strided:
            storage = part.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _num_bytes(tensor: torch.Tensor) -> int:
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.numel() * part.element_size()


# --- the allocator ----------------------------------------------------------------------------------------------------


class _MallInfo(ctypes.Structure):
    """The result of `mallinfo2`, of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _find_mallinfo() -> Any:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo
    return function


_mallinfo: Final = _find_mallinfo()


def _allocated_bytes(device: torch.device) -> int | None:
    """Return what the allocator of a device has handed out; None if it does not tell."""
    if devices.is_asynchronous(device):
        return devices.memory_bytes(device)
    if _mallinfo is None:
        return None
    counted = _mallinfo()
    return int(counted.uordblks + counted.hblkhd)
