"""What a plan says about offloading on each stage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.memory import ModelFacts, UnitFacts, memory_of_rank
from smpkit.plan.mesh import Mesh
from smpkit.plan.offload.simulate import Forecast, forecast
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.partition.assignment import UnitCost
from smpkit.plan.partition.search import assign
from smpkit.plan.schedule.actions import Costs
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.search import interleaved, simple
from smpkit.plan.schedule.simulate import Timeline, simulate
from smpkit.plan.speed import Speed

_BOUNDARY = 1000
_UNIT = UnitCost(
    "",
    flops=10.0,
    activation_bytes=_BOUNDARY + 200,
    boundary_bytes=_BOUNDARY,
    recomputed_bytes=7000,
    recomputed_flops=10,
)
_COSTS = [replace(_UNIT, name=f"layer{i}") for i in range(6)]
_MODEL = ModelFacts("Net", tuple(UnitFacts(cost, ()) for cost in _COSTS), {}, (), traced=True)
"""Six equal layers, each checkpointed: 10 operations, a boundary of 1000 bytes and 200 more that stays."""


def _timeline(num_ranks: int) -> Timeline:
    """Eight microbatches, of which each layer takes 10 s forward and 30 s backward."""
    graph = SegmentGraph.chain(num_ranks)
    seconds = {Segment(rank, 0): 60.0 / num_ranks for rank in range(num_ranks)}
    costs = Costs(seconds, {segment: 3 * forward for segment, forward in seconds.items()})
    return simulate(simple(graph, 8) if num_ranks == 1 else interleaved(graph, 8, 8), costs)


def _forecast(num_ranks: int, bytes_per_second: float, model: ModelFacts = _MODEL) -> tuple[Forecast, ...]:
    per_rank = 6 // num_ranks
    runs = {Segment(rank, 0): model.costs[rank * per_rank :][:per_rank] for rank in range(num_ranks)}
    speed = Speed(1.0, LinkSpeed(bytes_per_second, bytes_per_second))
    return forecast(_timeline(num_ranks), runs, 4, speed)


def test_fast_link_hides_everything_and_little_stays() -> None:
    first, last = _forecast(2, 1000)
    assert first.resident_bytes == 2 * 3 * _BOUNDARY
    # Two that the host, which runs ahead, cannot know to be copied, the one in use, and the one loaded ahead.
    assert first.device_bytes == 4 * _BOUNDARY
    assert (first.stall_seconds, last.stall_seconds) == (0, 0)
    assert (first.lead, first.sufficient_horizon) == (1, 1)
    assert first.out_bytes == 8 * 3 * _BOUNDARY
    assert first.back_bytes == first.out_bytes - 2 * _BOUNDARY  # the last two are held when their backward comes
    assert (last.resident_bytes, last.device_bytes) == (3 * _BOUNDARY, 2 * _BOUNDARY)
    assert first.needed_bytes_per_second == _BOUNDARY / 10
    assert first.step_seconds == _timeline(2).makespan_seconds


def test_slow_link_lets_compute_wait_and_says_what_would_do() -> None:
    slow = _forecast(1, 40)[0]
    assert slow.stall_seconds > 0
    assert slow.needed_bytes_per_second == 100
    assert slow.step_seconds == pytest.approx(_timeline(1).makespan_seconds + slow.stall_seconds)


def test_a_step_without_checkpointed_layers_moves_nothing() -> None:
    units = tuple(replace(unit, cost=replace(unit.cost, boundary_bytes=0)) for unit in _MODEL.units)
    (only,) = _forecast(1, 1.0, replace(_MODEL, units=units))
    assert (only.out_bytes, only.resident_bytes, only.needed_bytes_per_second) == (0, 0, 0.0)


def test_layers_are_those_of_the_segments() -> None:
    timeline = simulate(simple(SegmentGraph.loop(2, 2), 2), Costs())
    names = {Segment(0, 0): [0, 1], Segment(1, 0): [2], Segment(0, 1): [3], Segment(1, 1): [4, 5]}
    runs = {segment: [_COSTS[index] for index in indices] for segment, indices in names.items()}
    first, second = forecast(timeline, runs, 1, Speed(5.0, LinkSpeed(math.inf, math.inf)))
    # Both hold the three layers of two microbatches at the end of the last forward.
    assert first.resident_bytes == second.resident_bytes == 2 * 3 * _BOUNDARY
    apart = forecast(timeline, {**runs, Segment(0, 1): []}, 1, Speed(5.0, LinkSpeed(math.inf, math.inf)))
    assert apart[0].resident_bytes == 2 * 2 * _BOUNDARY


@pytest.mark.parametrize(
    ("offloaded", "boundaries"),
    [((None, None), [(6000, 0), (3000, 0)]), ([(3000, 6000), (1000, 2000)], [(3000, 6000), (1000, 2000)])],
)
def test_memory_of_a_rank_counts_boundaries_and_one_recomputation(
    offloaded: list[tuple[int, int] | None], boundaries: list[tuple[int, int]]
) -> None:
    config, assignment = ModelParallelConfig(), assign(_COSTS, 2, {f"layer{i}": i // 3 for i in range(6)}, 0)
    held = [
        memory_of_rank(_MODEL, assignment, config, Mesh(2, 1, 1), [rank], 2 - rank, "sgd", offloaded[rank])
        for rank in (0, 1)
    ]
    assert [(rank.boundaries_bytes, rank.host_bytes) for rank in held] == boundaries
    rest = [6 * 200 + 7000, 3 * 200 + 7000]
    assert [rank.activations_bytes for rank in held] == [a + b for a, (b, _) in zip(rest, boundaries, strict=True)]
