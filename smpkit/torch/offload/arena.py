"""Host memory for what leaves the device: taken once, exact to the page, and used again and again.

torch's own pinned memory is rounded up to powers of two (20 GiB of tensors can take 32) and is bought per tensor.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.torch.offload.link import Event

__all__ = ["ALIGNMENT", "Arena", "Block", "Form", "HostMemory", "aligned", "ordinary_memory"]

Form = tuple[torch.dtype, torch.Size]
"""Type and size of a contiguous tensor that is all of its storage."""

ALIGNMENT: Final = 256
"""Bytes: where a GPU's copies begin."""
_PAGE: Final = 4096
_SLACK: Final = 64
"""The arena grows by at least 1/64 of its size, which bounds both the number of mappings and what is unused."""
_MOST_AHEAD: Final = 64 << 20
_MOST_FORMS: Final = 8

HostMemory = Callable[[int], tuple[Tensor, Callable[[], object]]]
"""Given a number of bytes, returns a flat uint8 tensor of them, and what gives them back to the system."""


def aligned(num_bytes: int) -> int:
    """Return how much a piece of so many bytes takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def ordinary_memory(num_bytes: int) -> tuple[Tensor, Callable[[], object]]:
    """Return memory that is not pinned, for machines without a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), lambda: None


class Block:
    """A piece of the arena.

    `bytes` is a flat tensor of exactly what was asked for; whoever writes to it waits for `free_after` first.
    """

    __slots__ = (
        "_shaped",
        "bytes",
        "forms",
        "free_after",
        "last_uses",
        "num_bytes",
        "num_users",
        "offset",
        "pieces",
        "segment",
        "size",
    )

    def __init__(self, segment: Tensor, offset: int, size: int, free_after: tuple[Event, ...] = ()) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.num_bytes = size
        self.bytes = segment[offset : offset + size]
        self.free_after = free_after
        self.num_users = 0
        """How many of those that share the block, a piece each, are not done with it."""
        self.last_uses: list[Event] = []
        """Of those that are done."""
        self.forms: list[Form] = []
        """What `shaped` was called with last, and returned as `pieces`: the next step wants the same."""
        self.pieces: list[Tensor] = []
        self._shaped: dict[tuple[Form, ...], list[Tensor]] = {}

    def shaped(self, forms: list[Form]) -> list[Tensor]:
        """Return contiguous tensors of these types and sizes, one after the other; kept for the next step."""
        if forms == self.forms:
            return self.pieces
        key = tuple(forms)
        found = self._shaped.get(key)
        if found is None:
            if len(self._shaped) >= _MOST_FORMS:
                self._shaped.clear()
            found = self._shaped[key] = list(self._cut(forms))
        self.forms, self.pieces = forms, found
        return found

    def _cut(self, forms: list[Form]) -> Iterator[Tensor]:
        begin = self.offset
        for dtype, size in forms:
            num_bytes = size.numel() * dtype.itemsize
            yield self.segment[begin : begin + num_bytes].view(dtype).view(size)
            begin += aligned(num_bytes)

    def fit(self, num_bytes: int) -> None:
        """Make `bytes` exactly so long."""
        self.num_bytes = num_bytes
        self.bytes = self.segment[self.offset : self.offset + num_bytes]


@dataclass(eq=False)
class _Range:
    """Free memory that has no size class yet."""

    segment: Tensor
    offset: int
    size: int
    free_after: tuple[Event, ...]


