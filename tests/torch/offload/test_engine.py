"""What leaves, what comes back and when, what is held meanwhile, and that nothing is left."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch

from smpkit.errors import DeadlineError
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.testing import EmulatedLink
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.link import Copies, Event, Link
from smpkit.torch.offload.report import OffloadStats, Stall
from tests.torch.offload.chains import (
    BATCH,
    BOUNDARY_BYTES,
    ELEMENTS,
    WIDTH,
    ClockLink,
    allocate,
    assert_idle,
    assert_same,
    call,
    chain,
    engine_on,
    evict,
    forward,
    gradients,
    inputs,
    run_actions,
    slow,
)


@pytest.mark.parametrize("lead", [1, 2, 5, 99, "auto"])
@pytest.mark.parametrize("link", [Link, slow])
def test_gradients_are_the_same_bits_for_every_lead(lead: int, link: Callable[[], Link]) -> None:
    layers, x, engine = chain(6, dropout=0.2), inputs(), engine_on(link(), lead=lead)
    plain = gradients(layers, x, lambda: forward(layers, x))
    for _ in range(3):
        assert_same(gradients(layers, x, lambda: forward(layers, x, engine)), plain)
        assert_idle(engine)
    engine.close()


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("lead", [1, 2, 4])
def test_one_boundary_per_layer_moves_and_no_more_than_the_lead_stays(lead: int, runs_ahead: bool) -> None:
    link = Link()
    link.runs_ahead = runs_ahead
    layers, engine = chain(10), engine_on(link, lead=lead)
    y = forward(layers, inputs(), engine)
    held = max(lead, 2) if runs_ahead else lead  # where this thread runs ahead, two copies get time to end
    assert (engine.use().parked, engine.use().offloaded) == (held * BOUNDARY_BYTES, 10 * BOUNDARY_BYTES)
    y.sum().backward()
    del y
    gc.collect()
    step = engine.end_step()
    assert (step.bytes_out, step.bytes_back) == (10 * BOUNDARY_BYTES, (10 - held) * BOUNDARY_BYTES)
    assert (step.peak_device_bytes, step.peak_host_bytes) == (max(held, lead + 1) * BOUNDARY_BYTES, 10 * BOUNDARY_BYTES)
    assert_idle(engine)


@pytest.mark.parametrize("horizon", [1, 4, None])
def test_a_pipeline_over_a_slow_link_gets_the_same_gradients(horizon: int | None) -> None:
    engine = engine_on(slow(), lead=1, horizon=horizon)
    for _ in range(3):
        run_actions(engine, ClockLink(), one_f_one_b(4, 6).actions[0], num_layers=3)
        # Four microbatches wait for their backward at once.
        assert engine.end_step().peak_host_bytes == 4 * 3 * 4 * ELEMENTS
    assert_idle(engine)
    engine.close()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_slow_link_stalls_and_says_where() -> None:
    link = ClockLink(latency_seconds=0.03)
    layers, engine, seen = chain(6), engine_on(link, lead=1), list[tuple[str, float]]()
    engine.on_stall = lambda label, first, last: seen.append((label, last - first))
    engine.begin_microbatch(3)
    y = forward(layers, inputs(), engine)
    link.seconds += 1  # until all copies have ended
    y.sum().backward()
    stalls = engine.end_step().stalls
    assert [stall.layer for stall in stalls] == [f"layers.{number}" for number in reversed(range(5))]
    assert [stall.seconds for stall in stalls] == pytest.approx([0.03] * 5)
    assert {stall.microbatch for stall in stalls} == {3}
    assert [label for label, _ in seen] == [f"`{stall.layer}` (microbatch 3)" for stall in stalls]
    assert [seconds for _, seconds in seen] == pytest.approx([0.03] * 5)
    total, *worst = str(engine.stats.report()).splitlines()
    held = "at most 3.0 KiB on the device, 3.0 KiB on the host"
    assert total == f"rank 0: 1 steps, 3.0 KiB out, 2.5 KiB back; {held}; stalled 150.0 ms"
    assert worst == [f"  30.0 ms for `{stall.layer}`, microbatch 3" for stall in stalls[:3]]


def test_a_call_waits_for_what_is_on_its_way_back() -> None:
    engine, x = engine_on(EmulatedLink(latency_seconds=0.02), lead=1), inputs()
    parked = engine.park("layer", [x])
    engine.close()  # all copies have ended
    evict(engine)
    assert torch.equal(parked.take()[0], x)
    (stall,) = engine.end_step().stalls
    assert (stall.layer, stall.microbatch) == ("layer", None)
    assert 0.015 < stall.seconds == engine.stats.report().stall_seconds
    engine.link._deadline_seconds = 0.001  # type: ignore[attr-defined]
    with pytest.raises(DeadlineError, match=r"`layer` waited 0.001 s for a copy"):
        parked.take()
    engine.close()


def test_host_memory_is_not_read_before_it_was_written_nor_written_before_it_was_read() -> None:
    link = ClockLink(latency_seconds=0.5)
    link.runs_ahead = True
    engine = engine_on(link, budget_bytes=BOUNDARY_BYTES)
    for _ in range(2):
        parked: Any = engine.park("layer", [inputs()])
        engine._free(parked.saved[0], parked.index)
        engine._load(parked)
        del parked  # its load is still under way
        gc.collect()
    copies = [link.outs[0], link.loads[0], link.outs[1], link.loads[1]]
    assert all(later[1] >= earlier[2] for earlier, later in pairwise(copies))


# --- what a step leaves -----------------------------------------------------------------------------------------------


def test_what_was_loaded_for_nothing_is_dropped_at_the_end_of_the_step() -> None:
    engine = engine_on(lead=2)
    losses = [call(torch.square, inputs(), engine=engine, name=f"layers.{number}").sum() for number in range(6)]
    losses[3].backward()  # 2 and 1 are loaded, and backward does not come
    assert engine.use().parked == 4 * BOUNDARY_BYTES
    engine.end_step()
    assert engine.use().parked == 2 * BOUNDARY_BYTES
    losses[1].backward()  # loads it again
    del losses
    assert_idle(engine)


def test_a_graph_that_is_kept_is_walked_again() -> None:
    layers, x, engine = chain(5), inputs(), engine_on(slow())
    plain = gradients(layers, x, lambda: forward(layers, x))
    loss = forward(layers, x, engine).square().sum()
    for _ in range(3):
        for leaf in (*layers.parameters(), x):
            leaf.grad = None
        loss.backward(retain_graph=True)
        assert_same([leaf.grad for leaf in (*layers.parameters(), x)], plain)
        assert engine.end_step().peak_host_bytes == 5 * BOUNDARY_BYTES
    del loss
    assert_idle(engine)
    engine.close()


@pytest.mark.parametrize("when", [1, 2], ids=["forward", "recomputation in backward"])
def test_an_exception_leaves_nothing_and_training_goes_on(when: int) -> None:
    layers, x, engine, runs = chain(6), inputs(), engine_on(slow()), list[int]()

    def fails(*_: object) -> None:
        runs.append(when)
        if len(runs) == when:
            raise ZeroDivisionError

    layers[3].register_forward_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        gradients(layers, x, lambda: forward(layers, x, engine))
    engine.abandon_step()
    assert_idle(engine)
    plain = gradients(layers, x, lambda: forward(layers, x))
    assert_same(gradients(layers, x, lambda: forward(layers, x, engine)), plain)
    assert_idle(engine)
    engine.close()


class Broken(Link):
    """Copies nothing to the host."""

    def send(self, copies: Copies, after: Iterable[Event]) -> Event:
        raise ZeroDivisionError


def test_a_tensor_whose_copy_could_not_begin_stays_on_the_device() -> None:
    engine, x = engine_on(Broken(), lead=1), inputs()
    with pytest.raises(ZeroDivisionError) as error:
        engine.park("layer", [x])
    parked = engine.park("layer", [x])  # it is known to the engine, because the error holds the first call
    for _ in range(4):
        assert torch.equal(parked.take()[0], x)
    del parked, error
    assert_idle(engine)


# --- host memory ------------------------------------------------------------------------------------------------------


def test_spent_host_memory_leaves_the_rest_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    layers, x, engine = chain(6), inputs(), engine_on(budget_bytes=3 * BOUNDARY_BYTES)
    plain = gradients(layers, x, lambda: forward(layers, x))
    with caplog.at_level(logging.WARNING, "smpkit"):
        for _ in range(3):
            assert_same(gradients(layers, x, lambda: forward(layers, x, engine)), plain)
            gc.collect()
            step = engine.end_step()
            assert step.bytes_out == step.kept_bytes == 3 * BOUNDARY_BYTES
    budget = f"({3 * BOUNDARY_BYTES} bytes)"
    assert [record.getMessage() for record in caplog.records] == [
        f"host memory for activations is used up {budget}: those of `layers.3`, and others, stay on the device"
    ]


def test_the_footprint_of_a_microbatch_is_what_the_next_one_takes() -> None:
    engine, mask = engine_on(), torch.ones(BATCH, WIDTH)

    def run() -> list[object]:
        return [engine.park(f"layers.{number}", [inputs(number), inputs(number), mask]) for number in range(4)]

    first = run()
    assert engine.footprint() == engine.use().offloaded == (4 * 2 + 1) * BOUNDARY_BYTES  # one mask for all
    engine.reserve(3 * engine.footprint())
    mapped = engine.use().mapped
    others = [run(), run()]
    assert engine.use().mapped == mapped >= engine.use().offloaded == (3 * 4 * 2 + 1) * BOUNDARY_BYTES
    del first, others
    assert_idle(engine)


def test_a_wait_that_the_device_comes_to_later_is_told_with_the_next_step() -> None:
    class Late(Link):
        seconds: float | None = None

        def seconds_between(self, first: Any, last: Any) -> float | None:
            return self.seconds

    link = Late()
    stats, arena = OffloadStats(link, 0), Arena(None, allocate, link.before_free)
    stats.add_wait("layers.3", 1, 0, 1)
    assert stats.end_step(1, arena).stalls == ()
    link.seconds = 0.5
    assert stats.end_step(1, arena).stalls == (Stall("layers.3", 1, 0.5),)
