"""The engine over an emulated link, with layers that sleep: step time, stall and peak, measured and predicted."""

from __future__ import annotations

import statistics
import time
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.activation_offload.stage import SleepingLayer, run_stage
from smpkit.plan.offload.simulate import Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LinkSpeed, Window, layer_tasks
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.testing import EmulatedLink
from smpkit.torch.offload.engine import ActivationEngine, make_engine
from tests.plan.offload.formulas import step_bound_seconds

__all__ = ["link_table"]

_SECONDS, _LAYERS, _BYTES = 0.02, 4, 64 * 1024
"""A forward; layers of the stage; a boundary."""
_COPIES = (0.25, 1.0, 2.0, 3.0)
_WINDOWS = (Window(1, 4), Window(2, 4))
_STEPS = 3


def link_table() -> list[dict[str, Any]]:
    """Return a row per order, copy time and window: seconds without offloading, with it, predicted, and the bound."""
    orders = (
        ("1F1B, first of 4, 6 microbatches", one_f_one_b(4, 6).actions[0], True),
        ("no pipeline, 1 microbatch", one_f_one_b(1, 1).actions[0], False),
    )
    found: list[dict[str, Any]] = []
    for name, actions, is_planned in orders:
        known = {"order": name, "plain": _step_seconds(actions, None, is_planned)}
        cells = product(_COPIES, _WINDOWS)
        found += [{**known, **_cell(actions, copy, window, is_planned)} for copy, window in cells]
    return found


def _cell(actions: tuple[Action, ...], copy: float, window: Window, is_planned: bool) -> dict[str, Any]:
    rate = _BYTES / (copy * _SECONDS)
    link = EmulatedLink(rate)
    horizon = window.horizon if is_planned else None
    engine = make_engine(link.device, lead=window.lead or "auto", horizon=horizon, link=link)
    try:
        seconds = _step_seconds(actions, engine, is_planned)
        report = engine.stats.report().steps[-1]
    finally:
        engine.close()
    work = layer_tasks(actions, [[LayerCost(_SECONDS, 2 * _SECONDS, _BYTES, _SECONDS)] * _LAYERS])
    speed = LinkSpeed(rate, rate)
    predicted = simulate_offload(work, speed, window, rules=Rules(is_planned=is_planned))
    return {
        "copy": copy,
        "lead": window.lead,
        "seconds": seconds,
        "predicted": predicted.makespan_seconds,
        "bound": step_bound_seconds(work, speed, window),
        "stall": report.stall_seconds,
        "predicted_stall": predicted.stall_seconds,
        "peak": report.peak_device_bytes / _BYTES,
        "predicted_peak": predicted.peak_bytes / _BYTES,
    }


def _step_seconds(actions: tuple[Action, ...], engine: ActivationEngine | None, is_planned: bool) -> float:
    """Return the median of a step's time; the first step teaches the engine the order and is not counted."""
    layers = [SleepingLayer(_SECONDS)] * _LAYERS
    times = []
    for _ in range(1 + _STEPS):
        start = time.perf_counter()
        run_stage(actions, layers, _input, engine, is_planned=is_planned)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _input() -> Tensor:
    return torch.zeros(_BYTES // 4, requires_grad=True)
