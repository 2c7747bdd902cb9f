"""What runs is what was planned: order, live microbatches, messages; and a slow link makes the plan deeper."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.plan.decide import Policy, with_jitter
from smpkit.plan.schedule import receives as receives_module
from smpkit.plan.schedule.actions import Costs, Schedule
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph
from smpkit.plan.schedule.search import interleaved
from smpkit.torch.core.runtime import state
from smpkit.torch.core.step_participants import StepParticipants
from smpkit.torch.pipeline.executor import Executor
from smpkit.torch.pipeline.messages import Message, Tag
from smpkit.torch.pipeline.output_broadcast import OutputBroadcast
from smpkit.torch.pipeline.replan import Meter, _costs, _is_kept
from smpkit.torch.pipeline.transport import Transport
from tests.ranks import RankFailed, run_ranks

WIDTH = 8


@smp.step
def train_step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(inputs)
    return result


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
    smp.init(
        {
            "pipeline_parallel_degree": degree,
            "microbatches": microbatches,
            "auto_partition": False,
            "default_partition": 0,
            "ddp": True,
            **more,
        }
    )
    torch.manual_seed(3)
    module = Tied(degree) if tied else nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(degree)])
    for rank, layer in enumerate(module.layers if isinstance(module, Tied) else module):
        smp.set_partition(layer, rank)
    return smp.DistributedModel(module)


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


def posted_before_waiting(microbatches: int, ahead_bytes: int | None) -> int:
    """Return how many receives of the fourth step are on their way when its first one is waited for."""
    if ahead_bytes is not None:
        receives_module._AHEAD_BYTES = ahead_bytes  # type: ignore[misc]
    model = start(2, microbatches)
    inputs = torch.randn(4 * microbatches, WIDTH)
    for _ in range(3):
        train_step(model, inputs)
    transport, found = executor().stage.transport, []
    receive = transport._receive_message

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        found.append(len(transport._posted))
        return receive(*args, **kwargs)

    transport._receive_message = noting  # type: ignore[method-assign]
    train_step(model, inputs)
    assert not transport._posted
    smp.shutdown()
    return found[0]


@pytest.mark.parametrize(("num_bytes", "most"), [(None, 6), (3 * 4 * WIDTH * 4, 3), (0, 2)])
def test_small_receives_are_posted_before_the_first_wait(num_bytes: int | None, most: int) -> None:
    for found in run_ranks(posted_before_waiting, 2, 6, num_bytes):
        assert found == most if num_bytes is None else 1 <= found <= most


def count(degree: int, microbatches: int) -> list[dict[str, Any]]:
    """Return for three steps after the schedule is settled what this rank's transport did."""
    model = start(degree, microbatches)
    inputs = torch.randn(4 * microbatches, WIDTH)
    for _ in range(5):  # recorded, measured, tried in turns
        train_step(model, inputs)
    transport = executor().stage.transport
    messages: list[tuple[str, int, int, int]] = []
    transport.recorder = lambda direction, peer, size, tag, begin, end: messages.append((direction, peer, size, tag))
    objects: list[object] = []

    def broadcast_object(value: object, *_: object) -> None:
        objects.append(value)

    transport.broadcast_object = broadcast_object  # type: ignore[assignment, method-assign]
    steps = []
    for _ in range(3):
        messages.clear()
        before = transport.num_messages
        train_step(model, inputs)
        steps.append({"messages": list(messages), "sent": transport.num_messages - before, "objects": len(objects)})
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
            # Besides: inputs to the next rank, the way to both neighbours, what the step returned to the one before.
            others = (rank < degree - 1) + len(neighbours) + (rank > 0)
            assert step["sent"] == microbatches * len(neighbours) + others
        assert steps[0] == steps[1] == steps[2]


def outstanding(microbatches: int) -> int:
    """Return the most messages that this rank's transport held at a time."""
    model = start(2, microbatches)
    inputs = torch.randn(4 * microbatches, WIDTH)
    for _ in range(3):
        train_step(model, inputs)
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(map(len, executor().stage.transport._sending)))

    executor().recorder = look
    train_step(model, inputs)
    smp.shutdown()
    return most


def test_sent_tensors_are_let_go_while_the_step_runs() -> None:
    # Two messages at the start and end, and those of live microbatches: not one for each of 24 microbatches.
    assert max(run_ranks(outstanding, 2, 24)) <= 8


