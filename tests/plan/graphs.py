"""Segment graphs that tests share: the common shapes by name, and random ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from smpkit.plan.schedule.actions import Costs
from smpkit.plan.schedule.graph import Segment, SegmentGraph, Transfer


def carrying(num_bytes: int, graph: SegmentGraph) -> SegmentGraph:
    """Return a graph each of whose messages has so many bytes."""
    messages = (replace(each, num_bytes=num_bytes * each.is_message) for each in graph.transfers)
    return replace(graph, transfers=tuple(messages))


TIED_HEAD = SegmentGraph.path([Segment(0, 0), Segment(1, 0), Segment(2, 0), Segment(3, 0), Segment(0, 1)])
ENCODER_DECODER = SegmentGraph(
    3,
    (Segment(0, 0), Segment(1, 0), Segment(1, 1), Segment(2, 0)),
    (
        Transfer(Segment(0, 0), Segment(1, 0), 8),
        Transfer(Segment(1, 0), Segment(1, 1)),
        Transfer(Segment(0, 0), Segment(1, 1), 4, differentiable=False),
        Transfer(Segment(1, 1), Segment(2, 0), 8),
        Transfer(Segment(1, 0), Segment(2, 0), 2),
    ),
)
U_NET = SegmentGraph(
    3,
    (Segment(0, 0), Segment(1, 0), Segment(2, 0), Segment(1, 1), Segment(0, 1)),
    (
        Transfer(Segment(0, 0), Segment(1, 0), 4),
        Transfer(Segment(1, 0), Segment(2, 0), 2),
        Transfer(Segment(2, 0), Segment(1, 1), 2),
        Transfer(Segment(1, 0), Segment(1, 1)),
        Transfer(Segment(1, 1), Segment(0, 1), 4),
        Transfer(Segment(0, 0), Segment(0, 1)),
    ),
)
IDLE_RANK = SegmentGraph(4, (Segment(0, 0), Segment(2, 0), Segment(3, 0)), (Transfer(Segment(0, 0), Segment(2, 0)),))
NAMED = {
    "one rank": SegmentGraph.chain(1),
    "chain of 2": SegmentGraph.chain(2),
    "chain of 4": carrying(3, SegmentGraph.chain(4)),
    "loop": SegmentGraph.loop(3, 2),
    "evaluation": SegmentGraph.chain(3, has_backward=False),
    "tied head": TIED_HEAD,
    "encoder-decoder": ENCODER_DECODER,
    "U-Net": U_NET,
    "idle rank": IDLE_RANK,
}


@st.composite
def graphs(draw: st.DrawFn) -> SegmentGraph:
    """Any graph: a microbatch walks over the ranks at will; values go from any segment to any later one."""
    num_ranks = draw(st.integers(1, 4))
    visits = draw(st.lists(st.integers(0, num_ranks - 1), max_size=7))
    segments = tuple(Segment(rank, visits[:place].count(rank)) for place, rank in enumerate(visits))
    pairs = [(source, target) for place, target in enumerate(segments) for source in segments[:place]]
    used = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    transfers = tuple(Transfer(*pair, draw(st.integers(0, 4)), draw(st.booleans())) for pair in used)
    return SegmentGraph(num_ranks, tuple(draw(st.permutations(segments))), transfers, draw(st.booleans()))


@st.composite
def costs_of(draw: st.DrawFn, graph: SegmentGraph) -> Costs:
    """Any costs, in quarters, so that sums are exact."""
    quarters = st.integers(0, 12).map(lambda count: count / 4)
    backward = {segment: draw(quarters) for segment in graph.segments}
    return Costs(
        {segment: draw(quarters) for segment in graph.segments},
        backward,
        {segment: draw(st.sampled_from([0.0, seconds / 2, seconds])) for segment, seconds in backward.items()},
        draw(quarters),
        draw(quarters),
    )
