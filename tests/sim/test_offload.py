"""Offloading, OffloadModel and kinds of parallelism on simulated devices: no race, and the bits of the plain model, or
of the same training where nothing is late."""

from __future__ import annotations

import pytest

from smpkit.testing import simulated_device
from tests.sim.on_sim import ORDERS, naming, run_on_sim
from tests.sim.scenarios import SCENARIOS, run_scenario

IN_ONE_ORDER = ("fit",)
"""Beginnings of names. What measures and then chooses takes seconds; what it chooses among runs in every order by other
names."""


def run_all(names: list[str], orders: tuple[tuple[str, int], ...]) -> None:
    """Run scenarios under several orders, each of which must have no race."""
    for name in names:
        for order in orders[:1] if name.startswith(IN_ONE_ORDER) else orders:
            with naming(f"{name!r} under {order}"), simulated_device.no_races(*order):
                run_scenario(name, order)


def quick(ranks: int) -> list[str]:
    return [name for name, scenario in SCENARIOS.items() if scenario.is_quick and scenario.ranks == ranks]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nothing_races_and_no_bit_is_another_in_any_order(ranks: int) -> None:
    run_on_sim(run_all, quick(ranks), ORDERS, size=ranks, order=None, timeout=170)


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_whole_grid(name: str) -> None:
    run_on_sim(run_all, [name], ORDERS, size=SCENARIOS[name].ranks, order=None, timeout=170)
