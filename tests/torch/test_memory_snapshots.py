"""Snapshots of a device's memory: a stand-in for the module of a GPU, which this machine may not have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core import devices
from tests.ranks import run_ranks


class Recorder:
    """Has what `torch.cuda.memory` has."""

    def __init__(self) -> None:
        self.enabled: list[Any] = []

    def _record_memory_history(self, enabled: Any = "all", **_: Any) -> None:
        self.enabled.append(enabled)

    def _dump_snapshot(self, file: str) -> None:
        Path(file).write_bytes(b"snapshot")


def records(folder: str) -> list[Any]:
    recorder = Recorder()
    devices.memory_recorder = lambda _: recorder  # type: ignore[assignment]
    smp.init({})
    with pytest.raises(UsageError, match="nothing was recorded"):
        smp.save_memory_snapshot()
    smp.record_memory()
    smp.record_memory()
    assert smp.save_memory_snapshot() == Path(folder) / "memory-0-1.pickle"
    assert smp.save_memory_snapshot(Path(folder) / "mine" / "a.pickle").read_bytes() == b"snapshot"
    error = torch.OutOfMemoryError("out of memory")
    with pytest.warns(UserWarning, match=r"memory ran out: what was in it is in .*memory-0-2\.pickle"):
        sys.excepthook(type(error), error, None)
    sys.excepthook(ValueError, ValueError(), None)
    called = sorted(path.name for path in Path(folder).glob("*.pickle"))
    smp.shutdown()
    return [called, recorder.enabled]


def test_a_snapshot_is_saved_when_asked_for_and_when_memory_runs_out(tmp_path: Path) -> None:
    [(files, enabled)] = run_ranks(records, 1, str(tmp_path), env={"SMPKIT_RUN_DIR": str(tmp_path)})
    assert files == ["memory-0-1.pickle", "memory-0-2.pickle"]
    assert enabled == ["all", "all", None]


def cannot() -> None:
    smp.init({})
    with pytest.raises(UnsupportedError, match="memory of the device `cpu` is not recorded"):
        smp.record_memory()
    smp.shutdown()


def test_a_device_that_records_nothing_is_named() -> None:
    run_ranks(cannot, 1)
