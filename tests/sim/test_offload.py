"""Activation offloading and OffloadModel on a simulated device: the plain model's bits, and no race."""

from __future__ import annotations

import time

import pytest

from smpkit.testing import simulated_device
from tests.sim.on_sim import ORDERS, run_on_sim
from tests.sim.scenarios import SCENARIOS, run_scenario

LAZY, COMPUTE, COPIES, _ = ORDERS
NEED_MORE_ORDERS = {
    "activations, an exception in forward": [LAZY, COMPUTE],
    "OffloadModel, checkpointed, backward": [LAZY, COMPUTE, COPIES],
}
"""Without an edge of tests/sim_mutants.yaml that these come to, some of these orders show it and others do not."""


def run_under(name: str, orders: list[tuple[str, int]]) -> dict[str, float]:
    """Run a scenario under several orders, each of which must have no race; return the seconds of each."""
    seconds = {}
    for order in orders:
        start = time.perf_counter()
        with simulated_device.no_races(*order):
            try:
                run_scenario(name, order)
            except Exception as error:
                raise AssertionError(f"{name!r} under {order}") from error
        seconds[str(order)] = time.perf_counter() - start
    return seconds


NAMES = [name for name, scenario in SCENARIOS.items() if scenario.ranks == 1]


@pytest.mark.parametrize("name", [name for name in NAMES if SCENARIOS[name].is_quick])
def test_offloading_changes_no_bit_and_has_no_race(name: str) -> None:
    run_on_sim(run_under, name, NEED_MORE_ORDERS.get(name, [LAZY]), order=None)


OF_RANKS = [name for name, scenario in SCENARIOS.items() if scenario.ranks > 1 and scenario.is_quick]


def run_all(names: list[str], order: tuple[str, int]) -> None:
    for name in names:
        run_under(name, [order])


def test_ranks_give_what_they_give_when_nothing_is_late() -> None:
    run_on_sim(run_all, OF_RANKS, ORDERS[0], size=2, order=None, timeout=170)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_grid(name: str) -> None:
    run_on_sim(run_under, name, [ORDERS[0], ORDERS[3]], order=None, timeout=150)


CHOSEN = [name for name in SCENARIOS if "auto" in name.replace("autocast", "").split(", ")[0]]


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen_for_layers_changes_no_bit_in_any_order(name: str, order: tuple[str, int]) -> None:
    run_on_sim(run_under, name, [order], size=SCENARIOS[name].ranks, order=None, timeout=170)
