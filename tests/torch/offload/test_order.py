"""What of the order of loads no comparison with the plan shows (`test_simulated.py`), and how the lead is learnt."""

from __future__ import annotations

import pytest

from smpkit.errors import UsageError
from smpkit.plan.schedule.actions import Action
from smpkit.torch.offload.order import BackwardOrder, LeadTuner, check_lead
from tests.torch.offload.chains import ClockLink


def follow(order: BackwardOrder, text: str) -> None:
    order.follow([Action.parse(label) for label in text.split()])


def run(order: BackwardOrder, label: str, layers: int = 0) -> list[int]:
    action = Action.parse(label)
    order.begin(action.kind, action.segment, action.microbatch)
    return [order.add() for _ in range(layers)]


def test_without_a_plan_backward_is_expected_in_reverse() -> None:
    order = BackwardOrder()
    calls = [order.add() for _ in range(4)]
    order.begin_backward(calls[3])
    assert order.upcoming(2) == [2, 1]
    order.begin_backward(calls[2])
    assert order.upcoming(9) == [1, 0]
    order.gone.append(1)  # with its graph
    order.begin_backward(calls[3])  # once more, of a graph that was kept
    assert order.upcoming(9) == [0]
    order.add()  # forward goes on, and asks for nothing
    assert order.upcoming(9) == []


def planned() -> BackwardOrder:
    """F0 and F1 with three layers each have run: calls 0 1 2 and 3 4 5."""
    order = BackwardOrder()
    follow(order, "F0 F1 F2 B0 F3 B1")
    run(order, "F0", 3)
    run(order, "F1", 3)
    return order


def test_what_returns_at_once_is_known() -> None:
    order = BackwardOrder()
    follow(order, "F0 B0 F1 B1")
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


def test_a_graph_that_outlives_its_step_is_still_expected() -> None:
    order = planned()
    order.gone.extend([0, 1, 2, 3, 4])
    order.end()
    assert not order.is_planned
    follow(order, "B1")
    run(order, "B1")
    assert order.upcoming(9) == [5]


def test_segments_are_told_apart_and_the_weight_half_of_a_backward_needs_nothing_back() -> None:
    order = BackwardOrder()
    follow(order, "F0 F0.1 B0 W0 B0.1 W0.1")
    run(order, "F0", 2)
    run(order, "F0.1", 2)
    run(order, "B0")
    assert order.upcoming(9) == [1, 0, 3, 2]
    run(order, "W0")
    assert order.upcoming(1) == [3]


# --- the lead ---------------------------------------------------------------------------------------------------------


def end_step(tuner: LeadTuner, link: ClockLink, load_bytes: int = 0, stall_seconds: float = 0.0) -> int:
    """Run four forwards and four backwards of a second each; return the lead."""
    for num_bytes in [0] * 4 + [load_bytes] * 4:
        tuner.begin_layer(num_bytes)
        link.seconds += 1
    tuner.end_step(stall_seconds)
    return tuner.lead


def test_a_lead_grows_at_once_and_falls_by_one_a_step() -> None:
    link = ClockLink(bytes_per_second=100)
    tuner = LeadTuner(link, "auto")
    assert end_step(tuner, link, load_bytes=150) == 3  # four loads, from 1 to 7 seconds
    assert [end_step(tuner, link) for _ in range(3)] == [2, 1, 1]
    assert end_step(tuner, link, load_bytes=90) == 1
    assert end_step(tuner, link, load_bytes=90, stall_seconds=3.5) == 4  # a layer itself takes half a second


def test_a_lead_of_a_device_that_runs_behind_is_learned_from_the_step_before() -> None:
    link = ClockLink(bytes_per_second=100)
    link.runs_ahead = True
    tuner = LeadTuner(link, "auto")
    assert end_step(tuner, link, load_bytes=150) == 2  # as at first
    assert end_step(tuner, link) == 3


@pytest.mark.parametrize("lead", [0, -1, True, 1.5, "fast", None])
def test_a_lead_that_cannot_be_is_refused(lead: object) -> None:
    with pytest.raises(UsageError, match=f"`lead` is {lead!r}"):
        check_lead(lead)
