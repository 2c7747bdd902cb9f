from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.assignment import UnitCost, assignment_of
from smpkit.plan.partition import partition
from smpkit.plan.refine import Objective, predict, refine
from tests.plan.graphs import SETTINGS

EQUAL = [UnitCost(f"layers.{i}", 100, 10, 1.0, output_bytes=4) for i in range(4)]


def test_a_chain_of_equal_parts_takes_the_known_time_and_memory() -> None:
    found = predict(EQUAL, partition(EQUAL, 4, 0.5), Objective(num_microbatches=8, active_microbatches=6))
    assert found.step_seconds == (8 + 3) * 3
    assert found.memory_bytes == (440, 430, 420, 410)


def test_recomputation_takes_a_forward_and_the_memory_of_the_largest_layer() -> None:
    units = [replace(unit, recomputed_flops=1.0, recomputed_bytes=7 + i) for i, unit in enumerate(EQUAL)]
    found = predict(units, assignment_of(units, {0: 0, 1: 0, 2: 1, 3: 1}, 2), Objective(8, 1))
    assert found.step_seconds == 8 * 4 * (1 + 2 + 1)
    assert found.memory_bytes == (800 + 20 + 8, 800 + 20 + 10)


def test_link_time_and_the_cap_are_simulated() -> None:
    halves = assignment_of(EQUAL, {0: 0, 1: 0, 2: 1, 3: 1}, 2)
    one_message = Objective(num_microbatches=1, active_microbatches=4, latency_seconds=0.5, seconds_per_byte=0.25)
    assert predict(EQUAL, halves, one_message).step_seconds == 12 + 2 * (0.5 + 4 * 0.25)
    assert predict(EQUAL, halves, Objective(8, active_microbatches=1)).step_seconds == 8 * 12


def test_units_that_come_back_to_a_rank_are_segments_of_their_own() -> None:
    back = assignment_of(EQUAL, {0: 0, 1: 1, 2: 1, 3: 0}, 2)
    assert predict(EQUAL, back, Objective(1, 1)).step_seconds == 12


def test_a_boundary_moves_to_where_less_travels() -> None:
    units = [UnitCost(name, 0, 0, 1.0, output_bytes=size) for name, size in [("a", 0), ("b", 90), ("c", 50), ("d", 0)]]
    even = partition(units, 2, 0.0)
    found = refine(units, even, Objective(2, 4, seconds_per_byte=1.0))
    assert [place for _, place in even.units] == [0, 0, 1, 1]
    assert [place for _, place in found.units] == [0, 1, 1, 1]


def test_early_ranks_get_less_where_memory_counts() -> None:
    units = [UnitCost(f"layers.{i}", 0, 100, 1.0) for i in range(8)]
    even = partition(units, 2, 0.5)
    found = refine(units, even, Objective(8, 8, memory_weight=1.0))
    assert [load.activation_bytes for load in even.loads] == [400, 400]
    assert [load.activation_bytes for load in found.loads] == [300, 500]


def test_a_memory_limit_comes_before_speed() -> None:
    units = [UnitCost(f"layers.{i}", 0, 100, 1.0) for i in range(8)]
    even = partition(units, 2, 0.0)
    found = refine(units, even, Objective(8, 8, memory_limit_bytes=600))
    assert max(predict(units, found, Objective(8, 8)).memory_bytes) <= 600


def test_fixed_units_stay() -> None:
    units = [UnitCost(name, 0, 0, 1.0, output_bytes=size) for name, size in [("a", 0), ("b", 90), ("c", 50), ("d", 0)]]
    even = partition(units, 2, 0.0)
    found = refine(units, even, Objective(2, 4, seconds_per_byte=1.0), fixed=frozenset({"b"}))
    assert [place for _, place in found.units] == [0, 0, 0, 1]


def test_partition_refines_around_what_is_pinned() -> None:
    units = [UnitCost(name, 0, 0, 1.0, output_bytes=size) for name, size in [("a", 0), ("b", 90), ("c", 50), ("d", 0)]]
    objective = Objective(2, 4, seconds_per_byte=1.0)
    assert [p for _, p in partition(units, 2, 0.0, objective=objective).units] == [0, 1, 1, 1]
    assert [p for _, p in partition(units, 2, 0.0, pinned={"b": 0}, objective=objective).units] == [0, 0, 0, 1]


@pytest.mark.parametrize("flops", [0.0, 1.0], ids=["free", "costly"])
def test_a_model_that_costs_nothing_is_left_alone(flops: float) -> None:
    units = [UnitCost(name, 0, 0, flops) for name in "ab"]
    even = partition(units, 2, 0.5)
    assert refine(units, even, Objective(2, 2, memory_weight=0.5)) == even


@given(
    costs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=7),
    memory_weight=st.sampled_from([0.0, 0.5, 1.0]),
)
@SETTINGS
def test_refining_never_makes_it_worse(costs: list[tuple[int, int, int]], memory_weight: float) -> None:
    units = [UnitCost(str(i), size, size, flops, output) for i, (size, flops, output) in enumerate(costs)]
    objective = Objective(4, 4, memory_weight, seconds_per_byte=0.25)
    even = partition(units, 3, 0.5)
    before, after = predict(units, even, objective), predict(units, refine(units, even, objective), objective)
    if memory_weight == 0:
        assert after.step_seconds <= before.step_seconds
    if memory_weight == 1:
        assert max(after.memory_bytes) <= max(before.memory_bytes)
