"""The processor cores of one rank: how many it may use, since ranks of a host share them, and which ones.

On a host with two sockets, copies between a GPU and memory of the other socket use the link between the two, which all
ranks share. Launchers leave ranks where the scheduler puts them, so about half of all pinned memory would be there. A
rank that is bound to the cores beside its GPU allocates its memory there, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.context import launch_from

SYSFS: Final = Path("/sys")
TASKS: Final = Path("/proc/self/task")
"""The threads of this process."""

_log = logging.getLogger("smpkit")


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_AT_START: Final = _allowed()
"""Cores at import: those that a rank is bound to later are its own, and must not be divided again."""


def own_cores() -> int:
    """Return the number of cores for this process: those that it may run on, divided by the ranks of this host."""
    try:
        num_ranks = launch_from(os.environ).local_size
    except UsageError:  # contradictory variables: `smp.init` raises, but this also runs without a launcher
        num_ranks = 1
    return max(1, min(_allowed(), _AT_START // num_ranks))


def bind(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Bind this process to the cores of the NUMA node that its GPU is connected to, where that helps.

    Does nothing with `SMPKIT_NUMA=0`, on a machine with one node or one that does not tell the GPU's node, and where a
    launcher, a scheduler or a container has chosen cores already.
    """
    if device.type == "cpu" or environ.get("SMPKIT_NUMA") == "0" or not hasattr(os, "sched_setaffinity"):
        return
    if (address := devices.pci_address(device)) is None:
        return
    allowed = os.sched_getaffinity(0)
    cores = cores_near_gpu(address, allowed)
    if not cores:
        return
    # Bind each thread: those that exist already, such as torch's, do not follow the main thread.
    for task in (int(path.name) for path in TASKS.iterdir()):
        with contextlib.suppress(OSError):  # the thread has ended, or the machine does not allow it
            if os.sched_getaffinity(task) == allowed:
                os.sched_setaffinity(task, cores)
    _log.info("this rank runs on the %d cores beside its GPU (%s)", len(cores), address)


def cores_near_gpu(address: str, allowed: Collection[int]) -> set[int]:
    """Return the cores to bind a process to, whose GPU has this PCI address; none where that would not help.

    Args:
        address: as Linux writes it, `0000:3b:00.0`.
        allowed: the cores that the process may use now.
    """
    nodes, online = _parse_list("devices/system/node/online"), _parse_list("devices/system/cpu/online")
    if len(nodes) < 2 or set(allowed) != online:
        return set()
    device = f"bus/pci/devices/{address}"
    if not _read(f"{device}/numa_node").isdecimal():  # -1: unknown
        return set()
    near = _parse_list(f"{device}/local_cpulist") & online
    return set() if near == online else near


def _parse_list(name: str) -> set[int]:
    """Read a list such as `0-3,8`."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", _read(name)):
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _read(name: str) -> str:
    try:
        return (SYSFS / name).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
