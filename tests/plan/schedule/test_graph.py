from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from smpkit.plan.schedule.graph import Kind, Need, ScheduleError, Segment, SegmentGraph, Transfer
from tests.plan.graphs import ENCODER_DECODER, IDLE_RANK, TIED_HEAD, U_NET, graphs

A, B, A1 = Segment(0, 0), Segment(1, 0), Segment(0, 1)


def test_chain_hands_values_from_rank_to_rank() -> None:
    graph = SegmentGraph.chain(3)
    assert [str(each) for each in graph.topological] == ["rank 0 segment 0", "rank 1 segment 0", "rank 2 segment 0"]
    assert [(t.source.rank, t.target.rank) for t in graph.transfers] == [(0, 1), (1, 2)]


def test_path_keeps_values_on_a_rank() -> None:
    assert [each.is_message for each in SegmentGraph.path([A, A1, B]).transfers] == [False, True]


@pytest.mark.parametrize(
    ("graph", "depths"),
    [
        (SegmentGraph.chain(4), (4, 3, 2, 1)),
        (TIED_HEAD, (5, 4, 3, 2)),
        (ENCODER_DECODER, (4, 3, 1)),
        (U_NET, (5, 4, 3)),
        (IDLE_RANK, (2, 0, 1, 1)),
    ],
    ids=["chain", "tied head", "encoder-decoder", "U-Net", "idle rank"],
)
def test_depth_is_the_longest_way_to_the_end(graph: SegmentGraph, depths: tuple[int, ...]) -> None:
    assert graph.depths == depths


def test_forward_needs_the_segment_before_on_its_rank_and_every_value() -> None:
    needs = U_NET.needs(Kind.FORWARD, Segment(1, 1))
    assert [(need.segment, need.transfer is not None) for need in needs] == [
        (Segment(1, 0), False),
        (Segment(2, 0), True),
        (Segment(1, 0), False),
    ]


def test_backward_starts_in_the_last_segment_of_a_rank_and_goes_back() -> None:
    last, first = ENCODER_DECODER.needs(Kind.BACKWARD, Segment(1, 1)), ENCODER_DECODER.needs(Kind.BACKWARD, B)
    assert [(need.kind, need.segment) for need in last] == [
        (Kind.FORWARD, Segment(1, 1)),
        (Kind.BACKWARD, Segment(2, 0)),
    ]
    assert first[0] == Need(Kind.BACKWARD, Segment(1, 1))


def received(graph: SegmentGraph, kind: Kind, segment: Segment) -> list[Transfer]:
    return [need.transfer for need in graph.needs(kind, segment) if need.transfer is not None]


def test_gradients_travel_back_along_differentiable_transfers_only() -> None:
    assert [t.num_bytes for t in ENCODER_DECODER.sends(Kind.FORWARD, A)] == [8, 4]
    assert [t.num_bytes for t in received(ENCODER_DECODER, Kind.BACKWARD, A)] == [8]
    assert ENCODER_DECODER.sends(Kind.BACKWARD, Segment(1, 1)) == ()
    assert ENCODER_DECODER.sends(Kind.WEIGHT, Segment(2, 0)) == ()


@given(graph=graphs())
def test_what_one_action_sends_another_receives(graph: SegmentGraph) -> None:
    for kind in Kind:
        sent = sorted(t for segment in graph.segments for t in graph.sends(kind, segment))
        assert sent == sorted(t for segment in graph.segments for t in received(graph, kind, segment))


def test_a_backward_is_split_where_a_gradient_leaves() -> None:
    assert [ENCODER_DECODER.splits(segment) for segment in (A, B, Segment(1, 1), Segment(2, 0))] == [
        False,
        True,
        True,
        True,
    ]
    assert ENCODER_DECODER.kinds(A, split_backward=True) == (Kind.FORWARD, Kind.BACKWARD)
    assert ENCODER_DECODER.kinds(B, split_backward=True) == (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
    assert not SegmentGraph.chain(2, has_backward=False).splits(B)


LOOP = SegmentGraph.loop(2, 2)


@pytest.mark.parametrize(
    ("graph", "chunks"),
    [
        (LOOP, 2),
        (replace(LOOP, transfers=(*LOOP.transfers, Transfer(A, A1), Transfer(A, Segment(1, 1), 4, False))), 2),
        (replace(LOOP, transfers=LOOP.transfers[:-1]), 0),
        (replace(LOOP, transfers=(*LOOP.transfers[:-1], replace(LOOP.transfers[-1], differentiable=False))), 0),
        (SegmentGraph.chain(3), 1),
        (TIED_HEAD, 0),
        (U_NET, 0),
        (SegmentGraph(2, ()), 0),
    ],
    ids=["loop", "with values that skip ahead", "cut", "cut for gradients", "chain", "tied head", "U-Net", "empty"],
)
def test_a_loop_is_known_from_its_transfers(graph: SegmentGraph, chunks: int) -> None:
    assert graph.loop_chunks == chunks


@pytest.mark.parametrize(
    ("num_ranks", "segments", "transfers"),
    [
        (2, (A, B), (Transfer(A, B), Transfer(B, A))),
        (1, (A, A1), (Transfer(A1, A),)),
        (1, (A,), (Transfer(A, A),)),
    ],
    ids=["circle", "back in time", "itself"],
)
def test_a_graph_that_cannot_run_is_refused(
    num_ranks: int, segments: tuple[Segment, ...], transfers: tuple[Transfer, ...]
) -> None:
    with pytest.raises(ScheduleError, match="wait for each other in a circle"):
        SegmentGraph(num_ranks, segments, transfers)
