"""What is read out of events equals what was put into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from smpkit.observe.events import ActionSpan, Event, EventsError, PlannedSchedule, RankLog, StepSpan
from smpkit.observe.executed import ExecutedStep, executed_step
from smpkit.observe.merge import merge
from smpkit.plan.schedule.actions import to_json
from smpkit.plan.schedule.graph import Segment, SegmentGraph
from smpkit.plan.schedule.search import simple
from smpkit.plan.schedule.simulate import Cause, simulate
from tests.observe.logs import COSTS, chain, header, logs_of


def changed(change: Callable[[Event], Event | None]) -> list[RankLog]:
    """Return the logs of a step of two ranks with other events."""
    return [
        replace(log, events=tuple(other for event in log.events if (other := change(event)) is not None))
        for log in logs_of(chain(2, 2))
    ]


def executed(logs: list[RankLog], number: int = 0) -> ExecutedStep:
    return executed_step(merge(logs), number)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("number", [0, 2])
def test_a_step_that_ran_as_simulated_is_read_as_simulated(num_ranks: int, number: int) -> None:
    schedule = chain(num_ranks, 6)
    simulated = simulate(schedule, COSTS)
    step = executed(logs_of(schedule, num_steps=3), number)
    assert step.follows_plan
    assert step.executed.bubble == pytest.approx(simulated.bubble)
    for stage in range(num_ranks):
        starts = [span.start_seconds for span in simulated.spans[stage]]
        assert [span.start_seconds for span in step.executed.spans[stage]] == pytest.approx(starts)
        assert step.executed.idle_seconds[stage] == pytest.approx(simulated.idle_seconds[stage])
        stalls = simulated.stall_seconds(stage)
        assert step.executed.stall_seconds(stage) == pytest.approx(stalls, abs=1e-9)
        assert step.other_seconds(stage) == pytest.approx(0.0, abs=1e-9)


def test_the_planned_step_takes_measured_times_over_free_links() -> None:
    step = executed(logs_of(chain(4, 8)))
    assert step.planned is not None
    assert step.planned.makespan_seconds == pytest.approx((8 + 3) * 3e-3)
    assert step.planned.bubble == pytest.approx(3 / 11)
    assert step.executed.makespan_seconds > step.planned.makespan_seconds


def test_links_count_what_was_sent_and_how_long_it_was_waited_for() -> None:
    step = executed(logs_of(chain(3, 4)))
    found = [(link.sender, link.receiver, link.num_messages, link.num_bytes) for link in step.links]
    assert found == [(0, 1, 4, 4096), (1, 0, 4, 4096), (1, 2, 4, 4096), (2, 1, 4, 4096)]
    waits = [stall for stage in step.executed.stalls for stall in stage if stall.cause is not Cause.DRAIN]
    waited = sum(stall.end_seconds - stall.start_seconds for stall in waits)
    assert sum(link.waited_seconds for link in step.links) == pytest.approx(waited)


def test_another_order_than_planned_is_noticed() -> None:
    first, last = logs_of(chain(2, 2))
    swapped = [replace(e, microbatch=1 - e.microbatch) if isinstance(e, ActionSpan) else e for e in first.events]
    step = executed([replace(first, events=tuple(swapped)), last])
    assert not step.follows_plan
    assert str(step.executed.schedule).splitlines()[0] == "rank 0: F1 F0 B1 B0"


def test_a_first_microbatch_that_ran_straight_through_follows_the_plan() -> None:
    # Rank 0 has a second segment. While the schedule is not known yet, F0 runs both of them in one action.
    graph = SegmentGraph.path([Segment(0, 0), Segment(1, 0), Segment(0, 1)])
    schedule = simple(graph, 2)
    logs = []
    for rank, actions in enumerate(schedule.actions):
        ran = [each for each in actions if str(each) != "F0.1"]
        events: list[Event] = [PlannedSchedule("0", to_json(schedule)), StepSpan(0, "step", "0", 0, 999)]
        events += [ActionSpan(0, e.kind.value, e.segment, e.microbatch, 10 * i, 10 * i + 9) for i, e in enumerate(ran)]
        logs.append(RankLog(header(rank, 2), tuple(events), truncated=False))
    assert executed(logs).follows_plan


def test_a_step_without_a_schedule_has_no_plan() -> None:
    step = executed(changed(lambda event: replace(event, schedule="") if isinstance(event, StepSpan) else event))
    assert step.planned is None
    assert not step.follows_plan
    assert step.executed.bubble > 0


def test_a_step_in_which_nothing_ran_is_empty() -> None:
    step = executed(changed(lambda event: event if isinstance(event, StepSpan | PlannedSchedule) else None))
    assert step.executed.makespan_seconds == 0
    assert step.links == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({PlannedSchedule: {"text": "{}"}}, "the planned schedule of step 0 is damaged"),
        ({PlannedSchedule: {"key": "7"}}, "refers to a schedule `0` that was not recorded"),
        ({ActionSpan: {"kind": "Z"}}, "`Z` is no kind of action"),
    ],
    ids=["damaged", "missing", "kind"],
)
def test_events_that_contradict_each_other_are_refused(change: dict[type, dict[str, object]], message: str) -> None:
    logs = changed(lambda event: replace(event, **change.get(type(event), {})))  # type: ignore[arg-type]
    with pytest.raises(EventsError, match=message):
        executed(logs)
