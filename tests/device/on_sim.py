"""Run functions on ranks that have simulated devices, and fail where there is a race."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smpkit.testing import simulated_device
from smpkit.testing.simulated_device.build import Unavailable, library
from tests.ranks import run_ranks
from tests.simulated import Order, run_in_order

__all__ = ["ORDERS", "naming", "needs_sim", "run_on_sim"]

ORDERS: tuple[Order, ...] = (("lazy", 0), ("compute", 0), ("copies", 0), ("random", 1))
"""Policies and seeds; without an edge of tests/sim_mutants.yaml, the first or the last shows it."""


def needs_sim() -> None:
    """Skip the test, with the reason, where the device cannot be compiled."""
    try:
        library()
    except Unavailable as error:
        pytest.skip(str(error))


def run_on_sim(
    function: Callable[..., Any],
    *args: Any,
    size: int = 1,
    devices: int = 1,
    order: Order | None = ("lazy", 0),
    timeout: float = 120,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Return what `function(*args)` returns on each rank, run under one order and without races; None: under none."""
    needs_sim()
    if order is None:
        return run_ranks(_loaded, size, devices, function, args, timeout=timeout, env=env)
    return run_ranks(run_in_order, size, order, devices, function, args, timeout=timeout, env=env)


def _loaded(devices: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    simulated_device.load(devices)
    return function(*args)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Say what was tried if it fails."""
    try:
        yield
    except BaseException as error:
        raise AssertionError(what) from error
