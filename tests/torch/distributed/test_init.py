from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from tests.ranks import run_ranks
from tests.torch.steps import train_step


def start_over_and_over(times: int) -> list[int]:
    """Return how many threads gloo has after each of several worlds, with the last model still in a variable."""
    counts: list[int] = []
    for _ in range(times):
        smp.init({"pipeline_parallel_degree": 2, "ddp": True})
        model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        train_step(model, torch.ones(2, 2))
        smp.shutdown()
        end = time.monotonic() + 10  # one that has been joined is still listed for a moment
        while (found := gloo_threads()) > max(counts[1:2], default=found) and time.monotonic() < end:
            time.sleep(0.01)
        counts.append(found)
    return counts


def gloo_threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_worlds_that_are_over_leave_no_threads() -> None:
    for counts in run_ranks(start_over_and_over, 4, 5):
        assert max(counts[2:]) <= counts[1]
