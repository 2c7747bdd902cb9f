"""Receives are posted ahead by fixed rules and count as memory from then on, as what was sent does until it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from smpkit.plan.schedule.actions import Schedule
from smpkit.plan.schedule.graph import Segment, SegmentGraph, Transfer
from smpkit.plan.schedule.receives import _sent, message_bytes, num_ahead
from smpkit.plan.schedule.search import interleaved, simple

MIB = 2**20


def test_all_small_receives_are_posted_before_the_first_wait_and_of_large_ones_the_first() -> None:
    assert num_ahead([MIB // 4] * 6) == 4
    assert num_ahead([0, 0, 2 * MIB, 0]) == 2
    assert num_ahead([2 * MIB, 2 * MIB]) == 1


def posted(schedule: Schedule) -> list[int]:
    """Return the most that each rank holds for values that it receives: what it has sent is counted apart."""
    bare = [[num_bytes - sent for num_bytes, sent in zip(*each, strict=True)] for each in both(schedule)]
    return [max(each) for each in bare]


def both(schedule: Schedule) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each rank, by action, what `message_bytes` says and the part of it that was sent."""
    return zip(message_bytes(schedule), _sent(schedule), strict=True)


def test_large_values_are_awaited_two_actions_ahead() -> None:
    schedule = interleaved(SegmentGraph.chain(3, num_bytes=10 * MIB), 4, 3)
    # rank 0: F0 F1 F2 B0 F3 B1 B2 B3, of which B receive; rank 2: F0 B0 F1 B1 ..., of which F do.
    assert posted(schedule) == [30 * MIB, 30 * MIB, 10 * MIB]
    assert posted(interleaved(SegmentGraph.chain(1), 4, 3)) == [0]


def test_small_ones_are_all_there_from_the_start() -> None:
    schedule = interleaved(SegmentGraph.chain(2, num_bytes=1000), 4, 2)
    # At its first backward rank 0 holds the four gradients that it will receive; rank 1 lacks what F0 has taken.
    assert posted(schedule) == [4000, 3000]


def test_what_was_sent_is_held_until_a_message_proves_that_it_has_arrived() -> None:
    schedule = interleaved(SegmentGraph.chain(2, num_bytes=1000), 4, 2)
    # rank 0: F0 F1 B0 F2 B1 F3 B2 B3; rank 1: F0 B0 F1 B1 F2 B2 F3 B3. The gradient of B0 says that F0 was taken, and
    # not yet that F1 was. The last gradients of rank 1 stay until the step ends: nothing comes after them.
    assert [sent for _, sent in both(schedule)] == [
        [1000, 2000, 1000, 2000, 1000, 2000, 1000, 0],
        [0, 1000, 1000, 2000, 1000, 2000, 1000, 2000],
    ]
    forwards_first = simple(SegmentGraph.chain(2, num_bytes=1000), 4)
    assert next(sent for _, sent in both(forwards_first))[:5] == [1000, 2000, 3000, 4000, 0]


def test_a_value_that_goes_to_several_ranks_is_held_once() -> None:
    start, ends = Segment(0, 0), [Segment(1, 0), Segment(2, 0)]
    for value, held in ((1, 1000), (0, 2000)):
        transfers = [Transfer(start, end, 1000, differentiable=False, value=value) for end in ends]
        schedule = simple(SegmentGraph.of([1, 1, 1], transfers, has_backward=True), 1)
        assert _sent(schedule)[0] == [held, held]


def test_what_a_rank_hands_on_lies_in_what_it_has_received() -> None:
    ranks = [Segment(rank, 0) for rank in range(3)]
    for differentiable, held in ((True, 0), (False, 1000)):
        transfers = [Transfer(*pair, 1000, differentiable, value=7) for pair in pairwise(ranks)]
        schedule = simple(SegmentGraph.of([1, 1, 1], transfers, has_backward=True), 1)
        # A copy that waits for its gradient counts with the segment; one without a gradient only while it travels on.
        assert _sent(schedule)[1][0] == held
