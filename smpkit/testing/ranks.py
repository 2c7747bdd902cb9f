"""Run a function on several real ranks in a test: `smp.launch`, without what the test's environment has of jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smpkit.torch.launch import RankFailed as LaunchedRankFailed
from smpkit.torch.launch import run_processes

_DROPPED = ("SM_", "SMP_", "SMPKIT_", "OMPI_", "PMI")


class RankFailed(LaunchedRankFailed, AssertionError):
    """A rank raised, died or never returned; the message has the traceback of each rank that failed."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    hosts: int = 1,
) -> list[Any]:
    """Call `function(*args)` on `size` ranks and return their results in rank order.

    Args:
        function: a function of a module, so that it can be pickled; it calls `smp.init()` itself.
        size: the number of ranks.
        args: picklable arguments, the same for every rank.
        timeout: seconds after which ranks that still run are killed.
        env: added to each rank's environment, which is torchrun's (`RANK`, `LOCAL_RANK`, ...).
        hosts: how many machines the ranks believe they are on; must divide `size`.

    Raises:
        RankFailed: a rank raised, died or ran longer than `timeout`; has all tracebacks.
    """
    environ = {"OMP_NUM_THREADS": "1", "SMPKIT_SUMMARY": "0", **(env or {})}
    return run_processes(
        function, *args, size=size, environ=environ, timeout=timeout, hosts=hosts, dropped=_DROPPED, error=RankFailed
    )
