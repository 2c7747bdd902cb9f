"""Snapshots of a device's memory, with the stack of each allocation: when the script asks, and when memory runs out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from smpkit.errors import UnsupportedError, UsageError
from smpkit.observe.runs import RUN_DIR
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.core.warn import warn_user

__all__ = ["record_memory", "save_memory_snapshot"]

_MAX_ENTRIES: Final = 100_000
"""Of allocations and releases before a snapshot, as torch's own documentation has it."""

_recording = False
_saved = 0


def record_memory() -> None:
    """Note from now on where each piece of the device's memory is allocated; save that if memory runs out.

    The file is `memory-RANK-NUMBER.pickle` in the folder SMPKIT_RUN_DIR, or in the current one. Drag it into
    https://pytorch.org/memory_viz. Recording costs a few microseconds for each allocation. Call it after
    `smp.init()`, on each rank that is to record.

    Raises:
        UnsupportedError: this rank's device records no memory; GPUs of CUDA and ROCm do.
    """
    global _recording  # noqa: PLW0603
    _recorder()._record_memory_history(max_entries=_MAX_ENTRIES)
    _recording = True
    if _stop not in state.reset_hooks:
        state.reset_hooks.append(_stop)
        _save_if_out_of_memory()


def save_memory_snapshot(file: str | os.PathLike[str] | None = None) -> Path:
    """Save what is in the device's memory now, and return the file.

    Args:
        file: default: as `record_memory` says.

    Raises:
        UsageError: `record_memory` has not been called.
        UnsupportedError: this rank's device records no memory.
    """
    global _saved  # noqa: PLW0603
    recorder = _recorder()
    if not _recording:
        raise UsageError("nothing was recorded of the memory", hint="call `record_memory()` after `smp.init()`")
    if file is None:
        _saved += 1
        file = Path(os.environ.get(RUN_DIR) or ".") / f"memory-{state.rank}-{_saved}.pickle"
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    recorder._dump_snapshot(str(path))
    return path


def _recorder() -> Any:
    found = devices.memory_recorder(state.device)
    if found is None:
        raise UnsupportedError(f"memory of the device `{state.device.type}` is not recorded", hint="use a GPU of CUDA")
    return found


def _save_if_out_of_memory() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, torch.OutOfMemoryError) and _recording:
            try:
                warn_user(f"memory ran out: what was in it is in {save_memory_snapshot()}")
            except Exception as problem:
                warn_user(f"memory ran out, and no snapshot could be saved: {problem}")
        before(kind, error, trace)

    sys.excepthook = hook


def _stop() -> None:
    """Record no more, after `smp.shutdown()`."""
    global _recording  # noqa: PLW0603
    if _recording:
        _recording = False
        found = devices.memory_recorder(devices.current_device())
        if found is not None:
            found._record_memory_history(enabled=None)
