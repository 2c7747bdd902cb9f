"""What runs is what was planned: units, order, live microbatches, messages."""

from __future__ import annotations

import itertools
import time
from itertools import pairwise
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
from smpkit.torch.core.runtime import state
from smpkit.torch.describe import describe
from smpkit.torch.pipeline.executor import Executor
from smpkit.torch.pipeline.messages import Message, Tag
from tests.ranks import run_ranks
from tests.torch.steps import over_ranks, train_step

WIDTH = 8


@smp.step
def evaluate(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs)


class Tied(nn.Module):
    """Goes back to its first layer at the end, so the rank that holds it is visited twice."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = torch.tanh(layer(x))
        return x


def start(degree: int, microbatches: int, *, tied: bool = False, **more: Any) -> Any:
    torch.manual_seed(3)
    module = Tied(degree) if tied else nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(degree)])
    layers = module.layers if isinstance(module, Tied) else module
    places: dict[nn.Module, int] = {layer: rank for rank, layer in enumerate(layers)}
    return over_ranks(module, places, microbatches=microbatches, **more)


def executor() -> Executor:
    assert state.model is not None
    assert state.model.pipeline is not None
    found = state.model.pipeline._executor
    assert found is not None
    return found


def record(degree: int, microbatches: int, tied: bool, more: dict[str, Any]) -> tuple[Schedule, list[str], list[int]]:
    """Return the schedule of the fourth step, the actions that ran in it, and how many graphs were kept after each."""
    model = start(degree, microbatches, tied=tied, **more)
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
    found = run_ranks(record, degree, degree, microbatches, tied, more)
    schedules = [schedule for schedule, _, _ in found]
    assert all(schedule == schedules[0] for schedule in schedules)
    for rank, (schedule, ran, peaks) in enumerate(found):
        assert ran == [str(action) for action in schedule.actions[rank]]
        assert max(peaks) == schedule.peak_live_microbatches[rank]
        assert max(peaks) <= more.get("active_microbatches", degree + 2)


def count(degree: int, microbatches: int) -> list[dict[str, Any]]:
    """Return for three steps after the schedule is settled what this rank's transport did."""
    model = start(degree, microbatches)
    inputs = torch.randn(4 * microbatches, WIDTH)
    for _ in range(2):
        train_step(model, inputs)
    transport = executor().stage.transport
    messages: list[tuple[str, int, int, int]] = []
    transport.recorder = lambda direction, peer, size, tag, begin, end: messages.append((direction, peer, size, tag))
    objects: list[object] = []
    sends = transport.hosts.send_object

    def send_object(value: object, targets: Any = None, tag: int = Tag.OBJECT, what: str = "") -> None:
        if tag != Tag.INPUTS:
            objects.append(value)
        sends(value, targets, tag, what)

    transport.hosts.send_object = send_object  # type: ignore[method-assign]
    steps = []
    for _ in range(3):
        messages.clear()
        before = transport.hosts.num_messages
        train_step(model, inputs)
        steps.append(
            {"messages": list(messages), "sent": transport.hosts.num_messages - before, "objects": len(objects)}
        )
    smp.shutdown()
    return steps


def test_steady_state_sends_one_message_per_boundary_tensor_and_direction_and_no_objects() -> None:
    degree, microbatches = 3, 4
    value_bytes = 4 * WIDTH * 4
    for rank, steps in enumerate(run_ranks(count, degree, degree, microbatches)):
        for step in steps:
            assert step["objects"] == 0
            neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < degree]
            for direction, peer in itertools.product(["send", "receive"], neighbours):
                found = [message for message in step["messages"] if message[:2] == (direction, peer)]
                assert len(found) == microbatches
                assert {size for _, _, size, _ in found} == {value_bytes}
            # Besides: to the next rank the inputs and what they are, with its size; to both neighbours the way; to the
            # one before what the step returned.
            others = 3 * (rank < degree - 1) + len(neighbours) + (rank > 0)
            assert step["sent"] == microbatches * len(neighbours) + others
        assert steps[0] == steps[1] == steps[2]


