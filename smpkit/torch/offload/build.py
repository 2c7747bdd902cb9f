"""Put an engine together for a device; with `SMPKIT_OFFLOAD_DEBUG=1`, one that checks itself."""

from __future__ import annotations

import os
from typing import Final

import torch

from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.host import make_arena
from smpkit.torch.offload.link import Link, link_for
from smpkit.torch.offload.pace import Lead
from smpkit.torch.offload.prefetch import BackwardOrder

__all__ = ["DEBUG", "make_engine"]

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
