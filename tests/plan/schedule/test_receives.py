"""Receives are posted ahead by fixed rules, and count as memory from then on."""

from __future__ import annotations

from smpkit.plan.schedule.graph import SegmentGraph
from smpkit.plan.schedule.receives import num_ahead, posted_bytes
from smpkit.plan.schedule.search import interleaved

MIB = 2**20


def test_all_small_receives_are_posted_before_the_first_wait_and_of_large_ones_the_first() -> None:
    assert num_ahead([MIB // 4] * 6) == 4
    assert num_ahead([0, 0, 2 * MIB, 0]) == 2
    assert num_ahead([2 * MIB, 2 * MIB]) == 1


def test_large_values_are_awaited_two_actions_ahead() -> None:
    schedule = interleaved(SegmentGraph.chain(3, num_bytes=10 * MIB), 4, 3)
    # rank 0: F0 F1 F2 B0 F3 B1 B2 B3, of which B receive; rank 2: F0 B0 F1 B1 ..., of which F do.
    assert posted_bytes(schedule) == [30 * MIB, 30 * MIB, 10 * MIB]
    assert posted_bytes(interleaved(SegmentGraph.chain(1), 4, 3)) == [0]


def test_small_ones_are_all_there_from_the_start() -> None:
    schedule = interleaved(SegmentGraph.chain(2, num_bytes=1000), 4, 2)
    # At its first backward rank 0 holds the four gradients that it will receive; rank 1 lacks what F0 has taken.
    assert posted_bytes(schedule) == [4000, 3000]
