"""What runs is what was planned: units, order, live microbatches, messages."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.decide import decide
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.schedule.actions import Schedule
from smpkit.plan.speed import Speed
from smpkit.torch.describe import describe
from smpkit.torch.pipeline.messages import Tag
from tests.ranks import run_ranks
from tests.torch.pipeline.test_rerecorded import own_way
from tests.torch.steps import asking_step, assignment, evaluate, executor, in_a_row, on_ranks, train_step, wrap

WIDTH = 8


class Tied(nn.Module):
    """Goes back to its first layer at the end, so the rank that holds it is visited twice."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = torch.tanh(layer(x))
        return x


def start(microbatches: int, *, tied: bool = False, **more: Any) -> Any:
    """Return a model with a layer on each rank."""
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(int(os.environ["WORLD_SIZE"]))]
    return in_a_row(*layers, around=Tied(layers) if tied else None, microbatches=microbatches, **more)


def record(microbatches: int, tied: bool, more: dict[str, Any]) -> tuple[Schedule, list[str], list[int]]:
    """Return the schedule of the fourth step, the actions that ran in it, and how many graphs were kept after each."""
    model = start(microbatches, tied=tied, **more)
    inputs = torch.randn(4 * microbatches, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        train_step(model, inputs)
    ran: list[str] = []
    live: set[int] = set()
    peaks = []

    def note(kind: str, segment: int, microbatch: int, start_ns: int, end_ns: int) -> None:
        assert start_ns <= end_ns <= time.perf_counter_ns()
        ran.append(f"{kind}{microbatch}" + (f".{segment}" if segment else ""))
        live.add(microbatch)
        peaks.append(len(live))
        if kind == "B" and segment == 0:
            live.remove(microbatch)

    executor().recorder = note
    train_step(model, inputs)
    (schedule,) = executor().schedules.values()
    smp.shutdown()
    return schedule, ran, peaks


@pytest.mark.parametrize(
    ("degree", "microbatches", "tied", "more"),
    [
        (2, 4, False, {}),
        (4, 8, False, {}),
        (4, 8, False, {"active_microbatches": 2}),
        (2, 4, False, {"pipeline": "simple", "active_microbatches": 4}),
        (2, 6, True, {}),
    ],
    ids=["pp2", "pp4", "pp4, two live", "simple", "a rank visited twice"],
)
def test_actions_run_in_the_planned_order_with_the_planned_live_microbatches(
    degree: int, microbatches: int, tied: bool, more: dict[str, Any]
) -> None:
    found = run_ranks(record, degree, microbatches, tied, more)
    schedules = [schedule for schedule, _, _ in found]
    assert all(schedule == schedules[0] for schedule in schedules)
    for rank, (schedule, ran, peaks) in enumerate(found):
        assert ran == [str(action) for action in schedule.actions[rank]]
        assert max(peaks) == schedule.peak_live_microbatches[rank]
        assert max(peaks) <= more.get("active_microbatches", degree + 2)


@on_ranks(3)
def test_steady_state_sends_one_message_per_boundary_tensor_and_direction_and_no_objects() -> None:
    microbatches = 4
    model, inputs = start(microbatches), torch.randn(4 * microbatches, WIDTH)
    for _ in range(2):
        train_step(model, inputs)
    transport, rank = executor().stage.transport, smp.pp_rank()
    messages: list[tuple[str, int, int, int]] = []
    transport.recorder = lambda direction, peer, size, tag, begin, end: messages.append((direction, peer, size, tag))
    sends = transport.hosts.send_object

    def send_object(value: object, targets: Any = None, tag: int = Tag.OBJECT, what: str = "") -> None:
        assert tag == Tag.INPUTS, value
        sends(value, targets, tag, what)

    transport.hosts.send_object = send_object  # type: ignore[method-assign]
    send, sent = transport.hosts._send, []

    def noted(*message: Any) -> Any:
        sent.append(message)
        return send(*message)

    transport.hosts._send = noted  # type: ignore[assignment, method-assign]
    neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < 3]
    # Besides: to the next rank the inputs and what they are, with its size; to both neighbours the way; to the
    # one before what the step returned.
    others = 3 * (rank < 2) + len(neighbours) + (rank > 0)
    seen = []
    for _ in range(3):
        messages.clear()
        sent.clear()
        train_step(model, inputs)
        seen.append(list(messages))
        for way in itertools.product(["send", "receive"], neighbours):
            assert [size for *each, size, _ in messages if tuple(each) == way] == [4 * WIDTH * 4] * microbatches
        assert len(sent) == microbatches * len(neighbours) + others
    assert seen[0] == seen[1] == seen[2]


