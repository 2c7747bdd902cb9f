"""What a plan says about offloading on each stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smpkit.plan.memory import ModelFacts, UnitFacts, memory_of_ranks
from smpkit.plan.offload.forecast import Forecast, Speed, forecast, layers_of
from smpkit.plan.offload.work import LayerCost, LinkSpeed
from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.partition.search import assign
from smpkit.plan.schedule.actions import Costs
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.search import interleaved, simple
from smpkit.plan.schedule.simulate import Timeline, simulate

_BOUNDARY = 1000
_NAMES = [f"layer{i}" for i in range(6)]


def _model() -> ModelFacts:
    """Six equal layers, each checkpointed: 10 operations, a boundary of 1000 bytes and 200 more that stays."""
    costs = [
        UnitCost(
            name,
            flops=10.0,
            activation_bytes=_BOUNDARY + 200,
            boundary_bytes=_BOUNDARY,
            recomputed_bytes=7000,
            recomputed_flops=10.0,
        )
        for name in _NAMES
    ]
    return ModelFacts("Net", tuple(UnitFacts(cost, ()) for cost in costs), {}, (), traced=True)


def _at(flops_per_second: float) -> Speed:
    return Speed(flops_per_second, LinkSpeed(1.0, 1.0))


def _assignment(places: list[int]) -> Assignment:
    costs = [unit.cost for unit in _model().units]
    return assign(costs, max(places) + 1, dict(zip(_NAMES, places, strict=True)), 0)


def _timeline(num_ranks: int, num_microbatches: int) -> Timeline:
    """Each rank's layers take 10 s per layer forward and 30 s backward."""
    graph = SegmentGraph.chain(num_ranks)
    seconds = {Segment(rank, 0): 10.0 * len(_NAMES) / num_ranks for rank in range(num_ranks)}
    costs = Costs(seconds, {segment: 3 * each for segment, each in seconds.items()})
    make = simple(graph, num_microbatches) if num_ranks == 1 else interleaved(graph, num_microbatches, num_microbatches)
    return simulate(make, costs)


def _forecast(num_ranks: int, bytes_per_second: float, horizon: int = 4) -> tuple[Forecast, ...]:
    places = [i * num_ranks // len(_NAMES) for i in range(len(_NAMES))]
    speed = Speed(1.0, LinkSpeed(bytes_per_second, bytes_per_second))
    return forecast(_model(), _assignment(places), _timeline(num_ranks, 8), horizon, speed)


def test_fast_link_hides_everything_and_little_stays() -> None:
    first, last = _forecast(2, 1000)
    assert first.resident_bytes == 2 * 3 * _BOUNDARY
    # Two that the host, which runs ahead, cannot know to be copied, the one in use, and the one loaded ahead.
    assert first.device_bytes == 4 * _BOUNDARY
    assert (first.stall_seconds, last.stall_seconds) == (0, 0)
    assert (first.lead, first.sufficient_horizon) == (1, 1)
    assert first.out_bytes == 8 * 3 * _BOUNDARY
    assert first.back_bytes == first.out_bytes - 2 * _BOUNDARY  # the last two are held when their backward comes
    assert last.resident_bytes == 3 * _BOUNDARY
    assert last.device_bytes <= last.resident_bytes
    assert first.needed_bytes_per_second == _BOUNDARY / 10


def test_step_is_that_of_the_schedule_when_nothing_stalls() -> None:
    assert _forecast(2, 1000)[0].step_seconds == _timeline(2, 8).makespan_seconds


def test_slow_link_lets_compute_wait_and_says_what_would_do() -> None:
    slow = _forecast(1, 40)[0]
    assert slow.stall_seconds > 0
    assert slow.needed_bytes_per_second == 100
    assert slow.step_seconds == pytest.approx(_timeline(1, 8).makespan_seconds + slow.stall_seconds)


def test_a_step_without_checkpointed_layers_moves_nothing() -> None:
    model = _model()
    units = tuple(replace(unit, cost=replace(unit.cost, boundary_bytes=0)) for unit in model.units)
    speed = Speed(1.0, LinkSpeed(1.0, 1.0))
    (found,) = forecast(replace(model, units=units), _assignment([0] * 6), _timeline(1, 2), "auto", speed)
    assert (found.out_bytes, found.resident_bytes, found.needed_bytes_per_second) == (0, 0, 0.0)


def test_segments_of_a_rank_are_the_units_between_other_ranks() -> None:
    timeline = Timeline(simple(SegmentGraph.loop(2, 2), 2), (), ())
    layers = layers_of(_model(), _assignment([0, 0, 1, 0, 1, 1]), timeline, 0, _at(5.0))
    layer = LayerCost(2.0, 4.0, _BOUNDARY, 2.0)
    assert layers == [[layer, layer], [layer]]


def test_units_that_return_to_a_rank_are_one_segment_where_the_plan_has_one() -> None:
    layers = layers_of(_model(), _assignment([0, 1, 0, 1, 0, 1]), _timeline(2, 2), 0, _at(1.0))
    assert [len(each) for each in layers] == [3]


def test_memory_of_a_rank_counts_boundaries_and_one_recomputation() -> None:
    model, assignment = _model(), _assignment([0, 0, 0, 1, 1, 1])
    plain = memory_of_ranks(model, assignment, live_microbatches=(2, 1), states_per_parameter=0, replicated=False)
    assert [each.activations_bytes for each in plain] == [2 * 3 * 1200 + 7000, 3 * 1200 + 7000]
    assert [each.boundaries_bytes for each in plain] == [6000, 3000]
    offloaded = memory_of_ranks(
        model,
        assignment,
        live_microbatches=(2, 1),
        states_per_parameter=0,
        replicated=False,
        offloaded=[(3000, 6000), (1000, 2000)],
    )
    assert [each.activations_bytes for each in offloaded] == [3000 + 6 * 200 + 7000, 1000 + 3 * 200 + 7000]
    assert [(each.boundaries_bytes, each.host_bytes) for each in offloaded] == [(3000, 6000), (1000, 2000)]
