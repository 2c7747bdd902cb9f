"""The simulated device of tests, in an order that `tests.chosen_device` or a test chooses; races are errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import accelerator

from smpkit.testing import simulated_device
from smpkit.testing.simulated_device import Unavailable, library

_MOST_FAILED = 100
Order = tuple[str, int]
"""A policy and its seed."""


def order_of(device: str) -> Order | None:
    """Return the order of a device such as "sim:lazy:0"; None if it is not simulated."""
    kind, policy, seed, *_ = *device.split(":"), "", ""
    return (policy or "lazy", int(seed or 0)) if kind == "sim" else None


def needs_sim() -> None:
    """Skip the test, with the reason, where the device cannot be compiled."""
    try:
        library()
    except Unavailable as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def in_order(order: Order) -> Iterator[None]:
    """Run a test, or what a rank does, on a simulated device; then wait for it, and raise if there were races."""
    simulated_device.load()
    with simulated_device.no_races(*order):
        yield
        # What others still receive must leave before this rank ends; where one has failed, it never arrives.
        _drain()


def _drain() -> None:
    """Wait for the device, whatever messages have failed: each of them raises once."""
    for _ in range(_MOST_FAILED):
        try:
            accelerator.synchronize()
        except dist.DistBackendError:
            continue
        return


def run_in_order(order: Order, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what `function(*args)` returns there; for ranks, which are forked before they have a device."""
    with in_order(order):
        return function(*args)