@on_ranks(2)
def test_each_mode_of_a_step_has_a_record_of_its_own() -> None:
    # Where two shared one, microbatches would leave it, and soon there would be none.
    model, inputs = start(2), torch.randn(8, WIDTH)

    def note(_: object) -> None:
        assert executor().last_schedule is not None

    for _ in range(2):
        note(train_step(model, inputs))
        note(train_step(model, inputs[:4]))
        note(evaluate(model, inputs))
        with torch.no_grad():
            note(evaluate(model, inputs))
        with torch.autocast("cpu", torch.bfloat16):
            note(train_step(model, inputs))
        model.eval()
        note(train_step(model, inputs))
        model.train()
    assert len(executor().schedules) == 6


@on_ranks(3)
def test_every_rank_gets_what_the_step_returned() -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    inputs = torch.arange(4 * WIDTH, dtype=torch.float32).view(4, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(evaluate(start(2), inputs).concat(), plain(inputs))


def made() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose first layers are wider, so that equal numbers of layers are no equal parts."""
    widths = [WIDTH, 64, 64, WIDTH, WIDTH, WIDTH, WIDTH]
    layers = [nn.Linear(before, after) for before, after in itertools.pairwise(widths)]
    return nn.Sequential(*layers), torch.zeros(2, WIDTH)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_degree": 2, "microbatches": 4},
        {"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": "simple", "skip_tracing": True},
        {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "zero_bubble", "memory_weight": 0.1},
        {"pipeline_parallel_degree": 2, "microbatches": 4, "virtual_pipeline_degree": 2},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
@on_ranks(2)
def test_ranks_do_what_the_plan_says(options: dict[str, Any]) -> None:
    config, _ = ModelParallelConfig.from_sources(options, None)
    num_places = 2 * config.virtual_pipeline_degree
    facts = describe((lambda: made()[0]) if config.skip_tracing else made, num_places, cfg=config, world_size=2)
    plan: Any = decide(config, 2, facts, Speed(1e12, LinkSpeed(1e10, 1e10)))
    model = wrap(made()[0], **options)
    train_step(model, torch.ones(2 * options["microbatches"], WIDTH))
    schedule: Any = executor().last_schedule
    assert assignment() == plan.assignment.partition_of
    assert schedule.actions[smp.pp_rank()] == plan.timeline.schedule.actions[smp.pp_rank()]


# --- the last backward: replicas reduce gradients while it runs -------------------------------------------------------


def told(step: Callable[[], object]) -> list[str]:
    """Return the backwards and weight halves that a step ran on this rank, and "last" where it told of the last one."""
    engine, events = executor(), list[str]()
    run = engine.run

    def listening(kind: Any, body: Any, count: int, _: Any, *numbers: Any) -> list[Any]:
        return run(kind, body, count, lambda: events.append("last"), *numbers)

    def note(kind: str, segment: int, microbatch: int, start_ns: int, end_ns: int) -> None:
        if kind != "F":
            events.append(f"{kind}{microbatch}.{segment}")

    engine.run, engine.recorder = listening, note  # type: ignore[assignment, method-assign]
    split = split_segments()
    step()
    split |= split_segments()
    engine.run, engine.recorder = run, None  # type: ignore[method-assign]
    # What has no weight half has run whole: its WEIGHT does nothing.
    return [each for each in events if each[0] != "W" or int(each.partition(".")[2]) in split]


def split_segments() -> set[int]:
    plans = [known.plan for known in executor()._kinds.values()]
    return {segment for plan in plans if plan is not None for segment in plan.split}


@on_ranks(2)
def test_the_last_backward_of_a_step_is_told_of_once() -> None:
    for microbatches, tied, more in (
        (4, False, {}),
        (4, True, {}),
        (4, False, {"pipeline": "simple", "active_microbatches": 4}),
        (6, False, {"pipeline": "zero_bubble"}),
    ):
        model = start(microbatches, tied=tied, **more)
        inputs = torch.randn(2 * microbatches, WIDTH)
        with torch.no_grad():
            evaluate(model, inputs)
        for step in (train_step, train_step, train_step, asking_step):
            assert_told_once(told(partial(step, model, inputs)))
        smp.shutdown()


def assert_told_once(events: list[str]) -> None:
    assert [place for place, event in enumerate(events) if event == "last"] == [len(events) - 2], events


@on_ranks(2)
def test_a_microbatch_that_strays_has_no_weight_halves_to_wait_for() -> None:
    model, x = start(6, pipeline="zero_bubble"), torch.randn(12, WIDTH)
    skipping = iter([False] * 6 + [False] * 3 + [True] + [False] * 2)
    own_way(model, x, skipping)
    events = told(lambda: own_way(model, x, skipping))
    assert_told_once(events)
    assert any(event.startswith("W") for of_rank in smp.allgather(events) for event in of_rank)
