"""Processes that a failed test has left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_processes_of(test: str) -> list[int]:
    """Kill every process that was started by the test with this node id, and return their process ids.

    pytest names the running test in the environment, which all descendants inherit, also those that left their process
    group or whose parent has ended.
    """
    return kill_processes_with(f"PYTEST_CURRENT_TEST={test} (")


def kill_processes_with(beginning: str) -> list[int]:
    """Kill every other process with a variable that begins so, and return their process ids."""
    killed = []
    for pid in processes_with(beginning):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def processes_with(beginning: str) -> list[int]:
    """Return the process ids of every other living process with a variable that begins so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            entries = (folder / "environ").read_bytes().split(b"\0")
            if pid != os.getpid() and any(entry.startswith(beginning.encode()) for entry in entries):
                found.append(pid)
    return found
