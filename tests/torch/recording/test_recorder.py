"""What real ranks record, and that reading it back gives the step that was planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import ConfigError
from smpkit.observe.events import ActionSpan, Mark, MemorySample, StepSpan, read_events
from smpkit.observe.executed import executed_step
from smpkit.observe.merge import read_run
from smpkit.observe.runs import RUN_DIR
from smpkit.observe.trace import chrome_trace
from smpkit.torch.core import devices
from smpkit.torch.recording import recorder
from tests.models import Does
from tests.observe.trace_problems import trace_problems
from tests.ranks import run_ranks
from tests.torch.steps import evaluate, train_step, wrap

pytestmark = pytest.mark.usefixtures("world")

WIDTH, MICROBATCHES, STEPS, SLEEP = 64, 4, 6, 0.03


class _Work(torch.autograd.Function):
    """Does some work forward, and twice of it backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, work: Callable[[str, int], None]) -> torch.Tensor:
        ctx.work = work
        work("forward", 1)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work("backward", 2)
        return gradients[0], None


def worker(work: Callable[[str, int], None]) -> nn.Module:
    return Does(lambda own, value: _Work.apply(own.linear(value), work), linear=nn.Linear(WIDTH, WIDTH))


def sleep(_: str, times: int) -> None:
    """Take time, and no computing: ranks overlap on any machine."""
    time.sleep(times * SLEEP)


@smp.step
def failing_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    raise ValueError("boo")


LAUNCHED = 0.05


class DeviceClock:
    """A device that takes orders at once and carries them out one by one, and the clocks of it and its host."""

    def __init__(self) -> None:
        self.host_ns, self.free_ns = 10**9, 0
        self.told: list[str] = []

    def launch(self, what: str, times: int) -> None:
        self.told.append(what)
        self.free_ns = max(self.free_ns, self.host_ns) + round(times * LAUNCHED * 1e9)

    def perf_counter_ns(self) -> int:
        self.host_ns += 1000
        return self.host_ns

    time_ns = perf_counter_ns

    def record_event(self, _: torch.device, *, keeps_time: bool = False) -> Any:
        assert keeps_time
        return DeviceEvent(max(self.free_ns, self.host_ns) - 10**8)  # it counts from another moment than the host

    def wait_for_stream(self, _: torch.device) -> None:
        self.told.append("the host waits")
        self.host_ns = max(self.host_ns, self.free_ns)


@dataclass(frozen=True)
class DeviceEvent:
    at_ns: int

    def elapsed_time(self, later: DeviceEvent) -> float:
        return (later.at_ns - self.at_ns) / 1e6


def train(degree: int, steps: int = 2) -> None:
    layers = nn.Sequential(*(worker(sleep) for _ in range(degree)))
    model = wrap(layers, pipeline_parallel_degree=degree, microbatches=MICROBATCHES, skip_tracing=True, ddp=True)
    for _ in range(steps):
        train_step(model, torch.ones(MICROBATCHES, WIDTH))
    smp.shutdown()


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this process records."""
    monkeypatch.setenv(recorder.EVENTS_DIR, str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, some steps of 1F1B in which computing is sleeping."""
    folder = tmp_path_factory.mktemp("events")
    run_ranks(train, 2, 2, STEPS, env={recorder.EVENTS_DIR: str(folder)})
    return folder


def test_executed_order_is_the_plan(recorded: Path) -> None:
    run = read_run(recorded)
    assert run.steps == tuple(range(STEPS))
    step = executed_step(run, 1)
    assert step.follows_plan
    assert [" ".join(map(str, actions)) for actions in step.executed.schedule.actions] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_bubble_of_sleeping_1f1b_is_near_the_ideal(recorded: Path) -> None:
    run = read_run(recorded)
    steps = [executed_step(run, number) for number in range(1, STEPS)]
    for step in steps:
        assert step.executed.makespan_seconds >= (MICROBATCHES + 1) * 3 * SLEEP
        assert step.step_seconds >= step.executed.makespan_seconds
    best: Any = min(steps, key=lambda step: step.executed.bubble)  # which other processes disturbed least
    assert best.planned.bubble == pytest.approx(1 / (MICROBATCHES + 1), abs=0.03)
    assert best.planned.bubble - 0.03 < best.executed.bubble < 0.45


def test_one_message_per_boundary_and_direction(recorded: Path) -> None:
    step = executed_step(read_run(recorded), 1)
    links = [(link.sender, link.receiver, link.num_messages, link.num_bytes) for link in step.links]
    assert links == [(0, 1, MICROBATCHES, MICROBATCHES * WIDTH * 4), (1, 0, MICROBATCHES, MICROBATCHES * WIDTH * 4)]


def test_the_trace_of_real_ranks_is_sound(recorded: Path) -> None:
    run = read_run(recorded)
    assert trace_problems(chrome_trace(run)) == []
    assert chrome_trace(run).count('"ph":"s"') == STEPS * 2 * MICROBATCHES


def test_without_a_pipeline_microbatches_and_reduction_are_recorded(tmp_path: Path) -> None:
    run_ranks(train, 2, 1, 1, env={recorder.EVENTS_DIR: str(tmp_path)})
    run = read_run(tmp_path)
    assert run.pipelines == ((0,), (1,))
    step = executed_step(run, 0, pipeline=1)
    assert step.follows_plan
    assert str(step.executed.schedule) == "rank 0: F0 B0 F1 B1 F2 B2 F3 B3"
    assert [work.name for work in run.step(1, 0).works] == ["reduce gradients"]
    assert trace_problems(chrome_trace(run)) == []