def slow_second_step(degree: int, microbatches: int, kept: bool) -> list[str]:
    """Return the schedules of seven steps: the link is slow by what rank 0 measures, and what it then plans is kept."""
    from smpkit.torch.pipeline import replan

    replan._measure_link = lambda stage, num_bytes: (0.01, 0.0)
    replan._is_kept = lambda before_seconds, after_seconds: kept
    model = start(degree, microbatches, active_microbatches=8)
    inputs = torch.randn(4 * microbatches, WIDTH, generator=torch.Generator().manual_seed(1))
    gradients: list[Any] = []
    texts = []
    for _ in range(7):
        model.zero_grad()
        train_step(model, inputs)
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        texts.append(str(executor().last_schedule))
    smp.shutdown()
    assert all(torch.equal(a, b) for other in gradients for a, b in zip(gradients[0], other, strict=True))
    return texts


@pytest.mark.parametrize("kept", [True, False], ids=["faster", "slower"])
def test_a_deeper_schedule_is_tried_and_gradients_stay_the_same_to_the_bit(kept: bool) -> None:
    found = run_ranks(slow_second_step, 2, 2, 8, kept)
    before, after = found[0][1:3]
    assert before != after
    assert found[0] == found[1] == [before, before, after, before, after, *[after if kept else before] * 2]


@pytest.mark.parametrize(("seconds", "kept"), [((1.0, 0.9), True), ((1.0, 1.02), True), ((1.0, 1.04), False)])
def test_what_is_measured_as_slower_is_not_kept(seconds: tuple[float, float], kept: bool) -> None:
    assert _is_kept(*seconds) is kept


@pytest.mark.parametrize(
    ("costs", "deeper"),
    [(Costs(0.02, 0.04, latency_seconds=0.01), True), (Costs(0.02, 0.04), False)],
    ids=["slow link", "no link time"],
)
def test_another_schedule_must_be_worth_it(costs: Costs, deeper: bool) -> None:
    schedule = interleaved(SegmentGraph.chain(4, num_bytes=8), 16, 8)
    better = Policy("interleaved", 8).replanned(schedule, costs)
    assert (better is not schedule) is deeper
    assert not deeper or sum(better.peak_live_microbatches) > sum(schedule.peak_live_microbatches)


@pytest.mark.parametrize(("degree", "live"), [(2, (3, 1)), (4, (5, 4, 3, 1))])
def test_messages_count_as_late_even_where_a_ping_is_fast(degree: int, live: tuple[int, ...]) -> None:
    schedule = interleaved(SegmentGraph.chain(degree, num_bytes=8), 16, degree + 2)
    costs = with_jitter(_costs((1,) * degree, [[0.02, 0.04, 0.0, 1e-5, 0.0]] * degree), schedule.graph)
    assert Policy("interleaved", degree + 2).replanned(schedule, costs).peak_live_microbatches == live


def test_meter_takes_medians_by_segment_and_kind() -> None:
    meter = Meter()
    for spent in (10, 30, 1000):
        meter.note(Kind.FORWARD, 0, spent)
    meter.note(Kind.BACKWARD, 1, 7)
    assert meter.seconds(2) == pytest.approx([30e-9, 0, 0, 0, 7e-9, 0])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Policy("interleaved", 4), True), (Policy("interleaved", 1), False), (Policy("simple", 4), False)],
    ids=["room for more", "at the cap", "simple"],
)
def test_schedules_are_made_again_only_where_there_is_a_choice(policy: Policy, expected: bool) -> None:
    graph = SegmentGraph.chain(2)
    assert graph.segments[0] == Segment(0, 0)
    assert policy.can_replan(policy.schedule(graph, 4)) is expected


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


def diverge() -> None:
    model = start(2, 2)

    @smp.step
    def step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(inputs)
        return result.abs() if smp.pp_rank() == 1 else result.exp()

    with torch.no_grad():
        step(model, torch.zeros(4, WIDTH))


def test_ranks_that_go_different_ways_hear_of_it() -> None:
    with pytest.raises(RankFailed, match="took another way through microbatch 0 than pipeline rank 0"):
        run_ranks(diverge, 2)


