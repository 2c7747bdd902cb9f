"""Copies between host and device, counted by kind, and the pinned host memory for weights and gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from smpkit.torch.core import devices
from smpkit.torch.distributed.host_memory import pinned_bytes
from smpkit.torch.offload.link import DONE, Copies, Event, Link

__all__ = ["DEADLINE_SECONDS", "HostBuffers", "Traffic", "Transfers", "flat_bytes", "is_dense"]

DEADLINE_SECONDS: Final = 600.0
"""No copy or update of one slice takes this long: a longer wait is a bug or a dead machine, and an error."""
_CHUNK_BYTES: Final = 32 << 20
"""A GPU's copy engine finishes a copy before it starts another: others then wait for a chunk, not for a slice."""


@dataclass
class Traffic:
    """Bytes that have crossed the link since the model was made."""

    weights_in: int = 0
    weights_out: int = 0
    """Only weights that a forward writes to."""
    gradients_out: int = 0
    boundaries_out: int = 0
    boundaries_in: int = 0
    """Outputs of slices, their gradients in backward, and inputs of the model that were on the host."""


class Transfers:
    """Copies between host and device beside the computation.

    Args:
        link: of the device. Weights and gradients have a link of their own, or boundary tensors would queue behind
            whole slices.
        traffic: where bytes are counted.
    """

    def __init__(self, link: Link, traffic: Traffic) -> None:
        self.link = link
        self._traffic = traffic

    def send(
        self,
        kind: Literal["gradients_out", "boundaries_out", "weights_out"],
        source: Tensor,
        target: Tensor,
        after: Sequence[Event],
    ) -> Event:
        """Copy flat bytes to the host; the caller keeps both tensors alive until the event."""
        self._count(kind, source)
        return self.link.send(_chunks(source, target), after) if source.nbytes else DONE

    def fetch(
        self,
        kind: Literal["weights_in", "boundaries_in"],
        source: Tensor,
        target: Tensor,
        after: Sequence[Event],
    ) -> Event:
        """Copy flat bytes to the device; the caller keeps both tensors alive until the event."""
        self._count(kind, source)
        return self.link.fetch(_chunks(source, target), after) if source.nbytes else DONE

    def _count(self, kind: str, source: Tensor) -> None:
        setattr(self._traffic, kind, getattr(self._traffic, kind) + source.nbytes)


class HostBuffers:
    """Host memory that a device can copy from and to while it computes; exact in size, not in powers of two.

    Args:
        link: the device's, which makes all copies from this memory and to it.
    """

    def __init__(self, link: Link) -> None:
        self._device = link.device
        self._kept: list[Tensor] = []
        # Memory is unpinned with its last reference, which may be a user's. Not at exit: the end of the process must
        # not wait for a GPU that hangs.
        weakref.finalize(self, link.close).atexit = False

    def zeros(self, num_bytes: int) -> Tensor:
        """Return a flat uint8 tensor of zeros."""
        tensor = pinned_bytes(self._device, num_bytes)
        if devices.has_streams(self._device):
            self._kept.append(tensor)  # as long as the model: a copy may still read what nobody else refers to
        return tensor


def _chunks(source: Tensor, target: Tensor) -> Copies:
    if source.nbytes <= _CHUNK_BYTES:
        return [(source, target)]
    return list(zip(torch.split(source, _CHUNK_BYTES), torch.split(target, _CHUNK_BYTES), strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory as a flat uint8 tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
