from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import smpkit.torch as smp
from smpkit.torch.recording import recorder
from smpkit.torch.recording.run_meter import STALL, RunMeter, Sampling, StepParts, parts_of
from tests.torch.recording.test_recorder import SLEEP, WIDTH, recording, sleep, worker
from tests.torch.steps import train_step, wrap

MS = 1_000_000


def test_a_step_is_divided_and_its_parts_add_up() -> None:
    actions = [(0, 40 * MS), (50 * MS, 90 * MS)]
    messages = [("receive", 0, 10 * MS), ("send", 38 * MS, 40 * MS)]
    works = [
        (f"{STALL}layer 3", 50 * MS, 55 * MS),  # in the backward
        ("reduce gradients", 90 * MS, 96 * MS),  # after it
    ]
    pipeline = parts_of(0, 100 * MS, actions, messages, works, is_pipeline=True)
    assert pipeline == StepParts(63 * MS, (10 + 14) * MS, (2 + 6) * MS, 5 * MS, 0)
    assert sum(vars(pipeline).values()) == 100 * MS
    alone = parts_of(0, 100 * MS, actions, messages, works, is_pipeline=False)
    assert (alone.bubble, alone.other) == (10 * MS, 14 * MS)


def test_the_first_steps_are_recorded_then_fewer_and_fewer_by_each_step_function() -> None:
    assert not any(Sampling(first=0).next("train") for _ in range(60))
    sampling = Sampling(first=3)
    chosen = [number for number in range(120_000) if sampling.next("train")]
    assert chosen[:5] == [0, 1, 2, 50, 100]
    assert [chosen[at + 1] - chosen[at] for at in range(len(chosen) - 1)][-1] == 5000
    # Of the first 5,000 every 50th, then of 45,000 every 500th, then every 5,000th.
    assert len(chosen) == 3 + 99 + 90 + 14
    assert sampling.next("evaluate")


def steps(meter: RunMeter, count: int, *, recorded: int = 1) -> None:
    """Add steps of 100 ms: 70 in the call, 20 of the optimizer, 10 between."""
    for number in range(count):
        start = number * 100 * MS
        parts = StepParts(35 * MS, 20 * MS, 10 * MS, 5 * MS, 0) if number % recorded == 0 else None
        meter.add_step(start, start + 70 * MS, parts)
        meter.add_optimizer(start + 75 * MS, start + 95 * MS)


@pytest.mark.parametrize(("recorded", "count"), [(1, 4), (1, 41), (10, 41), (50, 1001)])
def test_the_split_of_the_average_step_adds_up_to_it(recorded: int, count: int) -> None:
    meter = RunMeter()
    steps(meter, count, recorded=recorded)
    split = meter.split()
    assert meter.num_steps == count
    assert meter.step_seconds == pytest.approx(0.1, rel=0.002)
    assert split.total == pytest.approx(meter.step_seconds, rel=1e-9)
    assert (split.compute, split.bubble, split.communication) == pytest.approx((0.035, 0.02, 0.01))
    assert (split.stall, split.optimizer) == pytest.approx((0.005, 0.02))


def test_the_size_of_a_step_is_the_average_and_not_that_of_the_last_batch() -> None:
    meter = RunMeter()
    for number, samples in enumerate((8, 8, 8, 8, 8, 8, 8, 2)):  # a data set's last batch
        start = number * 100 * MS
        meter.add_step(start, start + 70 * MS, StepParts(70 * MS, 0, 0, 0, 0), (samples, 10 * samples))
    assert meter.size() == (7, 70)


def test_only_recorded_steps_say_how_a_step_is_divided() -> None:
    meter = RunMeter()
    for number in range(40):
        start, is_recorded = number * 100 * MS, number % 10 == 0
        parts = StepParts(70 * MS, 0, 0, 0, 0) if is_recorded else None
        meter.add_step(start, start + (70 if is_recorded else 1) * MS, parts)
        if is_recorded:
            meter.add_optimizer(start + 70 * MS, start + 90 * MS)
    meter.add_optimizer(4000 * MS, 4000 * MS)  # the end
    split = meter.split()
    assert (split.compute, split.optimizer, split.other) == pytest.approx((0.07, 0.02, 0.01), rel=0.02)


def test_nothing_is_known_before_the_first_step_and_one_step_is_enough() -> None:
    meter = RunMeter()
    assert (meter.step_seconds, meter.split().total) == (None, 0.0)
    steps(meter, 1)
    assert meter.step_seconds == pytest.approx(0.095)
    assert meter.split().total == pytest.approx(0.095)


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.015)


@pytest.mark.usefixtures("world")
def test_the_split_of_real_steps_is_what_they_slept_and_adds_up_to_the_clock_within_2_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(recorder.QUIET)
    model = wrap(worker(sleep), microbatches=2)
    optimizer = smp.DistributedOptimizer(SlowOptimizer(model.parameters(), lr=0.1))
    began = []
    for _ in range(9):
        began.append(time.perf_counter_ns())
        train_step(model, torch.ones(6, WIDTH))
        optimizer.step()
        time.sleep(0.01)
    meter = recording().meter
    split, clock = meter.split(), (began[8] - began[2]) / 6e9
    assert split.total == pytest.approx(clock, rel=0.02)
    assert split.compute >= 2 * 3 * SLEEP
    assert split.optimizer >= 0.015
    assert split.other >= 0.01
    assert split.compute + split.optimizer + split.other == pytest.approx(split.total, rel=0.02)
    assert meter.size() == (6, 0)
    smp.shutdown()