class Arena:
    """Blocks of host memory under a budget. `take` belongs to one thread at a time; `give` may be called anywhere.

    Args:
        budget_bytes: never holds more; None: as much as there is.
        memory: where the memory comes from.

    Raises:
        UsageError: a budget that is not positive.
    """

    def __init__(self, budget_bytes: int | None = None, memory: HostMemory = ordinary_memory) -> None:
        if budget_bytes is not None and budget_bytes < 1:
            raise UsageError(f"a host memory budget of {budget_bytes} bytes holds nothing")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.mapped_bytes = 0
        self._memory = memory
        self._free: dict[int, list[Block]] = {}
        self._ranges: list[_Range] = []
        # Blocks come back from destructors, which run at any time in any thread, perhaps inside `take`: appending to a
        # deque needs no lock, and leaves what `take` is about to change alone.
        self._returned: deque[Block] = deque()
        self._releases: list[Callable[[], object]] = []
        self._taken = 0
        weakref.finalize(self, _release_all, self._releases)

    @property
    def num_blocks(self) -> int:
        """How many blocks are taken and not given back."""
        self._collect()
        return self._taken

    def take(self, num_bytes: int) -> Block | None:
        """Return a block of so many bytes; None if the budget (or the machine) has no more."""
        if self._returned:
            self._collect()
        size = aligned(num_bytes or 1)
        same = self._free.get(size)
        block = same.pop() if same else self._carve(size)
        if block is not None:
            self._taken += 1
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            if block.num_bytes != num_bytes:
                block.fit(num_bytes)
        return block

    def give(self, block: Block, after: Sequence[Event] = ()) -> None:
        """Return a block; the next one to write to it waits for `after` (its last readers and writers)."""
        block.free_after = tuple(after)
        self._returned.append(block)

    def close(self) -> None:
        """Give all memory back to the system; blocks must not be used any more."""
        _release_all(self._releases)  # while the memory is there: it goes with the last tensor
        self._free.clear()
        self._ranges.clear()
        self._returned.clear()
        self.mapped_bytes = self.used_bytes = self._taken = 0

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        self._collect()
        self.peak_bytes = self.used_bytes

    # --- inside ------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Make what was given back ready to be taken."""
        while self._returned:
            block = self._returned.popleft()
            same = self._free.get(block.size)
            if same is None:
                self._free[block.size] = [block]
            else:
                same.append(block)
            self._taken -= 1
            self.used_bytes -= block.size

    def _carve(self, size: int) -> Block | None:
        """Cut a block of a new size: from what is left of a segment, from blocks of other sizes, or from the system."""
        found = self._fitting(size)
        if found is None:
            self._merge()
            found = self._fitting(size)
        if found is None:
            found = self._grow(size)
        if found is None:
            return None
        block = Block(found.segment, found.offset, size, _pending(found.free_after))
        found.offset += size
        found.size -= size
        if not found.size:
            self._ranges.remove(found)
        return block

    def _fitting(self, size: int) -> _Range | None:
        return min((each for each in self._ranges if each.size >= size), key=lambda each: each.size, default=None)

    def _merge(self) -> None:
        """Turn free blocks of all sizes into ranges, neighbours into one."""
        blocks = [block for same in self._free.values() for block in same]
        self._free.clear()
        loose = [*self._ranges, *(_Range(b.segment, b.offset, b.size, b.free_after) for b in blocks)]
        self._ranges = list(_joined(sorted(loose, key=lambda each: (each.segment.data_ptr(), each.offset))))

    def _grow(self, size: int) -> _Range | None:
        left = None if self.budget_bytes is None else self.budget_bytes - self.mapped_bytes
        if left is not None and left < size:
            return None
        ahead = max(size, min(self.mapped_bytes // _SLACK, _MOST_AHEAD))
        wanted = -(-ahead // _PAGE) * _PAGE
        num_bytes = wanted if left is None else min(wanted, left // ALIGNMENT * ALIGNMENT)
        try:
            segment, release = self._memory(num_bytes)
        except (MemoryError, OSError, RuntimeError):
            return None  # the machine has no more, which is what an unwise budget comes to
        self._releases.append(release)
        self.mapped_bytes += num_bytes
        self._ranges.append(_Range(segment, 0, num_bytes, ()))
        return self._ranges[-1]


def _joined(ranges: list[_Range]) -> Iterator[_Range]:
    current: _Range | None = None
    for each in ranges:
        if current is not None and each.segment is current.segment and each.offset == current.offset + current.size:
            current.size += each.size
            current.free_after = _pending((*current.free_after, *each.free_after))
            continue
        if current is not None:
            yield current
        current = each
    if current is not None:
        yield current


def _pending(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(event for event in events if not event.done())


def _release_all(releases: list[Callable[[], object]]) -> None:
    while releases:
        releases.pop()()
