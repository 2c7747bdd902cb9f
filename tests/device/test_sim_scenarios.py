"""Offloading, OffloadModel and kinds of parallelism on simulated devices: no race, and the bits of the plain model, or
of the same training where nothing is late."""

from __future__ import annotations

import pytest

from smpkit.testing import simulated_device
from tests.device.on_sim import ORDERS, naming, run_on_sim
from tests.device.scenarios import SCENARIOS, run_scenario
from tests.simulated import Order

IN_ONE_ORDER = ("fit", "ranks, pipeline and tensor", "calibration", "measured", "ranks, pipeline, over a model of NCCL")
"""Beginnings of names. The first two take seconds, and what is in them runs in every order by other names; the others
have an order of their own."""

QUICK = [name for name, scenario in SCENARIOS.items() if scenario.is_quick]


def run_all(name: str, orders: tuple[Order, ...]) -> None:
    """Run a scenario under several orders, in which there must be no race."""
    for order in orders:
        with naming(f"{name!r} under {order}"), simulated_device.no_races(*order):
            run_scenario(name, order)


def run(name: str, orders: tuple[Order, ...]) -> None:
    """Run a scenario on its ranks, under the first order alone if others do not matter."""
    chosen = orders[:1] if name.startswith(IN_ONE_ORDER) else orders
    run_on_sim(run_all, name, chosen, size=SCENARIOS[name].ranks, timeout=170)


@pytest.mark.parametrize("name", QUICK)
def test_nothing_races_and_no_bit_is_another(name: str) -> None:
    run(name, ORDERS[::3])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_whole_grid(name: str) -> None:
    run(name, ORDERS)
