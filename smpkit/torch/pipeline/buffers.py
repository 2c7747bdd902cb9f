"""Memory that messages arrive in, used again as soon as the last tensor in it is gone.

A large block that is freed goes back to the system, and its next use costs a page fault per 4 KiB: for a message of
8 MiB about as long as copying it. Nobody can know how long a received value is needed: its graph saves it, the user's
code keeps it, a view of it is returned. So each block is lent as an array of its own, which torch holds as long as any
tensor uses its memory, and which gives the block back when it dies.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from smpkit.torch.pipeline.specs import TensorSpec

__all__ = ["HostBuffers"]

_SMALLEST_BYTES: Final = 256 * 1024
"""Below that, memory comes from what the process has at hand anyway."""


class HostBuffers:
    """The memory of one rank's received messages."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        self._used: set[int] = set()
        """Sizes in bytes that were asked for since the last `trim`."""

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor of this shape and dtype, with whatever is in it."""
        num_bytes = spec.num_bytes
        if num_bytes < _SMALLEST_BYTES:
            return torch.empty_strided(spec.shape, spec.dense_stride, dtype=spec.dtype, device="cpu")
        self._used.add(num_bytes)
        free = self._free.setdefault(num_bytes, [])
        block = free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy()
        lent = block.view()
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(spec.dtype).view(spec.shape)

    def trim(self) -> None:
        """Give up free memory of sizes that were not asked for since the last time: batches have changed."""
        self._free = {num_bytes: blocks for num_bytes, blocks in self._free.items() if num_bytes in self._used}
        self._used.clear()
