"""Ranks that wait for each other hang; one that gets no processor does not."""

from __future__ import annotations

import os
import time

import pytest

import smpkit.torch as smp
from smpkit.testing.ranks import RankFailed
from tests.device.hangs import HangWatch, join
from tests.ranks import run_ranks

_LATE_SECONDS = 2.0


def wait_for_each_other(folder: str) -> None:
    smp.init({})
    join(folder)
    smp.recv_from(1 - smp.rank(), smp.RankType.WORLD_RANK)


def test_ranks_that_wait_for_each_other_hang() -> None:
    with HangWatch(2, idle_seconds=1) as watched, pytest.raises(RankFailed, match="died without a traceback"):
        run_ranks(wait_for_each_other, 2, watched.folder)
    how, first, second = watched.found.split("; ")
    assert how == "all sleep"
    assert first.startswith("rank 0 in distributed/")
    assert second.startswith("rank 1 in distributed/")


def ask_without_end(folder: str) -> None:
    join(folder)
    while True:
        time.monotonic()


def test_a_rank_that_asks_without_end_hangs() -> None:
    watch = HangWatch(1, most_processor_seconds=0.5)
    with watch as watched, pytest.raises(RankFailed, match="died without a traceback"):
        run_ranks(ask_without_end, 1, watched.folder)
    assert watched.found.startswith("they have computed for ")


def be_starved(folder: str) -> None:
    """Compute a little on rank 1, on the only processor, which rank 0 keeps busy and need not give away."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if os.environ["RANK"] == "0":
        end = time.monotonic() + _LATE_SECONDS
        while time.monotonic() < end:
            pass
        return
    join(folder)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while time.process_time() < 0.2:
        pass


def test_a_rank_that_gets_no_processor_does_not() -> None:
    with HangWatch(1, idle_seconds=0.6) as watched:
        run_ranks(be_starved, 2, watched.folder)
    assert not watched.found


def come_late(folder: str) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(_LATE_SECONDS)
    join(folder)
    smp.init({})


def test_ranks_that_wait_for_one_that_has_not_come_yet_do_not() -> None:
    with HangWatch(2, idle_seconds=0.6) as watched:
        run_ranks(come_late, 2, watched.folder)
    assert not watched.found
