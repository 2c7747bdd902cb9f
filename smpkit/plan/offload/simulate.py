"""One rank's step with boundaries that leave the device and come back: compute and two copy streams, in one pass.

Compute has a fixed order and each copy stream is first in, first out, so each time follows from earlier ones. As in
the engine of `smpkit.torch.offload`, a boundary leaves when the forward begins whose input it is, unless its backward
is already within the window. Its load is issued, and takes memory, when the layer task begins from which the window
reaches it; what is still on the device then stays there. Device memory that was copied out is given back when the next
layer begins (but see `Rules.ring`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final, Literal

from smpkit.plan.offload.work import (
    Boundary,
    LayerCost,
    LayerTask,
    LinkSpeed,
    Window,
    auto_window,
    layer_tasks,
    needs_back,
)
from smpkit.plan.partition.assignment import UnitCost
from smpkit.plan.schedule.graph import Kind, Segment
from smpkit.plan.schedule.simulate import Timeline
from smpkit.plan.speed import Speed


@dataclass(frozen=True)
class Rules:
    """How the engine works, which depends on where it runs."""

    is_planned: bool = True
    """The actions are known beforehand. Otherwise loads begin with the backward, and the latest boundaries, as many as
    the window leads, are copied but held, because the backward could begin any time."""
    ring: int | None = None
    """The host runs ahead of the device, so it cannot know when a copy has ended: all boundaries that leave but the
    latest so many are given back, and compute waits for their copies. None: each is given back once it is copied."""


_ENGINE: Final = Rules()
ON_A_GPU: Final = Rules(ring=2)
"""The engine on a device that runs behind the host, in a pipeline."""
ON_A_GPU_ALONE: Final = Rules(is_planned=False, ring=2)
"""The same without a pipeline: there is no list of actions to plan from."""


@dataclass(frozen=True)
class Copy:
    """A boundary on its way out, in the forward of its layer, or back, for the backward."""

    task: LayerTask
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class OffloadTimeline:
    """One rank's step in time."""

    start_seconds: tuple[float, ...]
    """When each layer task begins."""
    makespan_seconds: float
    """When the last one ends."""
    stall_seconds: float
    """How long compute waits for copies."""
    outs: tuple[Copy, ...]
    loads: tuple[Copy, ...]
    peak_bytes: int
    """The most that boundaries occupy on the device at a time."""
    host_peak_bytes: int
    """The most that they occupy on the host, until the end of their backward."""

    @property
    def out_bytes(self) -> int:
        """What leaves the device."""
        return sum(copy.task.num_bytes for copy in self.outs)

    @property
    def back_bytes(self) -> int:
        """What comes back: less than what leaves if some of it was needed before it was gone."""
        return sum(copy.task.num_bytes for copy in self.loads)


def simulate_offload(  # noqa: PLR0915 - one pass over the tasks, and all of the state is here
    tasks: Sequence[LayerTask],
    link: LinkSpeed,
    window: Window,
    not_before_seconds: Sequence[float] = (),
    rules: Rules = _ENGINE,
) -> OffloadTimeline:
    """Simulate one rank.

    Args:
        tasks: from `layer_tasks`.
        not_before_seconds: for each action, when what it needs from other ranks is there; empty: at once.
    """
    backwards = {task.boundary: task for task in tasks if needs_back(task)}
    to_load = deque(backwards.values())
    leaving: dict[Boundary, int] = {}  # boundaries that leave and still occupy the device: the number of their forward
    on_host: dict[Boundary, float] = {}  # when their copy out ends
    on_device: dict[Boundary, float] = {}  # when their backward can read them
    outs: list[Copy] = []
    loads: list[Copy] = []
    device, host = [0], [0]  # changes of what boundaries occupy, in the order of compute
    starts: list[float] = []
    now = stall = 0.0
    num_forwards = 0
    num_held = max(0 if rules.is_planned else window.lead or 0, rules.ring or 0)

    def load(issue_seconds: float, before: int = 0) -> None:
        """Issue the loads that the window reaches `before` layer tasks before the present one begins."""
        while to_load and window.reaches(task, to_load[0], before):
            need = to_load[0]
            if leaving.pop(need.boundary, None):
                on_device[need.boundary] = issue_seconds
            elif need.boundary in on_host:  # Given back, so its copy out is over by then.
                on_device[need.boundary] = _copy(loads, need, issue_seconds, link.back_seconds(need.num_bytes))
                device.append(need.num_bytes)
            elif need.boundary not in on_device and not rules.is_planned:
                return  # Its forward is still to come; with a plan, its backward is so soon after that it stays.
            to_load.popleft()

    for task in tasks:
        turn = max(now, not_before_seconds[task.action_index]) if not_before_seconds else now
        if rules.is_planned and (task.index == 0 or tasks[task.index - 1].action_index != task.action_index):
            load(now, before=1)  # As the engine does when an action begins, before its first layer gives memory back.

        # Give memory back, in order; compute waits until the last of its copies is over.
        is_needed = task.action.kind is Kind.FORWARD and task.boundary in backwards
        num_forwards += is_needed
        copied = now
        for boundary, number in [*leaving.items()]:
            if number > num_forwards - num_held or (rules.ring is None and on_host[boundary] > now):
                break
            del leaving[boundary]
            device.append(-backwards[boundary].num_bytes)
            copied = max(copied, on_host[boundary])

        start = max(turn, copied)
        if rules.is_planned or needs_back(task):
            load(start if copied > now else now)  # Behind the copies that compute waits for, as streams have it.
        if needs_back(task):
            start = max(start, on_device[task.boundary])
            if rules.ring is not None:  # It gives its boundary back, so the copy out has to be over.
                start = max(start, on_host.get(task.boundary, 0.0))
        starts.append(start)
        stall += start - turn
        now = start + task.seconds

        if task.action.kind is Kind.FORWARD:
            device.append(task.num_bytes)
            if not is_needed:
                device.append(-task.num_bytes)
            elif rules.is_planned and window.reaches(task, backwards[task.boundary]):
                on_device[task.boundary] = start
            else:
                on_host[task.boundary] = _copy(outs, task, start, link.out_seconds(task.num_bytes))
                leaving[task.boundary] = num_forwards
                host.append(task.num_bytes)
        elif needs_back(task):
            device.append(-task.num_bytes)
            host.append(-task.num_bytes if task.boundary in on_host else 0)

    peaks = [max(accumulate(changes)) for changes in (device, host)]
    return OffloadTimeline(tuple(starts), now, stall, tuple(outs), tuple(loads), *peaks)


def _copy(copies: list[Copy], task: LayerTask, ready: float, seconds: float) -> float:
    """Copy a boundary that is ready then, after all earlier copies of the stream; return when it has arrived."""
    start = max(ready, copies[-1].end_seconds) if copies else ready
    copies.append(Copy(task, start, start + seconds))
    return start + seconds


# ---- what offloading will do on each rank of a pipeline: memory with and without it, traffic, stalls -----------------

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
