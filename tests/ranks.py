"""`run_ranks`, with what the ranks of these tests import loaded ahead; on the device that was chosen."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from smpkit.testing.ranks import run_ranks as run_on_this_machine
from smpkit.torch.launch import FORKSERVER
from tests.chosen_device import VARIABLE, chosen_device
from tests.simulated import order_of, run_in_order

FORKSERVER.set_forkserver_preload(["smpkit.torch", "tests.preloaded"])


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    hosts: int = 1,
) -> list[Any]:
    """Do what `smpkit.testing.run_ranks` does, whose arguments these are; `env` may have a device of its own."""
    start_server()
    env = {VARIABLE: chosen_device(), **(env or {})}  # ranks have the environment of the server, not of the test
    order = order_of(env[VARIABLE])
    if order is None:
        return run_on_this_machine(function, size, *args, timeout=timeout, env=env, hosts=hosts)
    return run_on_this_machine(run_in_order, size, order, function, args, timeout=timeout, env=env, hosts=hosts)


def start_server() -> None:
    """Start the server that ranks are forked from, and multiprocessing's tracker, so that they belong to no test.

    Otherwise they belong to the first test with ranks. If that one fails, they are killed with what it has left behind,
    and every later test with ranks fails, too.
    """
    test = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        forkserver.ensure_running()
        pid = _pid_of_server()
        if pid not in _cpu_of_start:
            first = FORKSERVER.Process(target=int)
            first.start()  # once the server has imported everything
            first.join()
            _cpu_of_start[pid] = _cpu_of(pid)
    finally:
        if test is not None:
            os.environ["PYTEST_CURRENT_TEST"] = test


def cpu_of_ranks() -> float:
    """Return the seconds of CPU of the server and of all that has ended of what it forked, without those of its start.

    No other clock has them: ranks are children of the server, not of the tests' process.
    """
    pid = _pid_of_server()
    return _cpu_of(pid) - _cpu_of_start[pid] if pid in _cpu_of_start else 0


_cpu_of_start: dict[int | None, float] = {}
"""The CPU seconds that each server took to start, by its process id."""


def _pid_of_server() -> int | None:
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def _cpu_of(pid: int | None) -> float:
    """Return what `os.times()` sums up to in another process; 0 where the system does not tell."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except FileNotFoundError:
        return 0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
