"""`run_ranks`, with what the ranks of these tests import loaded ahead; on the device that was chosen."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

from smpkit.testing.ranks import FORKSERVER, RankFailed, preload
from smpkit.testing.ranks import run_ranks as run_on_this_machine
from tests.chosen_device import VARIABLE, chosen_device
from tests.simulated import order_of, run_in_order

__all__ = ["FORKSERVER", "RankFailed", "run_ranks"]

preload("tests.preloaded")


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    hosts: int = 1,
) -> list[Any]:
    """Do what `smpkit.testing.run_ranks` does, whose arguments these are; `env` may have a device of its own."""
    _start_server()
    order = order_of((env or {}).get(VARIABLE, chosen_device()))
    if order is None:
        return run_on_this_machine(function, size, *args, timeout=timeout, env=env, hosts=hosts)
    return run_on_this_machine(run_in_order, size, order, 1, function, args, timeout=timeout, env=env, hosts=hosts)


def _start_server() -> None:
    """Start the server that ranks are forked from, and multiprocessing's tracker, so that they belong to no test.

    Otherwise they belong to the first test with ranks. If that one fails, they are killed with what it has left behind,
    and every later test with ranks fails, too.
    """
    test = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        forkserver.ensure_running()
    finally:
        if test is not None:
            os.environ["PYTEST_CURRENT_TEST"] = test
