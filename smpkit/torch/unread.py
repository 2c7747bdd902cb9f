"""Loads that wait for the partition: before it, a rank does not know which parameters it holds.

A rank reads its part when the model is partitioned. Should a script ask for the state before that, all of it is read.
"""

from __future__ import annotations

from collections.abc import Callable

from smpkit.torch.state import state

__all__ = ["defer_load", "drop_deferred_loads", "run_deferred_loads"]

_deferred: list[Callable[[], object]] = []


def defer_load(read: Callable[[], object]) -> None:
    """Keep `read` for `run_deferred_loads`."""
    _deferred.append(read)


def run_deferred_loads() -> None:
    """Read what waits; nothing most of the time."""
    while _deferred:
        _deferred.pop(0)()


def drop_deferred_loads() -> None:
    """Let go of what waits: something else is loaded in its place."""
    _deferred.clear()


state.reset_hooks.append(drop_deferred_loads)
