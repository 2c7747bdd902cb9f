from __future__ import annotations

from dataclasses import replace

from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.partition.search import assign
from smpkit.plan.schedule.graph import Segment, Transfer
from smpkit.plan.schedule.recorded_graph import RecordedGraph, SentValue

HERE, THERE, BACK = Segment(0, 0), Segment(1, 0), Segment(0, 1)
THERE_AND_BACK = RecordedGraph(
    units=(("embed", 0), ("block", 1), ("head", 0), ("spare", 1)),
    segments=((HERE, ("embed", "block")), (BACK, ("head", "embed")), (THERE, ("block",))),
    values=(
        SentValue(HERE, THERE, (2, 8), "float32", 64, True, "block"),
        SentValue(THERE, BACK, (2,), "int64", 16, False, "head"),
    ),
)
COSTS = [
    UnitCost("embed", 10, activation_bytes=100, flops=6.0, boundary_bytes=40, recomputed_flops=2.0),
    UnitCost("block", flops=8.0),
    UnitCost("head", flops=1.0),
    UnitCost("spare", flops=3.0),
]


def test_values_are_messages_and_what_a_rank_keeps_orders_its_segments() -> None:
    graph = THERE_AND_BACK.graph(2, has_backward=True)
    assert graph.segments == (HERE, BACK, THERE)
    assert graph.transfers == (
        Transfer(HERE, THERE, 64, True),
        Transfer(THERE, BACK, 16, False),
        Transfer(HERE, BACK),
    )
    assert not any(each.differentiable for each in THERE_AND_BACK.graph(2, has_backward=False).transfers[:2])


def test_each_call_of_a_unit_has_its_part_of_the_costs() -> None:
    runs = THERE_AND_BACK.runs(COSTS)
    embed = UnitCost("embed", 10, activation_bytes=50, flops=3.0, boundary_bytes=20, recomputed_flops=1.0)
    half, spare = UnitCost("block", flops=4.0), COSTS[3]
    assert runs == {HERE: [embed, half], BACK: [COSTS[2], embed], THERE: [half, spare]}
    assert sum(cost.flops for run in runs.values() for cost in run) == sum(cost.flops for cost in COSTS)


def test_values_grow_with_the_samples_but_for_what_all_of_them_share() -> None:
    hidden, mask = THERE_AND_BACK.values
    both = replace(THERE_AND_BACK, values=(hidden, replace(mask, num_bytes=1000, fixed=0.25)))
    four = both.with_samples(4)
    assert [each.num_bytes for each in four.values] == [256, 250 + 4 * 750]
    assert [each.num_bytes for each in four.with_samples(0.5).values] == [128, 250 + 2 * 750]


def test_it_tells_of_no_other_assignment() -> None:
    units = THERE_AND_BACK.units
    assert THERE_AND_BACK.under(Assignment(2, units, (), ())) is THERE_AND_BACK
    assert THERE_AND_BACK.under(Assignment(2, (*units[:-1], ("spare", 0)), (), ())) is None


def sent(number: int, source: tuple[int, int], target: tuple[int, int], num_bytes: int) -> SentValue:
    return SentValue(Segment(*source), Segment(*target), (num_bytes,), "uint8", num_bytes, False, "", number)


APART = RecordedGraph(
    units=(("embed", 0), ("first", 1), ("second", 2), ("head", 3)),
    segments=(
        (Segment(0, 0), ("embed",)),
        (Segment(0, 1), ("embed",)),
        (Segment(1, 0), ("first",)),
        (Segment(2, 0), ("second",)),
        (Segment(3, 0), ("head",)),
    ),
    values=(
        sent(0, (0, 0), (1, 0), 10),
        sent(1, (1, 0), (2, 0), 20),
        sent(0, (0, 0), (2, 0), 10),
        sent(3, (2, 0), (0, 1), 30),
        sent(0, (0, 1), (3, 0), 10),
        sent(5, (0, 1), (3, 0), 40),
    ),
)
"""The embedding runs twice, and three units need what it makes first."""


def joined(*ranks: int) -> RecordedGraph:
    units = tuple((name, rank) for (name, _), rank in zip(APART.units, ranks, strict=True))
    found = APART.under(Assignment(max(ranks) + 1, units, (), ()))
    assert found is not None
    return found


def test_units_that_share_a_rank_send_nothing_to_each_other_and_get_a_value_once() -> None:
    found = joined(0, 1, 1, 1)
    assert found.values == (
        sent(0, (0, 0), (1, 0), 10),
        sent(3, (1, 0), (0, 1), 30),
        sent(5, (0, 1), (1, 1), 40),
    )
    assert dict(found.segments) == {
        Segment(0, 0): ("embed",),
        Segment(0, 1): ("embed",),
        Segment(1, 0): ("first", "second"),
        Segment(1, 1): ("head",),
    }


def test_all_units_of_one_rank_are_a_segment() -> None:
    found = joined(0, 0, 0, 0)
    assert found.values == ()
    assert found.segments == ((Segment(0, 0), ("embed", "embed", "first", "second", "head")),)


def test_a_segment_keeps_copies_of_what_no_unit_in_it_saves_first() -> None:
    def recorded(*differentiable: bool) -> RecordedGraph:
        values = [SentValue(HERE, THERE, (8,), "float32", 32, each, "block.linear") for each in differentiable]
        return replace(THERE_AND_BACK, values=tuple(values))

    unsaved = [replace(cost, unsaved_input_bytes=40) for cost in COSTS]
    assert recorded(True, False).copies(unsaved)[THERE] == 32
    assert recorded(True, True).copies(unsaved)[THERE] == 40
    assert recorded(True, True).copies(COSTS)[THERE] == 0


def test_without_a_record_units_hand_on_to_the_next_and_neighbours_on_a_rank_are_a_segment() -> None:
    units = [UnitCost(name, output_bytes=place) for place, name in enumerate("abcdef")]
    assumed = RecordedGraph.assumed(units, assign(units, 2, {"c": 1, "f": 1}, 0))
    assert {segment: "".join(unit.name for unit in run) for segment, run in assumed.runs(units).items()} == {
        Segment(0, 0): "ab",
        Segment(1, 0): "c",
        Segment(0, 1): "de",
        Segment(1, 1): "f",
    }
    graph = assumed.graph(2, has_backward=True)
    assert [transfer.num_bytes for transfer in graph.transfers if transfer.is_message] == [1, 2, 4]
    assert graph.loop_chunks == 2
    assert not any(assumed.copies(units).values())