def test_a_step_that_fails_leaves_a_mark_and_no_step(events: Path) -> None:
    smp.init({"microbatches": 1})
    with pytest.raises(ValueError, match="boo"):
        failing_step(smp.DistributedModel(nn.Linear(2, 2)), torch.ones(1, 2))
    smp.shutdown()
    log = read_events(events / "events_0.jsonl")
    assert [event.name for event in log.events if isinstance(event, Mark)] == ["ValueError in step 0"]


@pytest.mark.usefixtures("events")
def test_a_full_disk_ends_the_record_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    smp.init({"microbatches": 1})
    recording: Any = recorder.current_recorder()
    recording._writer._file.close()
    recording._writer._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the recorder closes it
    model = smp.DistributedModel(nn.Linear(WIDTH, WIDTH))
    with caplog.at_level("WARNING", "smpkit"):
        for _ in range(2):
            train_step(model, torch.ones(1, WIDTH))
    assert [record.message for record in caplog.records] == [
        "recording ended: events cannot be written: No space left on device"
    ]
    assert vars(recording)["_writer"] is None
    assert recording.meter.num_steps == 2
    smp.shutdown()


def test_a_device_that_computes_on_its_own_times_what_it_does_and_nothing_waits_for_it(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = DeviceClock()
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(devices, "record_event", clock.record_event)
    monkeypatch.setattr(devices, "wait_for_stream", clock.wait_for_stream)
    model = wrap(worker(clock.launch), microbatches=MICROBATCHES)
    train_step(model, torch.ones(MICROBATCHES, WIDTH))
    with pytest.raises(ValueError, match="boo"):
        failing_step(model, torch.ones(MICROBATCHES, WIDTH))
    smp.shutdown()
    launches = ["forward", "backward"] * MICROBATCHES
    # Before a step, for what came before it; the one that fails waits for nothing at its end.
    assert clock.told == ["the host waits", *launches, "the host waits", "the host waits"]
    step = executed_step(read_run(events), 0)
    assert str(step.executed.schedule) == "rank 0: F0 B0 F1 B1 F2 B2 F3 B3"
    spans = [event for event in read_events(events / "events_0.jsonl").events if isinstance(event, ActionSpan)]
    assert len(spans) == 2 * MICROBATCHES
    at_ns = spans[0].start_ns
    for span in spans:  # one follows the other, though the host was done with all of them at once
        assert span.start_ns == pytest.approx(at_ns, abs=1e5)
        at_ns += round((LAUNCHED if span.kind == "F" else 2 * LAUNCHED) * 1e9)
        assert span.end_ns == pytest.approx(at_ns, abs=1e5)
    assert step.step_seconds == pytest.approx(3 * MICROBATCHES * LAUNCHED, abs=1e-4)
    assert trace_problems(chrome_trace(read_run(events))) == []


def test_nothing_is_written_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(recorder.EVENTS_DIR, raising=False)
    train(1)
    assert list(tmp_path.iterdir()) == []


def test_in_the_folder_of_a_run_a_sample_of_the_steps_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv(recorder.EVENTS_STEPS, "3")
    model = wrap(nn.Linear(WIDTH, WIDTH), microbatches=1)
    evaluate(model, torch.ones(1, WIDTH))
    for _ in range(102):
        train_step(model, torch.ones(1, WIDTH))
    meter = recording().meter
    assert meter.num_steps == 102
    smp.shutdown()
    log = read_events(tmp_path / "events" / "events_0.jsonl")
    steps = [(event.number, event.call) for event in log.events if isinstance(event, StepSpan)]
    assert steps == [(0, 0), (1, 0), (2, 1), (3, 2), (51, 50), (101, 100)]


def recording() -> Any:
    return recorder.latest_recorder()


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
@pytest.mark.usefixtures("events")
def test_a_limit_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recorder.EVENTS_STEPS, text)
    with pytest.raises(ConfigError, match="SMPKIT_EVENTS_STEPS"):
        smp.init({"microbatches": 1})


# --- memory: what a rank holds by kind is what its tensors hold -------------------------------------------------------


ROWS, LAYERS = 256, 4
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
BOUNDARY_BYTES = 4 * ROWS * WIDTH


def samples(folder: Path, offload: bool) -> list[MemorySample]:
    """Return those of the third step of a model of some layers."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    model = wrap(layers, microbatches=MICROBATCHES, offload_activations=offload, skip_tracing=True)
    if offload:
        smp.set_activation_checkpointing(layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        train_step(model, torch.ones(MICROBATCHES * ROWS, WIDTH))
        optimizer.step()
    smp.shutdown()
    log = read_events(folder / "events_0.jsonl")
    return [event for event in log.events if isinstance(event, MemorySample) and event.step == 2]


def test_what_is_held_is_what_tensors_and_autograd_hold(events: Path) -> None:
    found = samples(events, offload=False)
    weights = LAYERS * LAYER_BYTES
    assert {each.weights for each in found} == {weights}
    assert {each.states for each in found} == {2 * weights + 2 * LAYERS * 4}  # and its count of steps, by parameter
    assert (found[0].gradients, found[-1].gradients) == (0, weights)
    assert {each.offloaded for each in found} == {0}
    if found[0].activations == -1:
        return  # this C library does not count
    saved = LAYERS * BOUNDARY_BYTES  # the input of the first layer was there before, the output of the last is squared
    most = max(each.activations for each in found)
    assert saved <= most <= 3 * saved, "activations grow to what autograd saves"
    assert found[-1].activations < BOUNDARY_BYTES, "and go with backward"


def test_what_offloading_moves_and_holds_is_counted(events: Path) -> None:
    found = samples(events, offload=True)
    assert max(each.offloaded for each in found) >= BOUNDARY_BYTES
    assert found[-1].bytes_out >= found[-1].bytes_back > 0
    assert found[-1].bytes_out % BOUNDARY_BYTES == 0
    assert max(each.parked for each in found) >= BOUNDARY_BYTES
