"""What activation offloading will do on each rank of a pipeline: memory with and without it, traffic, stalls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from smpkit.plan.offload.simulate import ON_A_GPU, ON_A_GPU_ALONE, OffloadTimeline, Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.partition.assignment import UnitCost
from smpkit.plan.schedule.graph import Kind, Segment
from smpkit.plan.schedule.simulate import Timeline
from smpkit.plan.speed import Speed

_WORTH: Final = 1e-3
"""A longer horizon must save this share of the step to be advised."""


@dataclass(frozen=True)
class Forecast:
    """What offloading does on one rank in one step."""

    resident_bytes: int
    """The most that boundaries occupy on the device without offloading."""
    device_bytes: int
    """The most with it."""
    host_bytes: int
    out_bytes: int
    back_bytes: int
    lead: int
    """How many layers ahead loads are issued."""
    step_seconds: float
    stall_seconds: float
    """How long compute waits for copies."""
    sufficient_horizon: int
    """The smallest `activation_loading_horizon` that stalls no longer than any larger one."""
    needed_bytes_per_second: float
    """How fast the link out must be for no copy to take longer than the forward of its layer."""


def forecast(
    timeline: Timeline,
    runs: Mapping[Segment, Sequence[UnitCost]],
    horizon: int | Literal["auto"],
    speed: Speed,
) -> tuple[Forecast, ...]:
    """Return a forecast for each rank.

    Waits between ranks are those of `timeline`; that a stall of one rank can make other ranks wait is left out.

    Args:
        timeline: the schedule, simulated with costs in seconds.
        runs: the units of each segment, which are its layers.
        horizon: `activation_loading_horizon`.
    """
    rules = ON_A_GPU if len(timeline.spans) > 1 else ON_A_GPU_ALONE
    counts, forecasts = timeline.schedule.graph.counts, []
    for rank, actions in enumerate(timeline.schedule.actions):
        segments = [runs[Segment(rank, index)] for index in range(counts[rank])]
        tasks = layer_tasks(actions, [[_layer_cost(unit, speed) for unit in units] for units in segments])
        starts = [span.start_seconds for span in timeline.spans[rank]]
        forecasts.append(_forecast(tasks, starts, None if horizon == "auto" else horizon, speed.link, rules))
    return tuple(forecasts)


def _layer_cost(cost: UnitCost, speed: Speed) -> LayerCost:
    """Return what a unit costs as a layer; its backward takes twice a forward."""
    forward = speed.forward_seconds(cost)
    return LayerCost(forward, 2 * forward, cost.boundary_bytes, forward * cost.recomputed_share)


def _forecast(
    tasks: Sequence[LayerTask], starts: Sequence[float], horizon: int | None, link: LinkSpeed, rules: Rules
) -> Forecast:
    lead = auto_window(tasks, link).lead or 1

    def simulated(horizon: int | None) -> OffloadTimeline:
        return simulate_offload(tasks, link, Window(lead, horizon), starts, rules)

    timeline = simulated(horizon)
    longest = max(1, len(starts))
    allowed = simulated(longest).stall_seconds + _WORTH * timeline.makespan_seconds
    shorter = range(1, longest)
    return Forecast(
        resident_bytes=simulate_offload(tasks, link, Window()).peak_bytes,  # in this window all of them stay
        device_bytes=timeline.peak_bytes,
        host_bytes=timeline.host_peak_bytes,
        out_bytes=timeline.out_bytes,
        back_bytes=timeline.back_bytes,
        lead=lead,
        step_seconds=timeline.makespan_seconds,
        stall_seconds=timeline.stall_seconds,
        sufficient_horizon=next((bound for bound in shorter if simulated(bound).stall_seconds <= allowed), longest),
        needed_bytes_per_second=max((_hiding_rate(task, link) for task in tasks), default=0.0),
    )


def _hiding_rate(task: LayerTask, link: LinkSpeed) -> float:
    """Return how fast the link out must be to hide the copy of a forward's input."""
    if task.action.kind is not Kind.FORWARD or not task.num_bytes:
        return 0.0
    left = task.seconds - link.latency_seconds
    return task.num_bytes / left if left > 0 else inf
