"""Memory for what the optimizer goes through at every step, in large pages where the system has them.

The step is bound by memory, and in pages of 4 KiB half of that time can go into finding them: processors join
neighbouring pages only where these are aligned, which torch's memory, 64 bytes behind the start of a page, is not.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import torch
from torch import Tensor

__all__ = ["zero_bytes", "zeros"]

_PAGE: Final = 2 << 20
"""A large page of x86 and ARM; where they are larger still this only aligns."""


def zero_bytes(num_bytes: int) -> Tensor:
    """Return bytes, all 0; given back to the system with the last tensor that shares them."""
    if num_bytes < _PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, num_bytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE
    large = num_bytes // _PAGE * _PAGE  # no further: the end would take a whole page
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, large)
    # The tensor keeps the mapping. Its storage is exactly this, for `torch.save` writes whole storages.
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)


def zeros(num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers, all 0, in such memory."""
    return zero_bytes(num_elements * dtype.itemsize).view(dtype)
