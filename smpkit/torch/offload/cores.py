"""How many processor cores one rank may use beside its main thread's: ranks of one host share them."""

from __future__ import annotations

import os
from typing import Final

from smpkit.errors import UsageError
from smpkit.torch.context import launch_from

__all__ = ["own_cores"]


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
