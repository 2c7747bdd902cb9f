"""What activation offloading will do on each rank of a pipeline: memory with and without it, traffic, stalls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import comb, inf
from typing import Final, Literal

from smpkit.plan.memory import ModelFacts
from smpkit.plan.offload.simulate import (
    ON_A_GPU,
    ON_A_GPU_ALONE,
    OffloadTimeline,
    peak_without_offloading,
    simulate_offload,
)
from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.simulate import Timeline

__all__ = ["Forecast", "Speed", "forecast", "layers_of"]

_MOST_LEAD: Final = 16
"""How many layers ahead the engine loads at most."""
_MOST_SHARING: Final = 256
"""Of more ranks on a host than that, the mean says how many want a core."""
_WORTH: Final = 1e-3
"""A longer horizon must save this share of the step to be advised."""


@dataclass(frozen=True)
class Speed:
    """What the devices reach, from which seconds are made."""

    flops_per_second: float
    link: LinkSpeed
    message_latency_seconds: float = 0.0
    """Of a message between stages."""
    message_seconds_per_byte: float = 0.0
    action_seconds: float = 0.0
    """What the runtime itself adds to each action."""
    collective_seconds: Mapping[str, float] = field(default_factory=dict)
    """What ranks of a tensor-parallel group spend on collectives in the forward of a unit, by name, and again in its
    backward."""
    operation_seconds: float = 0.0
    """What the host spends on an operator."""
    moved_bytes_per_second: float = inf
    """What the device reads and writes where it computes no products."""
    is_asynchronous: bool = True
    """The host runs ahead of the device: the longer of both counts."""
    on_cores: bool = False
    """The device is the host's cores."""
    cores: float = inf
    """Of a host."""
    ranks: int = 1
    """Of a host, which share its cores."""
    split_seconds: float = 0.0
    """What a backward in two halves costs the host more, for each product with a weight."""

    def forward_seconds(self, unit: UnitCost) -> float:
        """Return how long the forward of a unit takes, for a rank with a core of its own."""
        device, host = self._device_seconds(unit), unit.operations * self.operation_seconds
        return max(device, host) if self.is_asynchronous else device + host

    def seconds_of_split(self, unit: UnitCost) -> float:
        """Return how much longer the backward of a unit takes in two halves than in one."""
        more = unit.weight_products * self.split_seconds
        if not self.is_asynchronous:
            return more
        device, host = 2 * self._device_seconds(unit), 2 * unit.operations * self.operation_seconds
        return max(device, host + more) - max(device, host)

    def core_seconds(self, unit: UnitCost) -> float:
        """Return for how much of it a core is busy."""
        host = unit.operations * self.operation_seconds
        return host + self._device_seconds(unit) if self.on_cores else host

    def _device_seconds(self, unit: UnitCost) -> float:
        return unit.flops / self.flops_per_second + unit.moved_bytes / self.moved_bytes_per_second

    def slowdown(self, busy: float) -> float:
        """Return how much longer a rank's work on its core takes because other ranks want cores too.

        Args:
            busy: the share of the time in which a rank wants one, 0 to 1. When others do is taken as independent.
        """
        others = self.ranks - 1
        if self.ranks <= self.cores or others > _MOST_SHARING:
            return max(1.0, self.ranks * busy / self.cores)
        return sum(
            comb(others, count) * busy**count * (1 - busy) ** (others - count) * max(1.0, (count + 1) / self.cores)
            for count in range(others + 1)
        )


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
    model: ModelFacts,
    assignment: Assignment,
    timeline: Timeline,
    horizon: int | Literal["auto"],
    speed: Speed,
) -> tuple[Forecast, ...]:
    """Return a forecast for each rank.

    Waits between ranks are those of `timeline`; that a stall of one rank can make other ranks wait is left out.

    Args:
        timeline: the schedule, simulated with costs in seconds.
        horizon: `activation_loading_horizon`.
    """
    found = []
    for rank, actions in enumerate(timeline.schedule.actions):
        tasks = layer_tasks(actions, layers_of(model, assignment, timeline, rank, speed))
        ready = [span.start_seconds for span in timeline.spans[rank]]
        bound = None if horizon == "auto" else horizon
        found.append(_forecast(tasks, ready, bound, speed.link, len(timeline.spans)))
    return tuple(found)


def layers_of(
    model: ModelFacts, assignment: Assignment, timeline: Timeline, rank: int, speed: Speed
) -> list[list[LayerCost]]:
    """Return the layers of each segment of a rank: its units, a backward taking twice a forward."""
    count = sum(segment.rank == rank for segment in timeline.schedule.graph.segments)
    runs = list(_runs(assignment, rank))
    if len(runs) != count:
        # The plan was made for a graph in which nothing returns to a rank: its first segment stands for all runs.
        runs = [list(chain.from_iterable(runs))] + [[] for _ in range(count - 1)]
    costs = {unit.cost.name: unit.cost for unit in model.units}
    return [[_layer_cost(costs[name], speed) for name in run] for run in runs]


def _layer_cost(cost: UnitCost, speed: Speed) -> LayerCost:
    forward = speed.forward_seconds(cost)
    return LayerCost(forward, 2 * forward, cost.boundary_bytes, forward * cost.recomputed_share)


def _runs(assignment: Assignment, rank: int) -> Iterator[list[str]]:
    """Yield the units of a rank in parts that follow each other without another rank between."""
    run: list[str] = []
    for name, place in assignment.units:
        if place == rank:
            run.append(name)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _forecast(
    tasks: Sequence[LayerTask], ready: Sequence[float], horizon: int | None, link: LinkSpeed, num_ranks: int
) -> Forecast:
    found = _simulated(tasks, ready, horizon, link, num_ranks)
    longest = max(1, len(ready))
    best = _simulated(tasks, ready, longest, link, num_ranks).stall_seconds
    allowed = best + _WORTH * found.makespan_seconds
    sufficient = 1
    while sufficient < longest and _simulated(tasks, ready, sufficient, link, num_ranks).stall_seconds > allowed:
        sufficient += 1
    leaving = [each for each in tasks if each.action.kind is Kind.FORWARD and each.num_bytes]
    return Forecast(
        resident_bytes=peak_without_offloading(tasks),
        device_bytes=found.peak_bytes,
        host_bytes=found.host_peak_bytes,
        out_bytes=found.out_bytes,
        back_bytes=found.back_bytes,
        lead=auto_window(tasks, link, Window(_MOST_LEAD)).lead or 1,
        step_seconds=found.makespan_seconds,
        stall_seconds=found.stall_seconds,
        sufficient_horizon=sufficient,
        needed_bytes_per_second=max((_rate(each, link) for each in leaving), default=0.0),
    )


def _rate(forward: LayerTask, link: LinkSpeed) -> float:
    left = forward.seconds - link.latency_seconds
    return forward.num_bytes / left if left > 0 else inf


def _simulated(
    tasks: Sequence[LayerTask], ready: Sequence[float], horizon: int | None, link: LinkSpeed, num_ranks: int
) -> OffloadTimeline:
    """Simulate the engine as it runs on a GPU."""
    window = auto_window(tasks, link, Window(_MOST_LEAD, horizon))
    return simulate_offload(tasks, link, window, ready, ON_A_GPU if num_ranks > 1 else ON_A_GPU_ALONE)
