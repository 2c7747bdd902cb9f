"""The engine does what the simulator says: the same copies in the same order at the same times, bytes and peaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from smpkit.plan.offload.simulate import Copy, Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.offload.report import StepReport
from tests.torch.offload.chains import ELEMENTS, ClockLink, engine_on, run_actions, value_of

_BYTES = 4 * ELEMENTS
_LAYERS = 3


def _tasks(actions: Sequence[Action]) -> Sequence[LayerTask]:
    return layer_tasks(actions, [[LayerCost(1.0, 2.0, _BYTES, recompute_seconds=1.0)] * _LAYERS])


def _link(copy_seconds: float) -> LinkSpeed:
    return LinkSpeed(_BYTES / copy_seconds, _BYTES / copy_seconds)


def _play(
    actions: Sequence[Action], copy_seconds: float, window: Window, steps: int, *, is_planned: bool = True
) -> tuple[ClockLink, StepReport, float]:
    """Run steps; return the link's account and the engine's of the last one, and when that began."""
    link = ClockLink(_BYTES / copy_seconds)
    engine = engine_on(link, horizon=window.horizon, lead=window.lead or "auto")
    for _ in range(steps):
        began = link.seconds
        link.outs, link.loads = [], []
        run_actions(engine, link, actions, _LAYERS, is_planned=is_planned)
        report = engine.end_step()
    return link, report, began


def _planned(copies: Sequence[Copy]) -> list[Any]:
    values = [value_of(copy.task.action.microbatch, copy.task.layer) for copy in copies]
    planned = [(value, copy.start_seconds, copy.end_seconds) for value, copy in zip(values, copies, strict=True)]
    return [pytest.approx(copy) for copy in planned]


def _assert_as_planned(actions: Sequence[Action], copy_seconds: float, window: Window, *, is_planned: bool) -> None:
    link, report, began = _play(actions, copy_seconds, window, steps=3, is_planned=is_planned)
    timeline = simulate_offload(_tasks(actions), _link(copy_seconds), window, rules=Rules(is_planned))
    for executed, planned in ((link.outs, timeline.outs), (link.loads, timeline.loads)):
        assert [(value, start - began, end - began) for value, start, end in executed] == _planned(planned)
    assert link.seconds - began == timeline.makespan_seconds
    assert report.stall_seconds == timeline.stall_seconds
    assert (report.bytes_out, report.bytes_back) == (timeline.out_bytes, timeline.back_bytes)
    assert (report.peak_device_bytes, report.peak_host_bytes) == (timeline.peak_bytes, timeline.host_peak_bytes)


@pytest.mark.parametrize("copy_seconds", [0.125, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("window", [Window(1), Window(2), Window(4, 2), Window(8, 1), Window(16, 4)], ids=str)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 6)])
def test_engine_follows_the_plan(num_ranks: int, num_microbatches: int, window: Window, copy_seconds: float) -> None:
    actions = one_f_one_b(num_ranks, num_microbatches).actions[0]
    _assert_as_planned(actions, copy_seconds, window, is_planned=True)


@pytest.mark.parametrize("copy_seconds", [0.125, 1.5, 4.0])
@pytest.mark.parametrize("lead", [1, 2, 9])
def test_engine_without_a_pipeline_does_what_is_planned_for_it(lead: int, copy_seconds: float) -> None:
    _assert_as_planned(one_f_one_b(1, 3).actions[0], copy_seconds, Window(lead), is_planned=False)


@pytest.mark.parametrize("window", [Window(1), Window(2), Window(3), Window(4, 2), Window(8, 1)], ids=str)
def test_what_the_last_stage_needs_within_the_lead_stays(window: Window) -> None:
    _assert_as_planned(one_f_one_b(2, 3).actions[1], 0.125, window, is_planned=True)


@pytest.mark.parametrize("copy_seconds", [0.125, 1.0, 1.5, 2.5])
def test_engine_learns_the_lead_that_the_plan_predicts(copy_seconds: float) -> None:
    actions = one_f_one_b(4, 6).actions[0]
    _, report, _ = _play(actions, copy_seconds, Window(), steps=6)
    window = auto_window(_tasks(actions), _link(copy_seconds))
    assert (report.lead, report.stall_seconds) == (window.lead, 0.0)
