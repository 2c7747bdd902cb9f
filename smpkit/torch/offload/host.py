"""How much host memory may be used for activations, and of which kind."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from smpkit.torch.offload.arena import Arena, ordinary_memory

__all__ = ["available_bytes", "make_arena"]

_SHARE: Final = 0.75
"""Of what is free: the rest is for data loaders, checkpoints, and what others on the machine come to need."""
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def make_arena(device: torch.device, budget_bytes: int | None, num_sharers: int = 1) -> Arena:
    """Return host memory for a device's link.

    Args:
        budget_bytes: the most that it takes; None: this process's part of three quarters of what is free.
        num_sharers: how many processes of this machine do the same.
    """
    free = available_bytes()
    if budget_bytes is None and free is not None:
        budget_bytes = max(1, int(_SHARE * free) // num_sharers)
    if device.type == "cuda":
        from smpkit.torch.offload.cuda import pinned_memory

        return Arena(budget_bytes, pinned_memory)
    return Arena(budget_bytes, ordinary_memory)


def available_bytes() -> int | None:
    """Return the memory that this process could still take, of machine and container; None if unknown."""
    free = [each for each in (_of_machine(), _of_container()) if each is not None]
    return min(free, default=None)


def _of_machine() -> int | None:
    if not _MEMINFO.exists():
        return None
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _of_container() -> int | None:
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not (limit.exists() and used.exists()):
        return None
    text = limit.read_text(encoding="ascii").strip()
    return max(0, int(text) - int(used.read_text(encoding="ascii"))) if text.isdecimal() else None
