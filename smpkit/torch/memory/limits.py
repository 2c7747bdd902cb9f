"""How much a process may hold on its device."""

from __future__ import annotations

import os
from typing import Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.distributed.host_memory import container_limit
from smpkit.torch.memory.facts import gib

__all__ = ["device_limit"]

_USABLE: Final = 0.95
"""Of the device: its driver, its libraries and the allocator's fragments have the rest."""


def device_limit(name: str, device: torch.device, given: float | None, num_sharers: int | None = None) -> int:
    """Return how many bytes a process may hold on a device.

    Args:
        name: of the setting.
        given: its value in GiB; None: the device, less what tensors cannot have.
        num_sharers: how many processes share a CPU, of which each may fill its part; None: `given` must tell.

    Raises:
        UsageError: the device has less, or nobody tells how much it has.
    """
    total = devices.total_bytes(device)
    if given is not None:
        limit = int(given * 2**30)
        if total is not None and limit > total:
            raise UsageError(f"{name} is {given:g}, and {device} has {gib(total)}", hint="give at most that")
        return limit
    if total is not None:
        return int(_USABLE * total)
    if num_sharers is None:
        raise UsageError(f"{device} does not tell how much memory it has", hint=f"give `{name}`")
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(of_machine, container_limit() or of_machine) // num_sharers
