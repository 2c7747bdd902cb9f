"""Memory of the host: in large pages, pinned for a device, and how much of it a process may take.

torch's own pinned memory is rounded up to powers of two (20 GiB of tensors can take 32) and is allocated per tensor.
Here a piece is mapped at exactly its size, and registered with the driver where that registers mapped memory.

Large pages, because an optimizer on the host is bound by memory bandwidth and with pages of 4 KiB can spend half of its
time on address translation, and because a driver that pins memory looks up each page. Linux joins pages only where they
are aligned to 2 MiB, which torch's own memory, 64 bytes behind the start of a page, is not.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from smpkit.torch.core import devices
from smpkit.torch.distributed.cores import own_cores

PAGE: Final = 4096
LARGE_PAGE: Final = 2 << 20
"""A large page of x86 and ARM; where they are larger still this only aligns."""
_PIECE: Final = 64 << 20
_MAX_THREADS: Final = 8
"""More do not help: the system hands out pages under locks."""
_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60
"""Cgroups in version 1 write "none" as a number beyond any machine's memory."""


# --- pages ------------------------------------------------------------------------------------------------------------


class _Pages(mmap.mmap):
    """Pages of the system, unpinned while they are still mapped."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        # The end of the process frees everything anyway, and must not wait for a GPU that hangs.
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def zeros(num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a flat tensor of zeros, in large pages if it fills one."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < LARGE_PAGE:
        return torch.zeros(num_elements, dtype=dtype, device="cpu")
    return mapped_bytes(num_bytes).view(dtype)


def mapped_bytes(num_bytes: int, *, in_large_pages: bool = True) -> Tensor:
    """Return a flat uint8 tensor of zeros in pages of its own, provided by the system when first touched.

    Args:
        num_bytes: at least 1. Pages are whole: up to 4095 bytes more are mapped. From 2 MiB the first byte begins a
            large page.
        in_large_pages: False for what may be touched in a few places only: each of them would take a whole large page.
    """
    return _map(num_bytes, in_large_pages=in_large_pages)[0]


def _map(num_bytes: int, *, in_children: bool = True, in_large_pages: bool = True) -> tuple[Tensor, _Pages]:
    """Return such a tensor and its pages; if forked children do not have these, an access there ends the child."""
    spare = LARGE_PAGE if num_bytes >= LARGE_PAGE else 0
    pages = _Pages(-1, -(-num_bytes // PAGE) * PAGE + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % LARGE_PAGE if spare else 0
    large = num_bytes // LARGE_PAGE * LARGE_PAGE  # not the rest, which would take a whole large page
    if large and in_large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no large pages
            pages.madvise(mmap.MADV_HUGEPAGE, start, large)
    if not in_children:
        pages.madvise(mmap.MADV_DONTFORK)
    # The tensor keeps the mapping. Its storage is exactly these bytes, because `torch.save` writes whole storages.
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=start), pages


def touch(memory: Tensor) -> None:
    """Make the system provide all pages of new memory (bytes that are still 0) now, in several threads."""
    # `madvise(MADV_POPULATE_WRITE)` does the same in one call, but Python holds its GIL meanwhile: threads would take
    # turns, and everything else in this process would stop. torch releases the GIL, so write to each page instead.
    pieces = torch.split(memory[::PAGE], _PIECE // PAGE)
    with ThreadPoolExecutor(min(_MAX_THREADS, own_cores(), len(pieces)), "smpkit-pages") as pool:
        list(pool.map(Tensor.zero_, pieces))


# --- pinned memory ----------------------------------------------------------------------------------------------------


def pinned_bytes(device: torch.device, num_bytes: int) -> Tensor:
    """Return zeros from and to which copies run at full speed: a flat uint8 tensor, unpinned with its last reference.

    It is registered in one piece, because a copy must not cross from one registration to the next. The driver looks up
    every page, so pages are large where the system has large ones, and touched before. A device whose driver registers
    nothing gets memory that torch has pinned, rounded up to a power of two, and one without streams needs nothing
    pinned. Raises OSError if the driver does not take the memory.
    """
    if num_bytes == 0 or not devices.has_streams(device):
        return zeros(num_bytes, torch.uint8)
    registration = devices.host_registration(device)
    if registration is None:
        try:
            tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise OSError(f"torch could not pin {num_bytes} bytes of the host: {error}") from error
    else:
        # Forked children (data loaders) must not share it: after a fork, a write by this process would copy the page to
        # another place, and the GPU would go on using the old one.
        tensor, pages = _map(num_bytes, in_children=False)
        touch(tensor)
        (register, unregister), address, owner = registration, tensor.data_ptr(), os.getpid()
        register(address, -(-num_bytes // PAGE) * PAGE)
        pages.unpin = lambda: unregister(address) if os.getpid() == owner else None
    return tensor


# --- how much there is ------------------------------------------------------------------------------------------------


def available_bytes() -> int | None:
    """Return the memory that this process can still take, of the machine and of its container; None if unknown."""
    free = [limit - used for limit, used in _limits()]
    if (meminfo := _PROC / "meminfo").exists():
        free.append(_field(meminfo, "MemAvailable:") * 1024)
    return max(0, min(free)) if free else None


def container_limit() -> int | None:
    """Return how much memory this process's container, or job, may take; None if that is not bounded."""
    return min((limit for limit, _ in _limits()), default=None)


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit, and what is used, of each control group around this process that has a limit."""
    # A scheduler such as Slurm bounds a group deep in the tree, and a container's own group looks like the root: so
    # each group from this process's own up to the root counts.
    own = [line.split(":", 2) for line in _text(_PROC / "self/cgroup").splitlines()]
    paths = {controller: path for _, controllers, path in own for controller in controllers.split(",")}
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    version_2 = ("memory.max", "memory.current", "inactive_file")
    for root, path, (limit, used, unused) in (
        (_CGROUP, paths.get("", "/"), version_2),
        (_CGROUP / "memory", paths.get("memory", "/"), version_1),
    ):
        group = root / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            text = _text(folder / limit).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                # Files that nobody has used lately count as used, but are free to take, as the kubelet reckons too.
                free_to_take = _field(folder / "memory.stat", unused)
                yield int(text), max(0, int(_text(folder / used) or 0) - free_to_take)


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii") if file.exists() else ""


def _field(file: Path, name: str) -> int:
    """Return the number behind a name in a file of the kernel; 0 if it is not there."""
    lines = (line.split() for line in _text(file).splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), 0)
