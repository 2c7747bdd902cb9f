"""What lies on the device: asked of CUDA, or counted where the CPU plays the device."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

import torch
from model import make_model
from torch import Tensor

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.testing import EmulatedLink


def warm_up(device: torch.device) -> None:
    """Train a tiny model, so that code, kernels and threads, which every process needs once, are there."""
    network = make_model(64, 1, 1)
    links = (EmulatedLink(), EmulatedLink()) if device.type == "cpu" else None
    model = OffloadModel(network, device, checkpoint_activation=True, links=links)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_grad_norm=1.0)
    for _ in range(2):
        model(torch.zeros(2, 1, dtype=torch.long)).logsumexp(-1).sum().backward()
        optimizer.step()
    model.synchronize()


class DeviceMeter:
    """Used as a context around forward and backward.

    On the CPU it counts what autograd keeps while a slice runs again, each storage once; weights, gradients and borders
    are added from what the model holds.
    """

    def __init__(self, device: torch.device, model: OffloadModel) -> None:
        self._model = model
        self._device = device
        self._live: Counter[int] = Counter()
        self._bytes = 0
        self._peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._hooks.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        if self._device.type == "cuda":
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))

    def peak_bytes(self) -> int:
        """Return the most that was on the device."""
        return self._peak if self._device.type == "cuda" else self._peak + self._model.device_buffer_bytes

    def _pack(self, tensor: Tensor) -> _Kept:
        return _Kept(self, tensor)

    def is_weight(self, tensor: Tensor) -> bool:
        return self._model.is_weight(tensor)

    def add(self, storage: int, num_bytes: int) -> None:
        self._live[storage] += 1
        if self._live[storage] == 1:
            self._bytes += num_bytes
            self._peak = max(self._peak, self._bytes)

    def remove(self, storage: int, num_bytes: int) -> None:
        self._live[storage] -= 1
        if not self._live[storage]:
            self._bytes -= num_bytes


class _Kept:
    """A tensor that autograd keeps, counted as long as it does."""

    def __init__(self, meter: DeviceMeter, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor
        # Weights are views of the model's buffers on the device, which are counted as such.
        self._counted = (storage.data_ptr(), 0 if meter.is_weight(tensor) else storage.nbytes())
        self._meter = meter
        meter.add(*self._counted)

    def __del__(self) -> None:
        self._meter.remove(*self._counted)
