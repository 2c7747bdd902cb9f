"""`run_ranks`, with what the ranks of these tests import loaded ahead; on simulated devices if told."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any, Final

from smpkit.testing.ranks import FORKSERVER, RankFailed, preload
from smpkit.testing.ranks import run_ranks as run_on_this_machine
from tests.simulated import order_from, run_in_order

__all__ = ["FORKSERVER", "RANKS_ON_SIM", "RankFailed", "run_ranks"]

RANKS_ON_SIM: Final = "RANKS_ON_SIM"
"""Has a policy and a seed, as "lazy:0": ranks have a simulated device each, and a race in one of them is an error."""

preload("tests.preloaded")


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    hosts: int = 1,
) -> list[Any]:
    """Do what `smpkit.testing.run_ranks` does, whose arguments these are."""
    _start_server()
    order = order_from(RANKS_ON_SIM)
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
