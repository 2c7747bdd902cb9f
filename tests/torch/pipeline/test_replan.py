"""A schedule is changed for one that is right, worth it, and measured to be no slower; everywhere alike."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import smpkit.torch as smp
from smpkit.plan.decide import Policy
from smpkit.plan.schedule.actions import Costs, Schedule, to_json
from smpkit.plan.schedule.graph import Kind, ScheduleError, Segment, SegmentGraph
from smpkit.plan.schedule.list_scheduler import list_schedule
from smpkit.plan.schedule.search import interleaved
from smpkit.plan.schedule.simulate import simulate
from smpkit.torch.core.offloader import KEEPING
from smpkit.torch.pipeline.executor import _StepRunner
from smpkit.torch.pipeline.replan import Meter, Trial, _checked_schedule, _costs
from smpkit.torch.pipeline.stage_context import StageContext
from smpkit.torch.pipeline.transport import Outbox
from tests.ranks import run_ranks
from tests.torch.pipeline.test_executor import WIDTH, executor, start, train_step

CHAIN = SegmentGraph.chain(2, num_bytes=8)


def test_a_schedule_that_was_told_is_proven_before_it_runs() -> None:
    schedule = interleaved(CHAIN, 4, 4)
    first, *others = schedule.actions[0]
    wrong = Schedule("wrong", CHAIN, 4, ((*others, first), schedule.actions[1]), schedule.caps)
    with pytest.raises(ScheduleError):
        _checked_schedule(schedule, to_json(wrong))
    assert _checked_schedule(schedule, "") is schedule


def plan_wrongly() -> str:
    from smpkit.plan import decide

    def wrong(*arguments: Any, **more: Any) -> Schedule:
        found = interleaved(*arguments, **more)
        return Schedule(found.name, found.graph, found.num_microbatches, found.actions[::-1], found.caps)

    decide.interleaved = wrong  # type: ignore[attr-defined]
    model = start(2, 4)
    with pytest.raises(ScheduleError) as caught:
        train_step(model, torch.zeros(8, WIDTH))
    smp.barrier()  # whoever is first would hang up on the other
    return str(caught.value)


def test_a_schedule_is_proven_before_it_runs() -> None:
    assert all(run_ranks(plan_wrongly, 2))


def test_a_backward_costs_both_of_its_halves() -> None:
    costs = _costs((1, 2), [[1.0, 2.0, 0.5, 0.25, 0.0], [3.0, 4.0, 1.5, 5.0, 6.0, 0.0, 0.125, 0.5]])
    for segment, forward, inputs, weights in (
        (Segment(0, 0), 1.0, 2.0, 0.5),
        (Segment(1, 0), 3.0, 4.0, 1.5),
        (Segment(1, 1), 5.0, 6.0, 0.0),  # ran in one
    ):
        assert costs.seconds(Kind.FORWARD, segment) == forward
        assert costs.seconds(Kind.BACKWARD, segment) == inputs + weights
        assert costs.seconds(Kind.BACKWARD, segment, split_backward=True) == inputs
        assert costs.seconds(Kind.WEIGHT, segment, split_backward=True) == weights
    assert (costs.latency_seconds, costs.seconds_per_byte) == (0.25, 0.5)  # of the slowest link


@pytest.mark.parametrize(("latency_seconds", "worth"), [(0.018, False), (0.09, True)], ids=["0.4 %", "2 %"])
def test_a_gain_that_is_too_small_to_be_sure_of_changes_nothing(latency_seconds: float, worth: bool) -> None:
    costs = Costs(latency_seconds=latency_seconds)
    before = interleaved(CHAIN, 8, 2)
    after = Schedule("deeper", CHAIN, 8, list_schedule(CHAIN, 8, (3, 1), costs)[0], (3, 1))
    seconds, deeper_seconds = (simulate(each, costs).makespan_seconds for each in (before, after))
    gain = 1 - deeper_seconds / seconds
    assert (0.003 < gain < 0.01, gain > 0.015) == (not worth, worth), gain

    class Deeper(Policy):
        def schedule(self, *_: object, **__: object) -> Schedule:
            return after

    assert Deeper("interleaved", 3).replanned(before, costs) is (after if worth else before)


def alone(rank: int = 0) -> StageContext:
    """Return what a trial asks of the first rank of a pipeline without others."""
    transport = SimpleNamespace(
        broadcast_object=lambda *_, **__: None, receive_object=lambda *_, **__: "kept", flush=lambda: None
    )
    return cast("StageContext", SimpleNamespace(rank=rank, transport=transport, from_first_pipeline=lambda text: text))


def test_a_trial_runs_both_ways_in_turns_and_takes_the_faster_of_their_fastest() -> None:
    trial = Trial("before", "after", 1.0)
    ran = []
    for seconds in (9.0, 2.0, 0.9):  # after, before, after: disturbed once
        assert not trial.is_over
        ran.append(trial.next)
        trial.note(seconds)
    assert ran == ["after", "before", "after"]
    assert trial.is_over
    assert trial.winner(alone()) == "after"


def test_ranks_believe_the_first_one_and_not_their_own_clocks() -> None:
    trial = Trial("before", "after", 1.0)
    for seconds in (9.0, 1.0, 9.0):
        trial.note(seconds)
    assert trial.winner(alone()) == "before"
    assert trial.winner(alone(rank=1)) == "after"


@pytest.mark.parametrize(("first", "winner"), [("kept", "after"), ("", "before")])
def test_joined_pipelines_take_the_winner_of_the_first_of_them(first: str, winner: str) -> None:
    trial = Trial("before", "after", 1.0)
    for seconds in (1.0, 1.0, 1.0):
        trial.note(seconds)
    stage = alone()
    stage.from_first_pipeline = lambda text: first
    assert trial.winner(stage) == winner


def test_what_an_action_waits_for_is_not_its_cost() -> None:
    transport = SimpleNamespace(waited_ns=0, outbox=Outbox(lambda *_: None))
    meter = Meter()
    stage = cast("StageContext", SimpleNamespace(transport=transport, synchronize=lambda: None))
    step = _StepRunner.__new__(_StepRunner)
    step.stage, step._meter, step._recorder = stage, meter, None
    step._transport, step._outbox = stage.transport, stage.transport.outbox
    step._is_timed, step._is_watched, step._offloader = True, False, KEEPING
    microbatch: Any = SimpleNamespace(index=0)

    def wait() -> None:
        transport.waited_ns += 10**15  # as an hour's wait would

    step._run_action(Kind.FORWARD, 0, microbatch, wait)
    assert meter.seconds(1)[0] < 0


def end_with_a_new_schedule() -> str:
    """The last step of a script is the one after which it is planned again, and rank 1 is late to hear of it."""
    from smpkit.torch.pipeline import replan

    replan._measure_link = lambda stage, num_bytes: (0.01, 0.0)
    model = start(2, 8, active_microbatches=8)
    train_step(model, torch.randn(16, WIDTH))
    transport: Any = executor().stage.transport
    receive = transport.receive_object

    def late(source: int, what: str, *rest: Any) -> Any:
        if what == "the schedule":
            time.sleep(1)
        return receive(source, what, *rest)

    transport.receive_object = late
    train_step(model, torch.randn(16, WIDTH))
    trial = executor()._kinds.popitem()[1].trial
    smp.shutdown()
    return str(trial and trial.after.schedule)


def test_the_new_schedule_reaches_all_ranks_though_the_script_ends() -> None:
    first, second = run_ranks(end_with_a_new_schedule, 2)
    assert first == second != "None"