def shared_inputs(shapes: Sequence[Sequence[int]], head_bytes: int) -> tuple[bool, list[bool]]:
    """Return whether this rank saw rank 0's inputs in each step, and, on rank 0, which blocks were used once more."""
    smp.init({"pipeline_parallel_degree": 3, "microbatches": 3, "ddp": True})
    from smpkit.torch.pipeline.batch_broadcast import InputBroadcast
    from smpkit.torch.pipeline.pipeline import Pipeline
    from smpkit.torch.placement.measure import MeasureOptions

    transport = Pipeline(nn.Linear(1, 1), StepParticipants(), MeasureOptions(), lambda root, ranks: None)._transport
    inputs, equal, frames = InputBroadcast(transport, smp.pp_rank(), 3, torch.device("cpu")), True, []
    for step in range(5):
        expected = [torch.randn(shape, generator=torch.Generator().manual_seed(step)) for shape in shapes]
        mine = expected if smp.pp_rank() == 0 else [torch.zeros_like(tensor) for tensor in expected]
        inputs.head_bytes = head_bytes
        with torch.inference_mode(step == 0):
            found = inputs.broadcast("the step", mine)
        frames.append(inputs._in_flight)
        if step != 2:  # in which nobody waits for what was sent
            transport.flush()
            inputs.end_step()
        equal = equal and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    transport.flush()
    smp.shutdown()
    return equal, [one is other for one, other in pairwise(frames)]


@pytest.mark.parametrize("head_bytes", [32, 40, 64 * 1024])
@pytest.mark.parametrize(
    "shapes", [[], [[3], [2, 0], [], [1, 1]], [[300, 100], [5]]], ids=["none", "small", "larger than any first message"]
)
def test_inputs_of_the_first_rank_reach_all(shapes: list[list[int]], head_bytes: int) -> None:
    found = run_ranks(shared_inputs, 3, shapes, head_bytes)
    assert all(equal for equal, _ in found)
    # The first says what the arguments are, large ones are not kept, and the third is still on its way.
    assert found[0][1] == [False, sum(map(prod, shapes)) < 1000, False, sum(map(prod, shapes)) < 1000]


def first_messages(batches: Sequence[int]) -> list[tuple[int, float]]:
    """Return how many bytes each step's first message has, and the loss; the last rank's own inputs are zeros."""
    sent: list[int] = []
    send = Transport.send_bytes

    def noted(self: Transport, packed: torch.Tensor, target: int, tag: int) -> None:
        if Tag.INPUTS_HEAD <= tag < Tag.INPUTS_HEAD + (1 << 24):
            sent.append(len(packed))
        send(self, packed, target, tag)

    Transport.send_bytes = noted  # type: ignore[method-assign]
    model = start(2, 2)
    torch.manual_seed(5)
    found = []
    for batch in batches:
        inputs = torch.randn(batch, WIDTH)
        loss = train_step(model, inputs * (smp.pp_rank() == 0)).reduce_mean().item()
        found.append((sum(sent), round(loss, 6)))
        sent.clear()
    smp.shutdown()
    return found


def test_the_first_message_is_as_large_as_the_step_before_needed() -> None:
    first, last = run_ranks(first_messages, 2, [4, 4, 40, 4, 4])
    num_bytes = 4 * WIDTH
    assert [sent for sent, _ in first] == [
        64 * 1024,
        *(32 + batch * num_bytes for batch in (4, 4, 40, 4)),
    ]  # header
    assert [loss for _, loss in first] == [loss for _, loss in last]


def order_of_the_end() -> list[str]:
    """Return what this rank does in the fourth step, from its last forward on: backwards, and the ending."""
    model = start(2, 4)
    inputs = torch.randn(16, WIDTH)
    for _ in range(3):
        train_step(model, inputs)
    seen: list[str] = []
    begin = OutputBroadcast.__init__

    def noted(self: OutputBroadcast, *arguments: Any) -> None:
        seen.append("ending")
        begin(self, *arguments)

    OutputBroadcast.__init__ = noted  # type: ignore[assignment, method-assign]
    executor().recorder = lambda kind, segment, microbatch, *times: seen.append(f"{kind}{microbatch}")
    train_step(model, inputs)
    smp.shutdown()
    return seen[seen.index("F3") :]


def test_the_ending_waits_for_a_backward_that_others_wait_for_and_fills_waits_for_gradients() -> None:
    first, last = run_ranks(order_of_the_end, 2)
    assert first[:2] == ["F3", "ending"]
    assert last == ["F3", "B3", "ending"]
