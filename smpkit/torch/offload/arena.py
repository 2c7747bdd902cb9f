"""Host memory for what leaves the device: taken once, exact to the page, and used again and again.

torch's own pinned memory is rounded up to powers of two (20 GiB of tensors can take 32) and is bought per tensor.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.torch.offload.link import Event
from smpkit.torch.offload.pages import LARGE_PAGE, PAGE, SLAB, SlabProvider

__all__ = [
    "ALIGNMENT",
    "Arena",
    "Block",
    "ContiguousSpec",
    "HostAllocator",
    "aligned",
    "ordinary_memory",
    "release_all",
]

ContiguousSpec = tuple[torch.dtype, torch.Size]
"""Type and size of a contiguous tensor that is all of its storage."""

ALIGNMENT: Final = 256
"""Bytes: where a GPU's copies begin."""
_SLACK: Final = 64
"""The arena grows by at least 1/64 of its size, which bounds both the number of mappings and what is unused."""
_FIRST: Final = 64 << 20
"""What a slab provider has ready before anything is known of what will be wanted."""
_SPARE: Final = 32
"""Of a prepared slab up to 1/32 may stay unused."""
_MAX_SPECS: Final = 8

HostAllocator = Callable[[int], tuple[Tensor, Callable[[], object]]]
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
        "_views_by_specs",
        "bytes",
        "free_after",
        "last_uses",
        "num_bytes",
        "num_users",
        "offset",
        "size",
        "slab",
        "specs",
        "views",
    )

    def __init__(self, slab: Tensor, offset: int, size: int, free_after: tuple[Event, ...] = ()) -> None:
        self.slab = slab
        self.offset = offset
        self.size = size
        self.num_bytes = size
        self.bytes = slab[offset : offset + size]
        self.free_after = free_after
        self.num_users = 0
        """How many of those that share the block, a piece each, are not done with it."""
        self.last_uses: list[Event] = []
        """Of those that are done."""
        self.specs: list[ContiguousSpec] = []
        """What `views_of` was called with last, and returned as `views`: the next step wants the same."""
        self.views: list[Tensor] = []
        self._views_by_specs: dict[tuple[ContiguousSpec, ...], list[Tensor]] = {}

    def views_of(self, specs: list[ContiguousSpec]) -> list[Tensor]:
        """Return contiguous tensors of these types and sizes, one after the other; kept for the next step."""
        if specs == self.specs:
            return self.views
        key = tuple(specs)
        found = self._views_by_specs.get(key)
        if found is None:
            if len(self._views_by_specs) >= _MAX_SPECS:
                self._views_by_specs.clear()
            found = self._views_by_specs[key] = list(self._cut(specs))
        self.specs, self.views = specs, found
        return found

    def _cut(self, specs: list[ContiguousSpec]) -> Iterator[Tensor]:
        begin = self.offset
        for dtype, size in specs:
            num_bytes = size.numel() * dtype.itemsize
            yield self.slab[begin : begin + num_bytes].view(dtype).view(size)
            begin += aligned(num_bytes)

    def fit(self, num_bytes: int) -> None:
        """Make `bytes` exactly so long."""
        self.num_bytes = num_bytes
        self.bytes = self.slab[self.offset : self.offset + num_bytes]


@dataclass(eq=False)
class _Slab:
    """Memory of the system, in one piece."""

    tensor: Tensor
    release: Callable[[], object]
    high_water: int = 0
    """How much of it, from its begin, has been cut into blocks."""


@dataclass(eq=False)
class _Range:
    """Free memory that has no size class yet."""

    slab: Tensor
    offset: int
    size: int
    free_after: tuple[Event, ...]


