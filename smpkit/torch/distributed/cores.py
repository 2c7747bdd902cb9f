"""How many processor cores one rank may use beside its main thread's: ranks of one host share them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core.context import launch_from

__all__ = ["bind", "cores_near_gpu", "own_cores"]


def own_cores() -> int:
    """Return this process's part of the cores that it may run on; the launcher's ranks on the host share them."""
    return max(1, min(_allowed(), _AT_START // _ranks_here()))


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ranks_here() -> int:
    try:
        return launch_from(os.environ).local_size
    except UsageError:  # contradictory variables, which `smp.init` complains about; here nobody may need a launcher
        return 1


_AT_START: Final = _allowed()
"""When this was imported: a rank that is bound to some cores later, its own part, does not share those."""


# --- Run a rank on the cores beside its GPU: memory that it touches first then lies there, too ------------------------
# On a host with two sockets, copies between a GPU and memory of the other socket take the link between the two, which
# all ranks share. Launchers leave ranks where the scheduler puts them, so about half of all pinned memory would be
# there.


_log = logging.getLogger("smpkit")

SYSFS = Path("/sys")
"""Where Linux says how the machine is built."""
TASKS = Path("/proc/self/task")
"""The threads of this process."""


def bind(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Bind this process to the cores of the NUMA node that its GPU is connected to, where that helps.

    Nothing happens with `SMPKIT_NUMA=0`, on a machine with one node or one that does not say where the GPU is, and
    where somebody (a launcher, a scheduler, a container) has chosen cores already.
    """
    if device.type != "cuda" or environ.get("SMPKIT_NUMA") == "0" or not hasattr(os, "sched_setaffinity"):
        return
    properties: Any = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    cores = cores_near_gpu(address, allowed)
    if not cores:
        return
    # Threads that exist already (torch's, where it has computed something) do not follow the one that starts others.
    for task in (int(path.name) for path in TASKS.iterdir()):
        with contextlib.suppress(OSError):  # it has ended, or the machine does not allow it
            if os.sched_getaffinity(task) == allowed:
                os.sched_setaffinity(task, cores)
    _log.info("this rank runs on the %d cores beside its GPU (%s)", len(cores), address)


def cores_near_gpu(address: str, allowed: Collection[int]) -> set[int]:
    """Return the cores to which a process should be bound whose GPU has a PCI address; none where that would not help.

    Args:
        address: as Linux writes it, `0000:3b:00.0`.
        allowed: the cores that the process may use now.
    """
    nodes, online = _parse_list("devices/system/node/online"), _parse_list("devices/system/cpu/online")
    if len(nodes) < 2 or set(allowed) != online:
        return set()
    device = f"bus/pci/devices/{address}"
    if not _read(f"{device}/numa_node").isdecimal():  # -1: the machine does not know
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