def every_mode() -> tuple[int, list[bool]]:
    """Run steps that differ in one thing each; return how many schedules were made, and which steps followed one."""
    model = start(2, 2)
    inputs = torch.randn(8, WIDTH)
    planned = []

    def note(_: object) -> None:
        planned.append(executor().last_schedule is not None)

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
    made = len(executor().schedules)
    smp.shutdown()
    return made, planned


def test_each_mode_of_a_step_has_a_record_of_its_own() -> None:
    # Where two shared one, microbatches would leave it, and soon there would be none.
    assert run_ranks(every_mode, 2) == [(6, [True] * 12)] * 2


def posted_ahead() -> list[str]:
    """Return in which order a step posted its receives and ran its actions."""
    model = start(2, 6)
    inputs = torch.randn(12, WIDTH)
    for _ in range(5):
        train_step(model, inputs)
    transport, events = executor().stage.transport, list[str]()
    post = transport.post

    def noted(message: Message) -> None:
        events.append(f"post {'B' if message.backward else 'F'}{message.microbatch}")
        post(message)

    transport.post = noted  # type: ignore[method-assign]
    executor().recorder = lambda kind, segment, microbatch, start_ns, end_ns: events.append(f"{kind}{microbatch}")
    train_step(model, inputs)
    smp.shutdown()
    return events


def test_receives_are_posted_two_actions_before_their_turn() -> None:
    for events, kind in zip(run_ranks(posted_ahead, 2), ("B", "F"), strict=True):
        ran = [event for event in events if not event.startswith("post")]
        for number, action in enumerate(ran):
            if action[0] == kind:  # a gradient on the first rank, a value on the second
                assert events.index(f"post {action}") < events.index(ran[max(0, number - 2)])


def outputs(degree: int) -> list[Any]:
    model = start(degree, 2)
    inputs = torch.arange(4 * WIDTH, dtype=torch.float32).view(4, WIDTH)
    with torch.no_grad():
        whole = evaluate(model, inputs).concat()
    smp.shutdown()
    return whole.tolist()


def test_every_rank_gets_what_the_step_returned() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    expected = module(torch.arange(4 * WIDTH, dtype=torch.float32).view(4, WIDTH)).tolist()
    for found in run_ranks(outputs, 3, 3):
        assert found == [pytest.approx(row) for row in expected]


SPEED = Speed(1e12, LinkSpeed(1e10, 1e10))


def made() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose first layers are wider, so that equal numbers of layers are no equal parts."""
    widths = [WIDTH, 64, 64, WIDTH, WIDTH, WIDTH, WIDTH]
    layers = [nn.Linear(before, after) for before, after in pairwise(widths)]
    return nn.Sequential(*layers), torch.zeros(2, WIDTH)


def run(options: dict[str, Any]) -> tuple[dict[str, int], str]:
    """Return the units that the ranks chose, and what this one did, in order."""
    smp.init(options)
    model = smp.DistributedModel(made()[0])
    train_step(model, torch.ones(2 * options["microbatches"], WIDTH))
    pipeline = model.pipeline
    assert pipeline is not None
    assert pipeline.assignment is not None
    assert pipeline._executor is not None
    schedule = pipeline._executor.last_schedule
    assert schedule is not None
    assignment = pipeline.assignment.partition_of
    actions = " ".join(map(str, schedule.actions[smp.pp_rank()]))
    smp.shutdown()
    return dict(assignment), actions


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_degree": 2, "microbatches": 4},
        {"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": "simple", "skip_tracing": True},
        {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "zero_bubble", "memory_weight": 0.1},
        {"pipeline_parallel_degree": 2, "microbatches": 4, "virtual_pipeline_degree": 2},
    ],
)
def test_ranks_do_what_the_plan_says(options: dict[str, Any]) -> None:
    config, _ = ModelParallelConfig.from_sources(options, None)
    traced = not config.skip_tracing
    num_places = 2 * config.virtual_pipeline_degree
    facts = describe(made if traced else lambda: made()[0], num_places, cfg=config, world_size=2)
    plan = decide(config, 2, facts, SPEED)
    assert plan.assignment is not None
    expected = [" ".join(map(str, actions)) for actions in plan.timeline.schedule.actions]
    found = run_ranks(run, 2, options)
    assert [units for units, _ in found] == [plan.assignment.partition_of] * 2
    assert [actions for _, actions in found] == expected
