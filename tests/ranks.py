"""`run_ranks`, with what the ranks of these tests import loaded ahead; on simulated devices if told."""

from __future__ import annotations

from collections.abc import Callable
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
    order = order_from(RANKS_ON_SIM)
    if order is None:
        return run_on_this_machine(function, size, *args, timeout=timeout, env=env, hosts=hosts)
    return run_on_this_machine(run_in_order, size, order, 1, function, args, timeout=timeout, env=env, hosts=hosts)
