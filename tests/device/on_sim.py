"""Run functions on ranks that have simulated devices, whatever device was chosen."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from smpkit.testing import simulated_device
from tests.chosen_device import VARIABLE
from tests.ranks import run_ranks
from tests.simulated import Order, needs_sim

ORDERS: tuple[Order, ...] = (("lazy", 0), ("compute", 0), ("copies", 0), ("random", 1))
"""Policies and seeds; without an edge of tests/sim_mutants.yaml, the first or the last shows it."""


def run_on_sim(
    function: Callable[..., Any], *args: Any, size: int = 1, devices: int = 1, timeout: float = 120
) -> list[Any]:
    """Return what `function(*args)` returns on each rank; it chooses the order of the device, and looks for races."""
    needs_sim()
    own = {VARIABLE: "cpu"}  # or they would have the chosen device already
    return run_ranks(_loaded, size, devices, function, args, timeout=timeout, env=own)


def on_sim(*, size: int = 1, devices: int = 1) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Let ranks with simulated devices call a test."""

    def decorate(test: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(test)
        def started() -> None:
            run_on_sim(_call, test.__module__, test.__name__, size=size, devices=devices)

        return started

    return decorate


def _call(module: str, name: str) -> None:
    getattr(importlib.import_module(module), name).__wrapped__()


def _loaded(devices: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    simulated_device.load(devices)
    return function(*args)


def call_pickled(call: bytes) -> Any:
    """Call a function with arguments, both pickled, on a rank.

    What they belong to may ask for its device when it is imported. A rank knows that from its environment, which it
    gets after it has unpickled what it is to call.
    """
    function, arguments = pickle.loads(call)
    return function(**arguments)


@contextlib.contextmanager
def in_virtual_time() -> Iterator[None]:
    """Let all be done when its time has come; the host's clock is the device's."""
    simulated_device.set_policy("timed")
    now = simulated_device.now
    with mock.patch.multiple(time, perf_counter=now, perf_counter_ns=lambda: round(now() * 1e9)):
        yield


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Say what was tried if it fails."""
    try:
        yield
    except BaseException as error:
        raise AssertionError(what) from error
