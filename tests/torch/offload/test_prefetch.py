from __future__ import annotations

import math

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.prefetch import BackwardOrder, PrefetchTuner
from tests.torch.offload.clock import ClockLink


def actions(text: str) -> list[Action]:
    return [Action.parse(label) for label in text.split()]


def run(order: BackwardOrder, label: str, layers: int = 0) -> list[int]:
    action = Action.parse(label)
    order.begin(action.kind, action.segment, action.microbatch)
    return [order.add() for _ in range(layers)]


def test_without_a_plan_backward_is_expected_in_reverse() -> None:
    order = BackwardOrder()
    groups = [order.add() for _ in range(4)]
    order.begin_backward(groups[3])
    assert order.upcoming(2) == [2, 1]
    order.begin_backward(groups[2])
    assert order.upcoming(9) == [1, 0]


def test_groups_that_are_gone_are_not_expected() -> None:
    order = BackwardOrder()
    groups = [order.add() for _ in range(4)]
    order.begin_backward(groups[3])
    order.drop(2)
    assert order.upcoming(2) == [1, 0]


def test_another_order_is_learnt_from_the_first_backward() -> None:
    order = BackwardOrder()
    for expected in ([2, 1], [0, 2]):
        groups = [order.add() for _ in range(4)]
        base = groups[0]
        order.begin_backward(groups[3])
        assert [each - base for each in order.upcoming(2)] == expected
        for index in (0, 2, 1):
            order.begin_backward(groups[index])
        for group in groups:
            order.drop(group)


def test_forward_asks_for_nothing() -> None:
    order = BackwardOrder()
    first = [order.add() for _ in range(2)]
    order.begin_backward(first[1])
    order.add()
    assert order.upcoming(3) == []


def test_a_kept_graph_is_walked_again() -> None:
    order = BackwardOrder()
    groups = [order.add() for _ in range(3)]
    for _ in range(2):
        order.begin_backward(groups[2])
        assert order.upcoming(2) == [1, 0]
        order.begin_backward(groups[1])
        order.begin_backward(groups[0])


def planned(horizon: int | None = None) -> BackwardOrder:
    """F0 and F1 with three layers each have run: groups 0 1 2 and 3 4 5."""
    order = BackwardOrder(horizon)
    order.follow(actions("F0 F1 F2 B0 F3 B1"))
    run(order, "F0", 3)
    run(order, "F1", 3)
    return order


def test_a_plan_loads_in_the_last_layers_of_the_forward_before() -> None:
    order = planned()
    run(order, "F2")
    assert order.upcoming(3) == []
    order.add()
    assert order.upcoming(3) == [2]
    order.add()
    assert order.upcoming(3) == [2, 1]


def test_a_plan_looks_over_forwards_to_later_backwards() -> None:
    order = planned()
    run(order, "F2", 3)
    run(order, "B0")
    for group in (2, 1):
        order.begin_backward(group)
        order.drop(group)
    assert order.upcoming(5) == [0, 5]  # three layers of F3 lie between


def test_the_horizon_counts_tasks() -> None:
    order = planned(horizon=1)
    run(order, "F2", 3)
    run(order, "B0")
    assert order.upcoming(99) == [2, 1, 0]
    for group in (2, 1, 0):
        order.begin_backward(group)
        order.drop(group)
    assert order.upcoming(99) == []
    run(order, "F3")
    assert order.upcoming(99) == [5, 4, 3]


def test_what_returns_at_once_is_known() -> None:
    order = BackwardOrder()
    order.follow(actions("F0 B0 F1 B1"))
    run(order, "F0", 3)
    run(order, "B0")
    run(order, "F1", 1)
    assert order.is_needed_within(5)  # two more forwards, two backwards, then its own
    assert not order.is_needed_within(4)
    order.add()
    order.add()
    assert order.is_needed_within(1)


def test_a_step_that_leaves_its_plan_is_predicted_from_its_forward() -> None:
    order = planned()
    run(order, "F7", 1)
    assert not order.is_planned
    order.begin_backward(6)
    assert order.upcoming(1) == [5]


def test_segments_are_told_apart() -> None:
    order = BackwardOrder()
    order.follow(actions("F0 F0.1 B0.1 B0"))
    run(order, "F0", 2)
    run(order, "F0.1", 1)
    run(order, "B0.1")
    assert order.upcoming(9) == [2, 1, 0]
    assert Kind.BACKWARD is Action.parse("B0.1").kind


def test_the_weight_half_of_a_backward_needs_nothing_back() -> None:
    order = BackwardOrder()
    order.follow(actions("F0 F1 B0 W0 B1 W1"))
    run(order, "F0", 2)
    run(order, "F1", 2)
    run(order, "B0")
    assert order.upcoming(9) == [1, 0, 3, 2]
    run(order, "W0")
    assert order.upcoming(1) == [3]


def test_a_lead_that_is_no_longer_needed_falls_by_one_a_step() -> None:
    link = ClockLink(math.inf)
    tuner = PrefetchTuner(link, "auto")
    tuner.lead = 5
    for expected in (4, 3):
        for _ in range(3):
            tuner.begin_layer(0)
            link.seconds += 1
        tuner.end_step()
        assert tuner.lead == expected
