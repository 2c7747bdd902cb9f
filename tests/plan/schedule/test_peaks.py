from __future__ import annotations

from smpkit.plan.partition.assignment import UnitCost
from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.recorded_graph import peaks
from smpkit.plan.schedule.templates import looped, one_f_one_b

UNITS = [UnitCost(name, activation_bytes=10**place, output_bytes=place) for place, name in enumerate("abcdef")]


def test_live_segments_are_weighed_by_what_they_keep() -> None:
    chain = one_f_one_b(2, 4)
    assert peaks(chain, {Segment(0, 0): UNITS[:1], Segment(1, 0): UNITS[1:2]}, {}) == [2.0, 1.0]
    loop = looped(SegmentGraph.loop(2, 2), 4, num_groups=2, warmup_per_rank=2)
    runs = dict(zip(loop.graph.topological, ([unit] for unit in UNITS), strict=False))
    # At its peak rank 0 has three first chunks and two second ones: F2 runs before B0.1.
    assert peaks(loop, runs, {})[0] == (3 * 1 + 2 * 100) / 101
    unknown = {segment: [UnitCost(str(segment))] for segment in runs}
    assert peaks(loop, unknown, {}) == list(loop.peak_live_microbatches)


AT_ONCE, POSTPONED = "F0 B0 W0 F1 B1 W1", "F0 B0 F1 B1 W0 W1"


def live_on_last(last: str, *run: UnitCost) -> float:
    """Return what the second of two ranks, which runs the actions of `last`, holds at its peak."""
    actions = tuple(tuple(map(Action.parse, each.split())) for each in ("F0 F1 B0 B1", last))
    schedule = Schedule("written by hand", SegmentGraph.chain(2), 2, actions, (2, 2))
    return peaks(schedule, {Segment(rank, 0): run for rank in range(2)}, {})[1]


def test_gradients_that_wait_for_the_second_half_of_a_backward_count_until_it_has_run() -> None:
    unit = UnitCost("unit", activation_bytes=1000, postponed_bytes=500, weight_products=1)
    assert live_on_last(AT_ONCE, unit) == 1.5
    assert live_on_last(POSTPONED, unit) == 3


def test_the_first_half_of_a_backward_frees_what_lies_behind_the_last_product_with_a_weight() -> None:
    layer = UnitCost("layer", activation_bytes=1000, postponed_bytes=500, weight_products=1)
    norm = UnitCost("norm", activation_bytes=200)
    # While F1 runs, microbatch 0 keeps 1000 + 500; at B1 both wait, without the norm's 200 each.
    assert live_on_last(POSTPONED, layer, norm) == 3000 / 1200
    assert live_on_last(POSTPONED, norm, layer) == 3400 / 1200


def test_what_is_computed_again_is_not_split_and_ends_with_its_backward() -> None:
    assert live_on_last(POSTPONED, UnitCost("unit", activation_bytes=1000, recomputed_flops=10.0)) == 1


def test_copies_of_received_values_count_beside_what_units_keep() -> None:
    runs = {Segment(rank, 0): [UnitCost("unit", activation_bytes=1000)] for rank in range(2)}
    assert peaks(one_f_one_b(2, 4), runs, {Segment(0, 0): 0, Segment(1, 0): 500}) == [2.0, 1.5]
