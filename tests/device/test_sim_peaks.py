"""Device peaks, step times and stalls in virtual time are those of the formulas."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.activation_offload.simulated import BOUNDARY, WORKING, Stage, measure
from benchmarks.offload_model.simulated import PRODUCT, Cell
from benchmarks.offload_model.simulated import measure as measure_model
from smpkit.plan.schedule.templates import one_f_one_b
from tests.device.on_sim import on_sim

_LAYERS = 4
_FORWARD = 0.02
_H200 = 0.171
"""Copy / forward of a dense block of width 4096: 430 TFLOP/s and 50 GB/s give `2 * 430e12 / (24.5 * 4096 * 50e9)`."""


def _stage(copy: float, *, is_pipelined: bool) -> Stage:
    actions = one_f_one_b(4, 6).actions[0] if is_pipelined else one_f_one_b(1, 1).actions[0]
    return Stage(actions, _LAYERS, _FORWARD, copy * _FORWARD, is_pipelined)


@on_sim()
def test_activation_offload_is_as_planned() -> None:
    for is_pipelined, copy, lead in product((False, True), (_H200, 1.5, 3.0), (1, 2)):
        stage = _stage(copy, is_pipelined=is_pipelined)
        horizon = 4 if is_pipelined else None
        found, report = measure(stage, lead, horizon)
        assert report is not None
        _, plan = stage.plan(lead, horizon)
        where = (is_pipelined, copy, lead)
        assert found.peak_bytes == WORKING + plan.peak_bytes, where
        assert found.seconds == pytest.approx(plan.makespan_seconds, rel=1e-9), where
        assert report.stall_seconds == pytest.approx(plan.stall_seconds, rel=1e-9), where
        assert found.seconds == pytest.approx(stage.compute_seconds + plan.stall_seconds, rel=1e-9), where
        if copy < 1:
            assert report.stall_seconds == 0, where
            # Loaded ahead, in use, and two that leave; without a pipeline, backward begins with those that are held.
            assert plan.peak_bytes == (lead + 1 + 2 * is_pipelined) * BOUNDARY, where
        else:
            assert plan.stall_seconds > 0, where


@on_sim()
def test_an_offloaded_model_is_as_planned() -> None:
    for num_rows, num_microbatches, load in (
        (32, 1, 0.262),  # 32k tokens on an H200: `430e12 / (32768 * 50e9)`
        (8, 1, 1.05),  # 8k: the forward waits for weights
        (2, 1, 4.2),  # 2k: the backward, too
        (32, 2, 0.262),
        (16, 4, 0.262),
    ):
        cell = Cell(5, num_rows, num_microbatches, _FORWARD, load * _FORWARD)
        found, peak = measure_model(cell)
        computing = found.seconds_of(PRODUCT)
        where = (num_rows, num_microbatches, load)
        if num_microbatches == 1:  # its gradient at the border is not there any more when the next input comes
            assert peak == cell.planned_peak_bytes() - cell.border_bytes, where
        else:  # a slice is one parameter, which is more than a third of it; and the model's input gets a gradient
            spare = 2 * cell.slice_bytes + num_microbatches * cell.border_bytes
            assert cell.planned_peak_bytes() <= peak <= cell.planned_peak_bytes() + spare, where
        assert found.seconds == pytest.approx(cell.planned_seconds, rel=1e-9), where
        assert computing == pytest.approx(cell.compute_seconds, rel=1e-9), where
        exposed = found.seconds - computing
        if load < 1:  # nothing but the first load and the last gradient
            assert exposed == pytest.approx(2 * cell.load_seconds, rel=1e-6), where
        else:
            assert exposed > 2 * cell.load_seconds, where
