"""Offloading, OffloadModel and kinds of parallelism on simulated devices: no race, and the bits of the plain model, or
of the same training where nothing is late."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from smpkit.testing import simulated_device
from tests.device.on_sim import ORDERS, naming, run_on_sim
from tests.device.scenarios import SCENARIOS, run_scenario
from tests.simulated import Order

IN_ONE_ORDER = ("fit", "calibration", "measured", "ranks, pipeline, over a model of NCCL")
"""Beginnings of names. `fit` takes seconds, and what it chooses among runs in every order by other names; the others
have an order of their own."""


def run_all(names: list[str], orders: dict[str, tuple[Order, ...]]) -> None:
    """Run scenarios under several orders each, in which there must be no race."""
    for name in names:
        for order in orders[name]:
            with naming(f"{name!r} under {order}"), simulated_device.no_races(*order):
                run_scenario(name, order)


def quick(ranks: int) -> list[str]:
    return [name for name, scenario in SCENARIOS.items() if scenario.is_quick and scenario.ranks == ranks]


def in_turns(names: list[str]) -> dict[str, tuple[Order, ...]]:
    """Return the first order, which finds every edge that ranks lack, and one of the others for each scenario."""
    others = itertools.cycle(ORDERS[1:])
    return {name: ORDERS[:1] if name.startswith(IN_ONE_ORDER) else (ORDERS[0], next(others)) for name in names}


def every(names: list[str]) -> dict[str, tuple[Order, ...]]:
    return {name: ORDERS[:1] if name.startswith(IN_ONE_ORDER) else ORDERS for name in names}


@pytest.mark.parametrize(("ranks", "orders"), [(1, every), (2, in_turns), (4, in_turns)])
def test_nothing_races_and_no_bit_is_another_in_any_order(
    ranks: int, orders: Callable[[list[str]], dict[str, tuple[Order, ...]]]
) -> None:
    names = quick(ranks)
    run_on_sim(run_all, names, orders(names), size=ranks, order=None, timeout=170)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_whole_grid(name: str) -> None:
    run_on_sim(run_all, [name], every([name]), size=SCENARIOS[name].ranks, order=None, timeout=170)
