"""Replicas reduce gradients while the last backward of a step runs: it must be that one, whatever the order is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import smpkit.torch as smp
from tests.ranks import run_ranks
from tests.torch.pipeline.test_executor import WIDTH, start
from tests.torch.pipeline.test_rerecorded import own_way
from tests.torch.steps import evaluate, executor, on_ranks, train_step


@smp.step
def asking_step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    if loss < 0:  # the microbatch comes back to all ranks with the answer
        loss = -loss
    model.backward(loss)
    return loss


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


def stray_in_halves() -> list[str]:
    model = start(6, pipeline="zero_bubble")
    x = torch.randn(12, WIDTH)
    skipping: Iterator[bool] = iter([False] * 6 + [False] * 3 + [True] + [False] * 2)
    own_way(model, x, skipping)
    return told(lambda: own_way(model, x, skipping))


def test_a_microbatch_that_strays_has_no_weight_halves_to_wait_for() -> None:
    found = run_ranks(stray_in_halves, 2)
    assert any(event.startswith("W") for events in found for event in events)
    for events in found:
        assert_told_once(events)
