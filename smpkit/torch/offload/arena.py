"""Host memory for activations: taken from the system once, exact to the page, and used again in every step.

torch's own pinned memory is rounded up to powers of two (20 GiB of tensors can take 32) and is allocated per tensor.

::

    Arena          blocks under a budget; keeps freed blocks for the next step
      └ SlabProvider   a thread that pins the next slab (up to 1 GiB) while the arena uses up this one
          └ mapped_bytes   pages of the system, large ones where it has them

Large pages, because the optimizer is bound by memory bandwidth and with pages of 4 KiB can spend half of its time on
address translation, and because a driver that pins memory looks up each page. Linux joins pages only where they are
aligned to 2 MiB, which torch's own memory, 64 bytes behind the start of a page, is not.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.distributed.cores import own_cores
from smpkit.torch.offload.link import Event, Link

__all__ = [
    "ALIGNMENT",
    "LARGE_PAGE",
    "PAGE",
    "SLAB",
    "Arena",
    "Block",
    "ContiguousSpec",
    "Progress",
    "SlabProvider",
    "aligned",
    "container_limit",
    "make_arena",
    "mapped_bytes",
    "ordinary_memory",
    "release_all",
    "touch",
    "zero_bytes",
    "zeros",
]

_log = logging.getLogger("smpkit")

ContiguousSpec = tuple[torch.dtype, torch.Size]
"""Type and size of a contiguous tensor that is all of its storage."""
Slab = tuple[Tensor, Callable[[], object]]
"""A flat uint8 tensor, and what gives its memory back to the system."""
HostAllocator = Callable[[int], Slab]
"""Takes a number of bytes from the system; raises OSError or MemoryError where it has no more."""

PAGE: Final = 4096
LARGE_PAGE: Final = 2 << 20
"""A large page of x86 and ARM; where they are larger still this only aligns."""
SLAB: Final = 1 << 30
"""The most that the arena takes at a time, and that `touch` does between two reports of its progress."""
ALIGNMENT: Final = 256
"""Bytes: where a GPU's copies begin."""
_SLACK: Final = 64
"""The arena grows by at least 1/64 of its size, which bounds both the number of mappings and what is unused."""
_FIRST: Final = 64 << 20
"""What a slab provider prepares before anything is known of what will be wanted."""
_SPARE: Final = 32
"""Of a prepared slab up to 1/32 may stay unused."""
_MAX_SPECS: Final = 8
_FREE_SHARE: Final = 0.75
"""The part of free memory to use: data loaders, checkpoints and other processes need the rest."""
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60
"""Cgroups in version 1 write "none" as a number beyond any machine's memory."""
_PIECE: Final = 64 << 20
_POLL_SECONDS: Final = 2e-3
_MAX_THREADS: Final = 8
"""More do not help: the system hands out pages under locks."""


def aligned(num_bytes: int) -> int:
    """Return how much of a block a piece of this many bytes takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def ordinary_memory(num_bytes: int) -> Slab:
    """Return memory that is not pinned, for machines without a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), lambda: None


