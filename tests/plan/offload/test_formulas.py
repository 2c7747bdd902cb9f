"""The closed formulas, against the simulator and against figures worked out by hand."""

from __future__ import annotations

import pytest

from smpkit.plan.offload.simulate import simulate_offload
from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, layer_tasks
from smpkit.plan.schedule.templates import one_f_one_b
from tests.plan.offload.formulas import (
    backlog_boundaries,
    headroom,
    offloaded_bytes,
    peak_bound_bytes,
    step_bound_seconds,
)

_LAYER = LayerCost(1.0, 2.0, 100, recompute_seconds=1.0)
_WINDOWS = [Window(1), Window(2), Window(8), Window(horizon=1), Window(horizon=4), Window(4, 1)]


def _work(num_ranks: int, num_microbatches: int, num_layers: int) -> tuple[LayerTask, ...]:
    return layer_tasks(one_f_one_b(num_ranks, num_microbatches).actions[0], [[_LAYER] * num_layers])


@pytest.mark.parametrize("window", _WINDOWS, ids=str)
@pytest.mark.parametrize("copy_seconds", [0.1, 0.7, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_layers"), [(1, 4, 4), (2, 6, 3), (8, 16, 8)])
def test_bounds_hold_in_the_simulator(
    num_ranks: int, num_microbatches: int, num_layers: int, copy_seconds: float, window: Window
) -> None:
    work, link = _work(num_ranks, num_microbatches, num_layers), LinkSpeed(100 / copy_seconds, 100 / copy_seconds)
    timeline = simulate_offload(work, link, window)
    assert timeline.out_bytes == offloaded_bytes(work, window)
    assert timeline.makespan_seconds >= step_bound_seconds(work, link, window) - 1e-9
    backlog = backlog_boundaries(num_ranks * num_layers, _LAYER, link)
    bound = peak_bound_bytes(100, num_layers, min(num_ranks, num_microbatches), window, backlog)
    assert timeline.peak_bytes <= bound
    if copy_seconds < 1 and num_ranks == 8:
        assert bound - timeline.peak_bytes <= (100 if window.lead else 300)


def test_headroom_of_a_dense_block_is_the_known_one() -> None:
    width, tokens, flops_per_second = 4096, 8192, 430e12
    layer = LayerCost(2 * 12.25 * width**2 * tokens / flops_per_second, 0.0, 2 * tokens * width)
    assert headroom(layer, LinkSpeed(50e9, 50e9)) == pytest.approx(5.8, abs=0.05)
    assert headroom(layer, LinkSpeed(50e9, 50e9, both_bytes_per_second=50e9)) == pytest.approx(2.9, abs=0.03)


def test_step_is_bound_by_compute_then_by_the_link() -> None:
    work = _work(8, 16, 8)
    window = Window(1)
    assert offloaded_bytes(work, window) == 12800
    assert step_bound_seconds(work, LinkSpeed(100, 100), window) == 512
    assert step_bound_seconds(work, LinkSpeed(100, 100), window, slowdown=0.03) == pytest.approx(527.36)
    assert step_bound_seconds(work, LinkSpeed(20, 10), window) == 1280
    assert step_bound_seconds(work, LinkSpeed(20, 20, 20, latency_seconds=1.0), window) == 1280
    assert step_bound_seconds(work, LinkSpeed(100, 100, latency_seconds=9.0), window) == 128 * 10
