"""The engine does what the simulator says: the same copies in the same order at the same times, bytes and peaks."""

from __future__ import annotations

import pytest

from smpkit.plan.offload.simulate import OffloadTimeline, simulate_offload
from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.prefetch import BackwardOrder
from smpkit.torch.offload.report import StepReport
from tests.torch.offload.clock import ClockLink, CopyMade, run_actions

_ELEMENTS = 64
_BYTES = 4 * _ELEMENTS
_LAYERS = 3


def _play(actions: tuple[Action, ...], copy_seconds: float, window: Window) -> tuple[ClockLink, StepReport, float]:
    """Run three steps; return the link's account and the engine's of the last one, and when that began."""
    link = ClockLink(_BYTES / copy_seconds)
    engine = ActivationEngine(link, Arena(), BackwardOrder(window.horizon), lead=window.lead or "auto")
    for _ in range(3):
        began = link.seconds
        link.outs, link.loads, link.stalls = [], [], []
        gradients = run_actions(engine, link, actions, _LAYERS, _ELEMENTS)
        assert all(float(each[0]) == 2.0**_LAYERS for each in gradients.values())
        del gradients
        report = engine.end_step()
    return link, report, began


def _made(copies: list[CopyMade], began: float) -> list[tuple[str, float, float]]:
    return [(each.what, each.start_seconds - began, each.end_seconds - began) for each in copies]


def _planned(timeline: OffloadTimeline, *, out: bool) -> list[tuple[str, float, float]]:
    copies = timeline.outs if out else timeline.loads
    return [(_named(each.task), each.start_seconds, each.end_seconds) for each in copies]


def _named(work: LayerTask) -> str:
    return f"`layer {work.layer}` (microbatch {work.action.microbatch})"


@pytest.mark.parametrize("copy_seconds", [0.125, 0.75, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("window", [Window(1), Window(2), Window(4, 2), Window(8, 1), Window(16, 4)], ids=str)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 6)])
def test_engine_follows_the_plan(num_ranks: int, num_microbatches: int, window: Window, copy_seconds: float) -> None:
    actions = one_f_one_b(num_ranks, num_microbatches).actions[0]
    link, report, began = _play(actions, copy_seconds, window)
    work = layer_tasks(actions, [[LayerCost(1.0, 2.0, _BYTES, recompute_seconds=1.0)] * _LAYERS])
    timeline = simulate_offload(work, LinkSpeed(_BYTES / copy_seconds, _BYTES / copy_seconds), window)
    assert _made(link.outs, began) == _planned(timeline, out=True)
    assert _made(link.loads, began) == _planned(timeline, out=False)
    assert link.seconds - began == timeline.makespan_seconds
    assert report.stall_seconds == timeline.stall_seconds
    assert (report.bytes_out, report.bytes_back) == (timeline.out_bytes, timeline.back_bytes)
    assert (report.peak_device_bytes, report.peak_host_bytes) == (timeline.peak_bytes, timeline.host_peak_bytes)


@pytest.mark.parametrize("copy_seconds", [0.125, 1.0, 1.5, 2.5])
def test_engine_learns_the_lead_that_the_plan_predicts(copy_seconds: float) -> None:
    actions = one_f_one_b(4, 6).actions[0]
    link = ClockLink(_BYTES / copy_seconds)
    engine = ActivationEngine(link, Arena(), BackwardOrder())
    for _ in range(6):
        run_actions(engine, link, actions, _LAYERS, _ELEMENTS)
        report = engine.end_step()
    work = layer_tasks(actions, [[LayerCost(1.0, 2.0, _BYTES, recompute_seconds=1.0)] * _LAYERS])
    window = auto_window(work, LinkSpeed(_BYTES / copy_seconds, _BYTES / copy_seconds))
    assert (report.lead, report.stall_seconds) == (window.lead, 0.0)