class Block:
    """A piece of the arena.

    `bytes` is a flat uint8 tensor of exactly the requested length; whoever writes to it waits for `free_after` first.
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
        """How many of the storages that share the block, a piece each, still need it."""
        self.last_uses: list[Event] = []
        """Copies of the storages that no longer need it."""
        self.specs: list[ContiguousSpec] = []
        """What `views_of` was called with last, and returned as `views`: the next step asks for the same."""
        self.views: list[Tensor] = []
        self._views_by_specs: dict[tuple[ContiguousSpec, ...], list[Tensor]] = {}

    def views_of(self, specs: list[ContiguousSpec]) -> list[Tensor]:
        """Return contiguous tensors of these types and sizes, one after the other; kept for the next step."""
        # Interned specs (`SpecCache`) compare by identity, so this is a fast comparison of two lists.
        if specs == self.specs:
            return self.views
        key = tuple(specs)
        found = self._views_by_specs.get(key)
        if found is None:
            if len(self._views_by_specs) >= _MAX_SPECS:  # shapes vary: do not grow without bound
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
        """Make `bytes` exactly this long."""
        self.num_bytes = num_bytes
        self.bytes = self.slab[self.offset : self.offset + num_bytes]


@dataclass(eq=False)
class _Slab:
    """One piece of memory from the system."""

    tensor: Tensor
    release: Callable[[], object]
    high_water: int = 0
    """How much of it, from its start, has been cut into blocks."""


@dataclass(eq=False)
class _Range:
    """Free memory that has no size class yet."""

    slab: Tensor
    offset: int
    size: int
    free_after: tuple[Event, ...]


class Arena:
    """Blocks of host memory under a budget. `take` belongs to one thread at a time; `free` may be called anywhere.

    [Note: memory ahead of its use] Before the first forward it is unknown how much will leave the device, unless a
    pipeline has reserved memory (`reserve`), and pinning memory takes longer than a layer's forward. So while a step
    uses more than any step before it and less than half of the arena is free, a thread prepares as much again, 1 GiB at
    most. When the step is over, slabs that it did not use go back to the system, and a slab that it used in part is
    replaced by one of exactly that size.

    Args:
        budget_bytes: the most that the arena holds; None: no bound.
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
        # Blocks are freed by destructors, which run at any time in any thread, perhaps inside `take`. Appending to a
        # deque needs no lock and does not touch what `take` is changing.
        self._returned: deque[Block] = deque()
        self._releases: list[Callable[[], object]] = []
        self._slabs: dict[int, _Slab] = {}
        """By address; only with a slab provider."""
        self._num_taken = 0
        self._max_step_bytes = 0
        """The most that any completed step has used."""
        self._trimmed_bytes = 0
        self._provider = provider
        if provider is not None:
            self._prepare(provider, _FIRST)
            weakref.finalize(self, provider.close).atexit = False
        # Not at exit: the end of the process frees everything anyway, and must not wait for a GPU that hangs.
        weakref.finalize(self, release_all, self._releases, synchronize).atexit = False

    @property
    def num_blocks(self) -> int:
        """How many blocks are taken and not freed."""
        self.collect()
        return self._num_taken

    def take(self, num_bytes: int) -> Block | None:
        """Return a block of this many bytes; None if the budget (or the machine) has no more."""
        if self._returned:
            self.collect()
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
        """Provide blocks for pieces of these sizes in all, taken ones included, as far as the budget goes.

        Then `take` need not ask the system in the middle of a step, which can wait for the device.
        """
        wanted = Counter(aligned(num_bytes or 1) for num_bytes in sizes)
        if all(self._cut[size] >= count for size, count in wanted.items()):
            return
        self.collect()
        self._coalesce(keep=wanted)
        missing = list[int]()
        for size, count in wanted.items():
            missing += [size] * (count - self._cut[size])
        missing.sort(reverse=True)  # small blocks fit into what large ones leave
        # First cut from what is there; the rest is then known, and each slab can be taken for several blocks at once.
        beyond = [size for size in missing if not self._add_free_block(size, ())]
        for position, size in enumerate(beyond):
            if not self._add_free_block(size, beyond[position:]):
                return

    def close(self) -> None:
        """Give all memory back to the system; blocks must not be used any more."""
        if self._provider is not None:
            self._provider.close()
        # Before the tensors below are dropped: memory must be unpinned while it is still mapped.
        release_all(self._releases, self._synchronize)
        self._free.clear()
        self._cut.clear()
        self._ranges.clear()
        self._slabs.clear()
        self._returned.clear()
        self.mapped_bytes = self.used_bytes = self._num_taken = 0

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        self.collect()
        self._max_step_bytes = max(self._max_step_bytes, self.peak_bytes)
        self.peak_bytes = self.used_bytes
        if self._provider is not None:
            self._trim(self._provider)

    def collect(self) -> None:
        """Move returned blocks to the free lists."""
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
        """Cut one more free block from what is left of slabs or, given `upcoming` sizes, from the system."""
        found = self._smallest_fit(size)
        if found is None and upcoming:
            found = self._grow(size, upcoming)
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
                # Layers are alike, so a multiple of this size will be used up to the end.
                self._prepare(self._provider, max(1, min(self.mapped_bytes, SLAB) // size) * size, size)
        return None if found is None else self._block(found, size)

    def _prepare(self, provider: SlabProvider, num_bytes: int, least: int = PAGE) -> None:
        """Let the provider prepare this much, or what is left of the budget unless that is less than `least`."""
        left = self._budget_left()
        if left is None:
            wanted = -(-num_bytes // PAGE) * PAGE
        else:
            wanted = min(num_bytes, left) // PAGE * PAGE
        if wanted >= least:
            provider.prepare(wanted)

    def _budget_left(self) -> int | None:
        """Return how much of the budget neither the arena nor its provider holds; None: no bound."""
        if self.budget_bytes is None:
            return None
        held = self.mapped_bytes
        if self._provider is not None:
            held += self._provider.held_bytes
        return max(0, self.budget_bytes - held)

    def _take_prepared(self, provider: SlabProvider, size: int) -> _Range | None:
        """Return the slab that is ready or on its way, if it is large enough; if not, make room for one that is."""
        left = self._budget_left()
        if 0 < provider.num_bytes < size and (left is None or left >= size):
            provider.drop()
            return None
        slab = provider.take()
        if slab is None:
            return None
        memory, release = slab
        if memory.nbytes < size:
            release()  # in this thread, before a larger one is taken: the budget has no room for both
            return None
        return self._add_slab(memory, release)

    def _add_slab(self, tensor: Tensor, release: Callable[[], object]) -> _Range:
        """Take ownership of memory from the system."""
        self._releases.append(release)
        if self._provider is not None:
            self._slabs[tensor.data_ptr()] = _Slab(tensor, release)
        self.mapped_bytes += tensor.nbytes
        self.num_slabs += 1
        self._ranges.append(_Range(tensor, 0, tensor.nbytes, ()))
        return self._ranges[-1]

    def _trim(self, provider: SlabProvider) -> None:
        """Give back what the step did not use; see [Note: memory ahead of its use]."""
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
                is_complete = False  # a live graph has blocks in it: try again after the next step
                continue
            if left is not None and left < exact + high_water:
                continue  # no budget for this slab and its replacement, which exist at the same time for a while
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
        """Turn free blocks into ranges, adjacent ones into one; `keep`: how many blocks of a size to leave."""
        loose = list(self._ranges)
        for size, same in list(self._free.items()):
            spare = self._cut[size] - (keep or {}).get(size, 0)
            while same and spare > 0:
                block = same.pop()
                spare -= 1
                self._cut[size] -= 1
                loose.append(_Range(block.slab, block.offset, block.size, block.free_after))
            if not same:
                del self._free[size]  # sizes vary with the data, without end
            if not self._cut[size]:
                del self._cut[size]
        self._ranges = list(_coalesced(sorted(loose, key=lambda each: (each.slab.data_ptr(), each.offset))))

    def _grow(self, size: int, upcoming: Sequence[int] = ()) -> _Range | None:
        """Take memory from the system, a little more than is needed now; None if it has none.

        Args:
            size: what is needed now.
            upcoming: all sizes that will be needed, this one first: take as many of them as one slab holds.
        """
        if self._provider is not None:
            prepared = self._take_prepared(self._provider, size)
            if prepared is not None:
                return prepared
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
            return None  # the budget was more than the machine has


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
    """Give memory back, once no copy reads or writes it (see `Arena`)."""
    if synchronize is not None and releases:
        synchronize()
    while releases:
        releases.pop()()


def make_arena(link: Link, budget_bytes: int | None, num_sharers: int = 1) -> Arena:
    """Return host memory for a device's link.

    Args:
        link: what copies from it and to it.
        budget_bytes: the most that it takes; None: this process's part of three quarters of what is free.
        num_sharers: how many processes of this machine do the same.
    """
    free = _available_bytes()
    if budget_bytes is None and free is not None:
        budget_bytes = max(1, int(_FREE_SHARE * free) // num_sharers)
    if devices.has_streams(link.device):
        from smpkit.torch.offload.accelerator import pinned_memory

        pinned = partial(pinned_memory, link.device)
        # A new thread's current device is the first GPU, where a context would take half a GiB for each process.
        provider = SlabProvider(pinned, partial(devices.make_current, link.device))
        return Arena(budget_bytes, pinned, synchronize=link.close, provider=provider)
    return Arena(budget_bytes, ordinary_memory)


def _available_bytes() -> int | None:
    """Return the memory that this process can still take, of the machine and of its container; None if unknown."""
    free = list[int]()
    if _MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        free.append(int(fields["MemAvailable"].split()[0]) * 1024)
    if (of_container := _container_bytes()) is not None:
        free.append(of_container)
    return min(free, default=None)


def _container_bytes() -> int | None:
    limit = container_limit()
    used = _number(_CGROUP / "memory.current", _CGROUP / "memory/memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return max(0, limit - max(0, used - _unused_file_bytes()))


def container_limit() -> int | None:
    """Return how much memory this process's container may take; None if that is not bounded."""
    limit = _number(_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes")
    return None if limit is None or limit >= _NO_LIMIT else limit


def _unused_file_bytes() -> int:
    """Return what the container holds of files that nobody has used lately: it counts as used, but is free to take."""
    for file, name in (("memory.stat", "inactive_file"), ("memory/memory.stat", "total_inactive_file")):
        if (_CGROUP / file).exists():
            fields = dict(line.split() for line in (_CGROUP / file).read_text(encoding="ascii").splitlines())
            return int(fields.get(name, 0))
    return 0


def _number(*files: Path) -> int | None:
    """Return the number in the first of these files that exists (cgroups version 2, then 1); None if it has none."""
    for file in files:
        if file.exists():
            text = file.read_text(encoding="ascii").strip()
            return int(text) if text.isdecimal() else None
    return None


@dataclass(frozen=True, eq=False)
class _ToRelease:
    num_bytes: int
    release: Callable[[], object]
    after: tuple[Event, ...]


class SlabProvider:
    """Prepares one slab of memory in a thread before it is needed, and gives slabs back in the same thread.

    Pinning and unpinning take longer than a layer's forward, and the driver may wait for the device, so a step must do
    neither. The thread starts with the first request and ends with `close`.

    Args:
        memory: takes memory from the system.
        begin: called first in the thread.
    """

    def __init__(self, memory: Callable[[int], Slab], begin: Callable[[], object] = lambda: None) -> None:
        self._memory = memory
        self._begin = begin
        self._changed = threading.Condition()
        self._requested = self._request = 0
        """How many bytes are requested and not ready, and the number of that request."""
        self._in_progress = (0, 0)
        """The same for what the thread is preparing; the request may have been dropped since."""
        self._ready: Slab | None = None
        self._to_release: list[_ToRelease] = []
        self._error: Exception | None = None
        self._is_exhausted = False
        """The system had no more memory."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    @property
    def num_bytes(self) -> int:
        """How much is ready or requested."""
        with self._changed:
            return self._requested if self._ready is None else self._ready[0].nbytes

    @property
    def held_bytes(self) -> int:
        """The same, plus what has not been given back yet."""
        with self._changed:
            wanted = (self._requested, self._request) if self._requested else (0, 0)
            abandoned = self._in_progress[0] if self._in_progress != wanted else 0
            return self.num_bytes + abandoned + sum(each.num_bytes for each in self._to_release)

    def prepare(self, num_bytes: int) -> None:
        """Request a slab, unless there is one, or the system had no more memory when last asked."""
        with self._changed:
            if not (self._is_closed or self._is_exhausted or self._requested or self._ready):
                self._requested = num_bytes
                self._request += 1
                self._wake()

    def take(self) -> Slab | None:
        """Return the slab, waiting for one that is requested; None if there is none.

        Raises:
            RuntimeError: the thread has failed; its error is the cause.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._requested)
            error, self._error = self._error, None
            if error is not None:
                raise RuntimeError("the thread that prepares host memory has failed") from error
            slab, self._ready = self._ready, None
            return slab

    def give_back(self, num_bytes: int, release: Callable[[], object], after: Iterable[Event] = ()) -> None:
        """Give memory back to the system, in the thread, when no copy uses it any more.

        Args:
            num_bytes: how much it is.
            release: gives it back.
            after: its last readers and writers.
        """
        with self._changed:
            self._to_release.append(_ToRelease(num_bytes, release, tuple(after)))
            if self._is_closed:
                self._release()
            else:
                self._wake()

    def drop(self) -> None:
        """Give back what is ready now, and what is being prepared as soon as it is ready."""
        with self._changed:
            self._requested = 0
            slab, self._ready = self._ready, None
            if slab is not None:
                self.give_back(slab[0].nbytes, slab[1])

    def close(self, seconds: float = 60.0) -> None:
        """End the thread, and give back what it has; wait this long at most, for the driver may hang."""
        if os.getpid() != self._owner:
            return  # a forked child has neither the thread nor the memory, and its copy of the lock may stay locked
        with self._changed:
            self.drop()
            self._is_closed = True
            self._changed.notify_all()
        # The garbage collector may close an arena in any thread, even in the slab thread itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="smpkit-slabs", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._begin()
            while self._work():
                pass
        except Exception as error:  # `take` raises it in the thread that trains
            with self._changed:
                self._error, self._is_closed, self._requested = error, True, 0
                self._changed.notify_all()

    def _work(self) -> bool:
        """Prepare what is requested and give back what can go; return whether there may be more work."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._requested or self._to_release)
            if self._to_release:  # events do not notify: poll those that memory must wait for
                self._changed.wait_for(lambda: self._requested, _POLL_SECONDS)
            wanted = 0 if self._is_closed else self._requested
            request = self._request
            self._in_progress = wanted, request
        slab: Slab | None = None
        if wanted:  # without the lock: pinning takes long, and `drop` must not wait for it
            with contextlib.suppress(MemoryError, OSError):  # `take` returns None, and the arena asks for less
                slab = self._memory(wanted)
        with self._changed:
            self._in_progress = (0, 0)
            self._is_exhausted = self._is_exhausted or (wanted > 0 and slab is None)
            # The request may have been dropped meanwhile, and another made.
            if request == self._request and (self._requested or slab is None):
                self._ready, self._requested = slab or self._ready, 0
            elif slab is not None:
                self._to_release.append(_ToRelease(wanted, slab[1], ()))
            self._changed.notify_all()
        self._release()
        with self._changed:
            return not self._is_closed or bool(self._to_release)

    def _release(self) -> None:
        """Give back what no copy uses any more."""
        with self._changed:
            done = [each for each in self._to_release if all(event.done() for event in each.after)]
        for each in done:  # without the lock: unpinning may wait for the device
            each.release()
        with self._changed:
            self._to_release = [each for each in self._to_release if each not in done]


def zero_bytes(num_bytes: int) -> Tensor:
    """Return a flat uint8 tensor of zeros, in large pages if it fills one."""
    if num_bytes < LARGE_PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    return mapped_bytes(num_bytes)


def zeros(num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a flat tensor of zeros, in large pages if it fills one."""
    return zero_bytes(num_elements * dtype.itemsize).view(dtype)


def mapped_bytes(num_bytes: int, *, in_children: bool = True) -> Tensor:
    """Return a flat uint8 tensor of zeros in pages of its own, provided by the system when first touched.

    Args:
        num_bytes: at least 1. Pages are whole: up to 4095 bytes more are mapped. From 2 MiB the first byte begins a
            large page.
        in_children: whether forked processes have them, too; if not, an access there ends that process.
    """
    spare = LARGE_PAGE if num_bytes >= LARGE_PAGE else 0
    memory = mmap.mmap(-1, -(-num_bytes // PAGE) * PAGE + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE if spare else 0
    large = num_bytes // LARGE_PAGE * LARGE_PAGE  # not the rest, which would take a whole large page
    if large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, large)
    if not in_children:
        memory.madvise(mmap.MADV_DONTFORK)
    # The tensor keeps the mapping. Its storage is exactly these bytes, because `torch.save` writes whole storages.
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)


def touch(memory: Tensor, progress: Callable[[int, float], object] | None = None) -> None:
    """Make the system provide all pages of new memory now, in several threads, as it clears each page first.

    Args:
        memory: bytes that are still 0.
        progress: called with a number of bytes, 1 GiB at most, and the seconds that they took.
    """
    # `madvise(MADV_POPULATE_WRITE)` does the same in one call, but Python holds its GIL meanwhile: threads would take
    # turns, and everything else in this process would stop. torch releases the GIL, so write to each page instead.
    num_pieces = -(-memory.nbytes // _PIECE)
    num_threads = min(_MAX_THREADS, own_cores(), num_pieces)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="smpkit-pages") as pool:
        each = pool.map if num_threads > 1 else map
        for slab in torch.split(memory, SLAB):
            start = time.perf_counter()
            list(each(_write, torch.split(slab[::PAGE], _PIECE // PAGE)))
            if progress is not None:
                progress(slab.nbytes, time.perf_counter() - start)


def _write(bytes_of_pages: Tensor) -> None:
    bytes_of_pages.zero_()


class Progress:
    """Logs at INFO, after every few seconds of work, how much memory is ready and how fast that goes.

    Args:
        what: names the work in the log.
        every_seconds: of work between two lines; shorter work logs nothing.
    """

    def __init__(self, what: str, every_seconds: float = 5.0) -> None:
        self._what = what
        self._every_seconds = every_seconds
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._seconds = self._logged_at = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count work, and log it when enough seconds have passed."""
        with self._lock:
            self._num_bytes += num_bytes
            self._seconds += seconds
            if self._seconds - self._logged_at < self._every_seconds:
                return
            self._logged_at = self._seconds
            gib = self._num_bytes / 2**30
            _log.info("%s: %.1f GiB in %.0f s (%.2f GiB/s)", self._what, gib, self._seconds, gib / self._seconds)
