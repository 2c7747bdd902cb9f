"""Put an engine together for a device; with `SMPKIT_OFFLOAD_DEBUG=1`, one that checks itself."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Final

import torch

from smpkit.torch.core import devices
from smpkit.torch.offload.arena import Arena, SlabProvider, ordinary_memory
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Link, link_for
from smpkit.torch.offload.prefetch import BackwardOrder, Lead

__all__ = ["DEBUG", "available_bytes", "make_arena", "make_engine"]


# --- How much host memory may be used for activations, and of which kind ----------------------------------------------


_SHARE: Final = 0.75
"""Of what is free: the rest is for data loaders, checkpoints, and what others on the machine come to need."""
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60
"""Cgroups in version 1 write "none" as a number beyond any machine's memory."""


def make_arena(link: Link, budget_bytes: int | None, num_sharers: int = 1) -> Arena:
    """Return host memory for a device's link.

    Args:
        link: what copies from it and to it.
        budget_bytes: the most that it takes; None: this process's part of three quarters of what is free.
        num_sharers: how many processes of this machine do the same.
    """
    free = available_bytes()
    if budget_bytes is None and free is not None:
        budget_bytes = max(1, int(_SHARE * free) // num_sharers)
    if link.device.type == "cuda":
        from smpkit.torch.offload.cuda import pinned_memory

        # A thread begins at the first GPU: a context there would take half a GiB for each process.
        provider = SlabProvider(pinned_memory, partial(devices.make_current, link.device))
        return Arena(budget_bytes, pinned_memory, synchronize=link.close, provider=provider)
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
    limit = _number(_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes")
    used = _number(_CGROUP / "memory.current", _CGROUP / "memory/memory.usage_in_bytes")
    return None if limit is None or used is None or limit >= _NO_LIMIT else max(0, limit - used)


def _number(*files: Path) -> int | None:
    """Return what the first of these files that exists holds, of cgroups in version 2 or 1; None: no number."""
    text = next((file.read_text(encoding="ascii").strip() for file in files if file.exists()), "")
    return int(text) if text.isdecimal() else None


# --- Put an engine together for a device; with `SMPKIT_OFFLOAD_DEBUG=1`, one that checks itself -----------------------


DEBUG: Final = "SMPKIT_OFFLOAD_DEBUG"
"""`1`: check the order of all accesses, poison what is free, compare what comes back. Slow."""


def make_engine(
    device: torch.device,
    *,
    lead: Lead = "auto",
    horizon: int | None = None,
    min_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    link: Link | None = None,
    deadline_seconds: float = 600.0,
    rank: int = 0,
    num_sharers: int = 1,
) -> ActivationEngine:
    """Return an engine.

    Args:
        lead: how many layers ahead loads are issued, or "auto".
        horizon: how many tasks of the pipeline ahead at most; None: no bound.
        min_bytes: smaller tensors stay on the device; None: what is worth a copy there.
        host_budget_bytes: the most host memory; None: this process's part of three quarters of what is free.
        link: the device's link; None: its own.
        deadline_seconds: of every wait for a copy.
        rank: for reports.
        num_sharers: how many processes of this machine share its memory.
    """
    link = link or link_for(device, deadline_seconds)
    arena = make_arena(link, host_budget_bytes, num_sharers)
    if os.environ.get(DEBUG) == "1":
        from smpkit.torch.offload.debug import CheckedEngine, CheckedLink

        return CheckedEngine(
            CheckedLink(link), arena, BackwardOrder(horizon), lead=lead, min_bytes=min_bytes, rank=rank
        )
    return ActivationEngine(link, arena, BackwardOrder(horizon), lead=lead, min_bytes=min_bytes, rank=rank)
