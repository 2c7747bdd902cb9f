"""The choice by simulation: against brute force, against what is computed at least, and where sums are wrong."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.tune.chain import (
    ChainLayer,
    ChainLimits,
    Choice,
    LoneEngine,
    choose,
    choose_by_simulation,
    cost_of,
    seconds_of,
)

ALIKE = ChainLayer(1.0, 2.0, saved_bytes=160, input_bytes=10)
FREE = LinkSpeed(math.inf, math.inf)
KEEP, OFFLOAD, RECOMPUTE = Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE


def limits(device: float, forwards: float) -> ChainLimits:
    """Return the limits of one process whose link copies an input of `ALIKE` in so many forwards."""
    rate = 10 / forwards
    return ChainLimits(1, device, 1e9, LinkSpeed(rate, rate), window_layers=5, overlaps=False)


def test_compute_is_a_bound_of_the_simulated_time() -> None:
    source = random.Random(0)
    for _ in range(30):
        layers = [
            ChainLayer(source.uniform(0.5, 2), source.uniform(1, 4), source.randint(20, 200), source.randint(1, 30))
            for _ in range(6)
        ]
        within = limits(1e9, source.choice([0.1, 1.0, 3.0]))
        choices = tuple(source.choice([*Choice]) for _ in layers)
        simulated = seconds_of(layers, choices, within, LoneEngine())
        assert simulated >= cost_of(layers, choices, replace(within, link=FREE)).seconds * (1 - 1e-9)


@pytest.mark.parametrize("forwards", [0.1, 0.9, 2.5])
@pytest.mark.parametrize("device", [220, 330, 700])
def test_brute_force_finds_nothing_better_for_layers_that_are_alike(forwards: float, device: float) -> None:
    layers, within = [ALIKE] * 6, limits(device, forwards)
    found = choose_by_simulation(layers, within, LoneEngine())
    fitting = [each for each in itertools.product(Choice, repeat=6) if cost_of(layers, each, within).fits(within)]
    assert (found is None) == (not fitting)
    if found is not None:
        best = min(seconds_of(layers, each, within, LoneEngine()) for each in fitting)
        assert found.cost.seconds == pytest.approx(best)
        assert found.cost.seconds == pytest.approx(seconds_of(layers, found.choices, within, LoneEngine()))
        bound = choose(layers, replace(within, link=FREE))
        assert bound is not None
        assert found.cost.seconds * (1 - found.gap) == pytest.approx(bound.cost.seconds)


def test_over_a_slow_link_it_copies_less_than_sums_would() -> None:
    layers, within = [ALIKE] * 16, limits(1300, 2.5)
    by_sums, found = choose(layers, within), choose_by_simulation(layers, within, LoneEngine(lead=2))
    assert by_sums is not None
    assert found is not None
    assert seconds_of(layers, by_sums.choices, within, LoneEngine(lead=2)) > by_sums.cost.seconds + 1
    assert found.cost.seconds < seconds_of(layers, by_sums.choices, within, LoneEngine(lead=2)) - 1


def test_a_layer_that_may_not_be_kept_is_not() -> None:
    layers = [ChainLayer(1.0, 2.0, 160, 10, may_keep=False)] * 4
    found = choose_by_simulation(layers, limits(1e9, 0.1), LoneEngine())
    assert found is not None
    assert KEEP not in found.choices
    assert choose([ChainLayer(1.0, 2.0, 160, 0, may_keep=False)], limits(1e9, 0.1)) is not None  # cannot be recomputed


@pytest.mark.parametrize(("forward", "again"), [(1e-4, 1e-4), (1e-3, 1e-3), (1e-2, 1e-5), (1e-2, 1e-4)])
def test_of_choices_that_are_as_fast_the_one_that_holds_less_is_taken(forward: float, again: float) -> None:
    # Which of the two it was depended on how sums of measured times were rounded.
    layers = [ChainLayer(forward, 2 * forward, saved_bytes=1920, input_bytes=384, recompute_seconds=again)] * 8
    within = ChainLimits(1, 9216, 1e9, LinkSpeed(1e13, 1e13), 3, overlaps=False, forward_bytes=0)
    found = choose_by_simulation(layers, within, LoneEngine(lead=1))
    assert found is not None
    assert found.choices == (OFFLOAD,) * 4 + (KEEP,) * 4
