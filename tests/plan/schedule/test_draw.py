from __future__ import annotations

import textwrap

import pytest

from smpkit.plan.schedule.actions import Costs
from smpkit.plan.schedule.draw import draw
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.search import interleaved, simple
from smpkit.plan.schedule.simulate import simulate
from smpkit.plan.schedule.templates import one_f_one_b
from tests.plan.graphs import IDLE_RANK


def picture(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_unit_time_is_one_column_per_action() -> None:
    assert draw(one_f_one_b(4, 8)) == picture(
        """
        stage 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7
        stage 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7 .
        stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7 .  .
        stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .  .  .
        """
    )


def test_segments_of_a_rank_are_told_apart() -> None:
    graph = SegmentGraph.path([Segment(0, 0), Segment(1, 0), Segment(0, 1)])
    assert draw(simple(graph, 1)) == picture(
        """
        stage 0  F0   .    F0.1 B0.1 .    B0
        stage 1  .    F0   .    .    B0   .
        """
    )


def test_split_backwards_are_drawn_with_both_halves() -> None:
    found = interleaved(SegmentGraph.chain(2), 2, 4, split_backward=True)
    assert draw(found) == picture(
        """
        stage 0  F0 F1 .  B0 -- B1 --
        stage 1  .  F0 B0 F1 B1 W0 W1
        """
    )


def test_idle_ranks_are_dots() -> None:
    assert draw(simple(IDLE_RANK, 1)).splitlines()[1] == "stage 1  .  .  .  ."


@pytest.mark.parametrize("num_ranks", [2, 11])
def test_heads_line_up(num_ranks: int) -> None:
    lines = draw(one_f_one_b(num_ranks, 2)).splitlines()
    assert len({line.index("F0") - 3 * rank for rank, line in enumerate(lines)}) == 1


def test_a_long_timeline_is_scaled_to_fit() -> None:
    costs = Costs({Segment(0, 0): 0.001, Segment(1, 0): 1.0}, 2.0)
    lines = draw(simulate(simple(SegmentGraph.chain(2), 20), costs)).splitlines()
    assert max(len(line.split()) for line in lines) <= 200 + 2 + 20


def test_columns_can_be_chosen() -> None:
    assert draw(simulate(one_f_one_b(1, 1)), column_seconds=0.5) == "stage 0  F0 -- B0 -- -- --"


def test_a_schedule_without_actions_has_empty_lines() -> None:
    assert draw(simple(SegmentGraph(2, ()), 1)) == "stage 0\nstage 1"
