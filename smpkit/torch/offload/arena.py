"""Host memory for activations: pinned once, in slabs, and used again in every step.

A block is cut from the first free range that holds it, and joins its neighbours when it is freed. Layers are alike, so
after the first step every block fits where one was. Over a pipeline, `reserve` pins before the second step what all
live microbatches need; without one, the first step pins as it goes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final

from torch import Tensor

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.distributed.host_memory import available_bytes, mapped_bytes, pinned_bytes
from smpkit.torch.offload.link import DONE, Event, Link

ALIGNMENT: Final = 256
"""Bytes: where a GPU's copies begin."""
_SLAB: Final = 256 << 20
"""The least that is taken from the system at a time, if the budget has it: torch, too, rounds this up to itself."""
_FREE_SHARE: Final = 0.75
"""The part of free memory to use: data loaders, checkpoints and other processes need the rest."""

Allocate = Callable[[int], Tensor]
"""Returns so many bytes of the host; raises MemoryError, OSError or RuntimeError where there are no more."""


def aligned(num_bytes: int) -> int:
    """Return how much of a block a piece of this many bytes takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class _Range:
    """Memory of a slab."""

    slab: int
    offset: int
    size: int
    last_read: Event = DONE
    """The latest copy back from it: these end in order. Copies to the host are made in order anyway."""


class Block:
    """A piece of the arena; free again when nobody refers to it any more."""

    def __init__(self, arena: Arena, place: _Range, memory: Tensor) -> None:
        self._arena, self._place = arena, place
        self.memory = memory
        """A flat uint8 tensor."""
        self.after = self.last_read = place.last_read
        """What must be over before this owner writes to the block, and before the next one does."""

    def __del__(self) -> None:
        self._place.last_read = self.last_read
        # Graphs end at any time in any thread, perhaps inside `take`: appending to a deque needs no lock.
        self._arena.returned.append(self._place)


class Arena:
    """Blocks of host memory under a budget; None: no bound. `take` belongs to one thread at a time.

    Args:
        finish: blocks until no copy uses the memory; called before it goes back to the system.
    """

    def __init__(
        self, budget_bytes: int | None, allocate: Allocate, finish: Callable[[], object] = lambda: None
    ) -> None:
        if budget_bytes is not None and budget_bytes < 1:
            raise UsageError(f"a host memory budget of {budget_bytes} bytes holds nothing")
        self.budget_bytes = budget_bytes
        self.mapped_bytes = self.used_bytes = self.peak_bytes = 0
        self.returned: deque[_Range] = deque()
        self._allocate = allocate
        self._slabs: list[Tensor] = []
        self._free: list[_Range] = []
        # Not at exit: the end of the process frees everything anyway, and must not wait for a GPU that hangs.
        weakref.finalize(self, finish).atexit = False

    def take(self, num_bytes: int) -> Block | None:
        """Return a block of at least this many bytes; None if the budget, or the machine, has no more."""
        self.collect()
        size = aligned(max(1, num_bytes))
        free = next((free for free in self._free if free.size >= size), None) or self._grow(size)
        if free is None:
            return None
        place = _Range(free.slab, free.offset, size, free.last_read)
        free.offset, free.size = free.offset + size, free.size - size
        if not free.size:
            self._free.remove(free)
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Block(self, place, self._slabs[place.slab][place.offset : place.offset + size])

    def reserve(self, num_bytes: int) -> None:
        """Have so many bytes in all, used or not, as far as the budget goes.

        A step that asks the system for memory can wait for the device.
        """
        missing = num_bytes - self.mapped_bytes
        if self.budget_bytes is not None:
            missing = min(missing, self.budget_bytes - self.mapped_bytes)
        if missing > 0:
            self._grow(missing)

    def collect(self) -> None:
        """Take back the blocks that are free, and join neighbours."""
        if not self.returned:
            return
        while self.returned:
            place = self.returned.popleft()
            self.used_bytes -= place.size
            self._free.append(place)
        ranges, self._free = sorted(self._free, key=attrgetter("slab", "offset")), []
        for place in ranges:
            before = self._free[-1] if self._free else None
            if before is None or (before.slab, before.offset + before.size) != (place.slab, place.offset):
                self._free.append(place)
                continue
            before.size += place.size
            before.last_read = max(before.last_read, place.last_read, key=lambda event: event.number)

    def _grow(self, size: int) -> _Range | None:
        """Take a slab from the system; None if it has none."""
        left = None if self.budget_bytes is None else self.budget_bytes - self.mapped_bytes
        if left is not None and left < size:
            return None
        num_bytes = max(size, _SLAB if left is None else min(_SLAB, left))
        try:
            self._slabs.append(self._allocate(num_bytes))
        except (MemoryError, OSError, RuntimeError):
            return None  # the budget was more than the machine has
        self.mapped_bytes += num_bytes
        slab = _Range(len(self._slabs) - 1, 0, num_bytes)
        self._free.append(slab)
        return slab


def arena_for(link: Link, budget_bytes: int | None, num_sharers: int = 1) -> Arena:
    """Return host memory for a device's link.

    Args:
        budget_bytes: the most that it takes; None: this process's part of three quarters of what is free.
        num_sharers: how many processes of this machine do the same.
    """
    free = available_bytes()
    if budget_bytes is None and free is not None:
        budget_bytes = max(1, int(_FREE_SHARE * free) // num_sharers)
    pinned = devices.has_streams(link.device)
    allocate = partial(pinned_bytes, link.device) if pinned else partial(mapped_bytes, in_large_pages=False)
    return Arena(budget_bytes, allocate, link.before_free)