class Arena:
    """Blocks of host memory under a budget. `take` belongs to one thread at a time; `free` may be called anywhere.

    [Note: memory ahead of its use] Nobody knows before the first forward how much will leave, unless a pipeline says so
    (`reserve`), and pinning memory in it takes longer than its layers do. So while a step uses more than any before it,
    and less than half is free, a thread makes as much ready as there is, 1 GiB at most. When the step is over, what it
    has not come to goes back to the system, and a slab that it has used in part is replaced by one of that size.

    Args:
        budget_bytes: never holds more; None: as much as there is.
        memory: where the memory comes from.
        synchronize: called before memory goes back to the system: blocks until no copy reads or writes it any more.
            When it raises, the memory stays.
        provider: makes the next slab ready while this one is used up; see [Note: memory ahead of its use].

    Raises:
        UsageError: a budget that is not positive.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        memory: HostAllocator = ordinary_memory,
        synchronize: Callable[[], object] | None = None,
        provider: SlabProvider | None = None,
    ) -> None:
        if budget_bytes is not None and budget_bytes < 1:
            raise UsageError(f"a host memory budget of {budget_bytes} bytes holds nothing")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.mapped_bytes = 0
        self.num_slabs = 0
        """How often memory was taken from the system."""
        self._memory = memory
        self._synchronize = synchronize
        self._free: dict[int, list[Block]] = {}
        self._cut: Counter[int] = Counter()
        """How many blocks there are of each size, taken or free."""
        self._ranges: list[_Range] = []
        # Blocks come back from destructors, which run at any time in any thread, perhaps inside `take`: appending to a
        # deque needs no lock, and leaves what `take` is about to change alone.
        self._returned: deque[Block] = deque()
        self._releases: list[Callable[[], object]] = []
        self._slabs: dict[int, _Slab] = {}
        """By address; only with a slab provider."""
        self._num_taken = 0
        self._max_step_bytes = 0
        """What a step has used, at most, of those that are over."""
        self._trimmed_bytes = 0
        self._provider = provider
        if provider is not None:
            self._prepare(provider, _FIRST)
            weakref.finalize(self, provider.close).atexit = False
        # Not at the end of the process, which gives all back at once, and which a GPU that hangs must not hold up.
        weakref.finalize(self, release_all, self._releases, synchronize).atexit = False

    @property
    def num_blocks(self) -> int:
        """How many blocks are taken and not given back."""
        self._collect()
        return self._num_taken

    def take(self, num_bytes: int) -> Block | None:
        """Return a block of so many bytes; None if the budget (or the machine) has no more."""
        if self._returned:
            self._collect()
        size = aligned(num_bytes or 1)
        same = self._free.get(size)
        block = same.pop() if same else self._carve(size)
        if block is not None:
            self._num_taken += 1
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            if block.num_bytes != num_bytes:
                block.fit(num_bytes)
        return block

    def free(self, block: Block, after: Sequence[Event] = ()) -> None:
        """Return a block; the next one to write to it waits for `after` (its last readers and writers)."""
        block.free_after = tuple(after)
        self._returned.append(block)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have blocks for pieces of these sizes in all, taken ones included, as far as the budget goes.

        So `take` need not go to the system, which can wait for the device, in the middle of a step.
        """
        wanted = Counter(aligned(num_bytes or 1) for num_bytes in sizes)
        if all(self._cut[size] >= count for size, count in wanted.items()):
            return
        self._collect()
        self._coalesce(keep=wanted)
        missing = [size for size, count in wanted.items() for _ in range(count - self._cut[size])]
        missing.sort(reverse=True)  # small ones fit into what large ones leave
        beyond = [size for size in missing if not self._add_free_block(size, ())]
        for place, size in enumerate(beyond):
            if not self._add_free_block(size, beyond[place:]):
                return

    def close(self) -> None:
        """Give all memory back to the system; blocks must not be used any more."""
        if self._provider is not None:
            self._provider.close()
        release_all(self._releases, self._synchronize)  # while the memory is there: it goes with the last tensor
        self._free.clear()
        self._cut.clear()
        self._ranges.clear()
        self._slabs.clear()
        self._returned.clear()
        self.mapped_bytes = self.used_bytes = self._num_taken = 0

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        self._collect()
        self._max_step_bytes = max(self._max_step_bytes, self.peak_bytes)
        self.peak_bytes = self.used_bytes
        if self._provider is not None:
            self._trim(self._provider)

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
            self._num_taken -= 1
            self.used_bytes -= block.size

    def _add_free_block(self, size: int, upcoming: Sequence[int]) -> bool:
        """Have one more free block of a size, from what is left of slabs; `upcoming`: or from the system."""
        found = self._smallest_fit(size) or (self._grow(size, upcoming) if upcoming else None)
        if found is None:
            return False
        self._free.setdefault(size, []).append(self._block(found, size))
        return True

    def _carve(self, size: int) -> Block | None:
        """Cut a block of a new size: from what is left of a slab, from blocks of other sizes, or from the system."""
        found = self._smallest_fit(size)
        if found is None:
            self._coalesce()
            found = self._smallest_fit(size)
        if found is None:
            found = self._grow(size)
        if self._provider is not None:
            used = self.used_bytes + size
            if used > self._max_step_bytes and 2 * (self.mapped_bytes - used) < self.mapped_bytes:
                # A multiple of what is wanted now: layers are alike.
                self._prepare(self._provider, max(1, min(self.mapped_bytes, SLAB) // size) * size, size)
        return None if found is None else self._block(found, size)

    def _prepare(self, provider: SlabProvider, num_bytes: int, least: int = PAGE) -> None:
        """Let the provider prepare this much, or what is left of the budget, unless that is too little."""
        left = self._budget_left()
        wanted = -(-num_bytes // PAGE) * PAGE if left is None else min(num_bytes, left) // PAGE * PAGE
        if wanted >= least:
            provider.prepare(wanted)

    def _budget_left(self) -> int | None:
        """Return how much of the budget nobody has, the provider included."""
        held = self.mapped_bytes + (0 if self._provider is None else self._provider.held_bytes)
        return None if self.budget_bytes is None else max(0, self.budget_bytes - held)

    def _take_prepared(self, provider: SlabProvider, size: int) -> _Range | None:
        """Return the slab that is ready or on its way, if it is large enough; if not, make room for one that is."""
        left = self._budget_left()
        if 0 < provider.num_bytes < size and (left is None or left >= size):
            provider.drop()
            return None
        slab = provider.take()
        if slab is None or slab[0].nbytes >= size:
            return None if slab is None else self._add_slab(*slab)
        slab[1]()  # here and now: the budget has no room for both
        return None

    def _add_slab(self, tensor: Tensor, release: Callable[[], object]) -> _Range:
        """Take over memory of the system."""
        self._releases.append(release)
        if self._provider is not None:
            self._slabs[tensor.data_ptr()] = _Slab(tensor, release)
        self.mapped_bytes += tensor.nbytes
        self.num_slabs += 1
        self._ranges.append(_Range(tensor, 0, tensor.nbytes, ()))
        return self._ranges[-1]

    def _trim(self, provider: SlabProvider) -> None:
        """Give back what a step has not come to; see [Note: memory ahead of its use]."""
        provider.drop()
        if self.mapped_bytes == self._trimmed_bytes:
            return
        self._coalesce()
        is_complete, exact = True, 0
        for found in list(self._ranges):
            slab = self._slabs[found.slab.data_ptr()]
            size, high_water = found.slab.nbytes, slab.high_water
            left = self._budget_left()
            if size - high_water <= (max(LARGE_PAGE, size // _SPARE) if high_water else 0):
                continue
            if found.size < size:
                is_complete = False  # a graph lives: at the end of the next step
                continue
            if left is not None and left < exact + high_water:
                continue  # both are there for a while
            exact += high_water
            self._ranges.remove(found)
            del self._slabs[found.slab.data_ptr()]
            self._releases.remove(slab.release)
            self.mapped_bytes -= size
            provider.give_back(size, slab.release, found.free_after)
        if exact:
            self._prepare(provider, exact)
        self._trimmed_bytes = self.mapped_bytes + provider.num_bytes if is_complete else 0

    def _block(self, found: _Range, size: int) -> Block:
        """Cut a block off a range."""
        block = Block(found.slab, found.offset, size, _unfinished(found.free_after))
        self._cut[size] += 1
        found.offset += size
        found.size -= size
        if self._slabs:
            slab = self._slabs[found.slab.data_ptr()]
            slab.high_water = max(slab.high_water, found.offset)
        if not found.size:
            self._ranges.remove(found)
        return block

    def _smallest_fit(self, size: int) -> _Range | None:
        return min((each for each in self._ranges if each.size >= size), key=lambda each: each.size, default=None)

    def _coalesce(self, keep: Mapping[int, int] | None = None) -> None:
        """Turn free blocks of all sizes into ranges, neighbours into one; but leave so many of some sizes."""
        loose = list(self._ranges)
        for size, same in list(self._free.items()):
            spare = self._cut[size] - (keep or {}).get(size, 0)
            while same and spare > 0:
                block = same.pop()
                spare -= 1
                self._cut[size] -= 1
                loose.append(_Range(block.slab, block.offset, block.size, block.free_after))
        self._ranges = list(_coalesced(sorted(loose, key=lambda each: (each.slab.data_ptr(), each.offset))))

    def _grow(self, size: int, upcoming: Sequence[int] = ()) -> _Range | None:
        """Take memory from the system, a little more than is wanted now.

        Args:
            size: what is wanted now.
            upcoming: sizes that will be wanted, this one first: then for as many as a slab holds, and no more.
        """
        if self._provider is not None and (supplied := self._take_prepared(self._provider, size)) is not None:
            return supplied
        left = self._budget_left()
        if left is not None and left < size:
            return None
        if upcoming:
            wanted = max((total for total in accumulate(upcoming) if total <= SLAB), default=size)
        else:
            wanted = max(size, min(self.mapped_bytes // _SLACK, SLAB))
        wanted = -(-wanted // PAGE) * PAGE
        num_bytes = wanted if left is None else min(wanted, left // ALIGNMENT * ALIGNMENT)
        try:
            return self._add_slab(*self._memory(num_bytes))
        except (MemoryError, OSError, RuntimeError):
            return None  # the machine has no more, which is what an unwise budget comes to


def _coalesced(ranges: list[_Range]) -> Iterator[_Range]:
    current: _Range | None = None
    for each in ranges:
        if current is not None and each.slab is current.slab and each.offset == current.offset + current.size:
            current.size += each.size
            current.free_after = _unfinished((*current.free_after, *each.free_after))
            continue
        if current is not None:
            yield current
        current = each
    if current is not None:
        yield current


def _unfinished(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(event for event in events if not event.done())


def release_all(releases: list[Callable[[], object]], synchronize: Callable[[], object] | None) -> None:
    """Give memory back, once no copy reads or writes it any more (see `Arena`)."""
    if synchronize is not None and releases:
        synchronize()
    while releases:
        releases.pop()()
