from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.schedule.actions import Costs
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.list_scheduler import list_schedule
from smpkit.plan.schedule.search import bounds_of
from tests.plan.graphs import IDLE_RANK, carrying, costs_of, graphs


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 4), (2, 8), (4, 16), (8, 32)])
def test_the_bound_of_a_chain_is_the_ideal(num_ranks: int, num_microbatches: int) -> None:
    bounds = bounds_of(SegmentGraph.chain(num_ranks), num_microbatches, Costs())
    assert bounds.step_seconds == (num_microbatches + num_ranks - 1) * 3
    assert bounds.full_pipe == tuple(num_ranks - rank for rank in range(num_ranks))


def test_one_microbatch_alone_takes_the_critical_path() -> None:
    costs = Costs(latency_seconds=0.5, seconds_per_byte=0.25)
    bounds = bounds_of(carrying(2, SegmentGraph.chain(2)), 1, costs)
    assert bounds.step_seconds == 1 + 1 + 1 + 2 + 1 + 2
    assert bounds.full_pipe == (8 / 3, 1)


def test_ranks_without_work_hold_nothing() -> None:
    assert bounds_of(IDLE_RANK, 1, Costs()).full_pipe[1] == 0
    assert bounds_of(SegmentGraph(2, ()), 3, Costs()).step_seconds == 0


def test_a_free_graph_takes_no_time() -> None:
    bounds = bounds_of(SegmentGraph.path([Segment(0, 0)]), 1, Costs(0, 0))
    assert bounds.full_pipe == (0,)


@given(data=st.data(), graph=graphs(), num_microbatches=st.integers(1, 6), split=st.booleans())
def test_nothing_beats_the_bound(data: st.DataObject, graph: SegmentGraph, num_microbatches: int, split: bool) -> None:
    costs = data.draw(costs_of(graph))
    caps = [num_microbatches] * graph.num_ranks
    _, seconds = list_schedule(graph, num_microbatches, caps, costs, split_backward=split)
    assert seconds >= bounds_of(graph, num_microbatches, costs, split).step_seconds
