"""Memory of the host in large pages, where the system has them: for what the optimizer goes through, and for copies.

The optimizer is bound by memory, and in pages of 4 KiB half of its time can go into finding them; a driver that pins
memory looks each page up. Processors join neighbouring pages only where these are aligned, which torch's memory, 64
bytes behind the start of a page, is not.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from smpkit.torch.offload.cores import own_cores

__all__ = ["LARGE_PAGE", "PAGE", "SLAB", "Progress", "mapped_bytes", "touch", "zero_bytes", "zeros"]

_log = logging.getLogger("smpkit")

PAGE: Final = 4096
LARGE_PAGE: Final = 2 << 20
"""A large page of x86 and ARM; where they are larger still this only aligns."""
SLAB: Final = 1 << 30
"""The most that is made ready between two looks at the clock, and the most that the arena takes at a time."""
_PIECE: Final = 64 << 20
_MOST_THREADS: Final = 8
"""More do not help: the system hands out pages under locks."""


def zero_bytes(num_bytes: int) -> Tensor:
    """Return bytes, all 0; given back to the system with the last tensor that shares them."""
    if num_bytes < LARGE_PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    return mapped_bytes(num_bytes)


def zeros(num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers, all 0, in such memory."""
    return zero_bytes(num_elements * dtype.itemsize).view(dtype)


def mapped_bytes(num_bytes: int, *, in_children: bool = True) -> Tensor:
    """Return bytes, all 0, in pages of their own, which the system provides when they are first touched.

    Args:
        num_bytes: at least 1. Pages are whole: up to 4095 bytes more are mapped. From 2 MiB the first byte begins a
            large page.
        in_children: whether processes that are forked have them too; there, an access to others ends the process.
    """
    spare = LARGE_PAGE if num_bytes >= LARGE_PAGE else 0
    memory = mmap.mmap(-1, -(-num_bytes // PAGE) * PAGE + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE if spare else 0
    large = num_bytes // LARGE_PAGE * LARGE_PAGE  # no further: the end would take a whole page
    if large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, large)
    if not in_children:
        memory.madvise(mmap.MADV_DONTFORK)
    # The tensor keeps the mapping. Its storage is exactly this, for `torch.save` writes whole storages.
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)


def touch(memory: Tensor, progress: Callable[[int, float], object] | None = None) -> None:
    """Let the system provide all pages of new memory now, by several threads: it clears each before it hands it out.

    By writing to each page. `madvise(MADV_POPULATE_WRITE)` does the same in one call, but Python keeps its lock
    meanwhile: threads would take turns, and everything else in this process would stand still.

    Args:
        memory: bytes that are still 0.
        progress: told of how many bytes are ready in how many seconds, each 1 GiB at most.
    """
    num_pieces = -(-memory.nbytes // _PIECE)
    num_threads = min(_MOST_THREADS, own_cores(), num_pieces)
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
    """Says at INFO, every so many seconds of work, how much memory has been made ready and how fast.

    Args:
        what: names the work in the log.
        every_seconds: between two lines; less work says nothing.
    """

    def __init__(self, what: str, every_seconds: float = 5.0) -> None:
        self._what = what
        self._every_seconds = every_seconds
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._seconds = self._said_at = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count work that has been done, and say so when it is time."""
        with self._lock:
            self._num_bytes += num_bytes
            self._seconds += seconds
            if self._seconds - self._said_at < self._every_seconds:
                return
            self._said_at = self._seconds
            gib = self._num_bytes / 2**30
            _log.info("%s: %.1f GiB in %.0f s (%.2f GiB/s)", self._what, gib, self._seconds, gib / self._seconds)
