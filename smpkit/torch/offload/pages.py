"""Memory of the host in large pages, where the system has them: for what the optimizer goes through, and for copies.

The optimizer is bound by memory, and in pages of 4 KiB half of its time can go into finding them; a driver that pins
memory looks each page up. Processors join neighbouring pages only where these are aligned, which torch's memory, 64
bytes behind the start of a page, is not.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from smpkit.torch.offload.cores import own_cores

__all__ = ["LARGE_PAGE", "PAGE", "SLAB", "Progress", "SlabProvider", "mapped_bytes", "touch", "zero_bytes", "zeros"]

Slab = tuple[Tensor, Callable[[], object]]
"""Bytes, and what gives them back to the system."""

_log = logging.getLogger("smpkit")

PAGE: Final = 4096
LARGE_PAGE: Final = 2 << 20
"""A large page of x86 and ARM; where they are larger still this only aligns."""
SLAB: Final = 1 << 30
"""The most that is made ready between two looks at the clock, and the most that the arena takes at a time."""
_PIECE: Final = 64 << 20
_POLL_SECONDS: Final = 2e-3
_MAX_THREADS: Final = 8
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
        self._seconds = self._logged_at = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count work that has been done, and say so when it is time."""
        with self._lock:
            self._num_bytes += num_bytes
            self._seconds += seconds
            if self._seconds - self._logged_at < self._every_seconds:
                return
            self._logged_at = self._seconds
            gib = self._num_bytes / 2**30
            _log.info("%s: %.1f GiB in %.0f s (%.2f GiB/s)", self._what, gib, self._seconds, gib / self._seconds)


class Completable(Protocol):
    """A copy."""

    def done(self) -> bool:
        """Return whether it is over."""


@dataclass(frozen=True, eq=False)
class _ToRelease:
    num_bytes: int
    release: Callable[[], object]
    after: tuple[Completable, ...]


class SlabProvider:
    """Makes one slab of memory ready, in a thread, before anybody needs it; and gives slabs back, in the same thread.

    To pin memory takes longer than a layer's forward, and the driver may wait for the device: neither belongs into a
    step. The thread starts with the first request and ends with `close`.

    Args:
        memory: takes so many bytes from the system; raises OSError or MemoryError where it has no more.
        begin: called in the thread, first.
    """

    def __init__(self, memory: Callable[[int], Slab], begin: Callable[[], object] = lambda: None) -> None:
        self._memory = memory
        self._begin = begin
        self._changed = threading.Condition()
        self._requested = self._request = 0
        """How much is on its way to be ready, and the number of that request."""
        self._in_progress = (0, 0)
        """The same of what the thread is at, which may be wanted no more."""
        self._ready: Slab | None = None
        self._to_release: list[_ToRelease] = []
        self._error: Exception | None = None
        self._is_exhausted = False
        """The system had no more."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    @property
    def num_bytes(self) -> int:
        """How much is ready, or on the way to be."""
        with self._changed:
            return self._requested if self._ready is None else self._ready[0].nbytes

    @property
    def held_bytes(self) -> int:
        """The same, and what has not gone back yet."""
        with self._changed:
            wanted = (self._requested, self._request) if self._requested else (0, 0)
            abandoned = self._in_progress[0] if self._in_progress != wanted else 0
            return self.num_bytes + abandoned + sum(each.num_bytes for each in self._to_release)

    def prepare(self, num_bytes: int) -> None:
        """Begin to make a slab ready, unless there is one, or the system had no more when it was last asked."""
        with self._changed:
            if not (self._is_closed or self._is_exhausted or self._requested or self._ready):
                self._requested = num_bytes
                self._request += 1
                self._wake()

    def take(self) -> Slab | None:
        """Return the slab, waiting for one that is on the way; None if there is none.

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

    def give_back(self, num_bytes: int, release: Callable[[], object], after: Iterable[Completable] = ()) -> None:
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
        """Give back what is ready, and what is on its way as soon as it is."""
        with self._changed:
            self._requested = 0
            slab, self._ready = self._ready, None
            if slab is not None:
                self.give_back(slab[0].nbytes, slab[1])

    def close(self, seconds: float = 60.0) -> None:
        """End the thread, and give back what it has; a driver that hangs holds nobody up for longer than this."""
        if os.getpid() != self._owner:
            return  # a fork has neither the thread nor the memory, and the lock may be held for good
        with self._changed:
            self.drop()
            self._is_closed = True
            self._changed.notify_all()
        # The collector may close an arena in any thread, this one too.
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
        except Exception as error:  # raised again where somebody hears it
            with self._changed:
                self._error, self._is_closed, self._requested = error, True, 0
                self._changed.notify_all()

    def _work(self) -> bool:
        """Do what was asked for; return whether there may be more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._requested or self._to_release)
            if self._to_release:  # copies do not say when they are over
                self._changed.wait_for(lambda: self._requested, _POLL_SECONDS)
            self._in_progress = wanted, request = (0 if self._is_closed else self._requested), self._request
        slab = self._allocated(wanted) if wanted else None
        with self._changed:
            self._in_progress = (0, 0)
            self._is_exhausted = self._is_exhausted or (wanted > 0 and slab is None)
            if request == self._request and (self._requested or slab is None):
                self._ready, self._requested = slab or self._ready, 0
            elif slab is not None:
                self._to_release.append(_ToRelease(wanted, slab[1], ()))
            self._changed.notify_all()
        self._release()
        with self._changed:
            return not self._is_closed or bool(self._to_release)

    def _allocated(self, num_bytes: int) -> Slab | None:
        try:
            return self._memory(num_bytes)
        except (MemoryError, OSError):
            return None  # whoever needs it asks for less, or is told

    def _release(self) -> None:
        """Give back what no copy uses any more."""
        with self._changed:
            done = [each for each in self._to_release if all(event.done() for event in each.after)]
        for each in done:
            each.release()
        with self._changed:
            self._to_release = [each for each in self._to_release if each not in done]
