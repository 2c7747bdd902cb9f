"""What offloading is planned from: layers' costs, the link, one rank's layer tasks, and how far ahead to load.

Boundaries are loaded back as late as compute still never waits, so that as few as possible are on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind

MAX_LEAD: Final = 16
"""How many layers ahead the engine loads at most."""

Boundary = tuple[int, int, int]
"""What a layer keeps of a microbatch for its backward: the segment, the microbatch and the layer."""


@dataclass(frozen=True)
class LayerCost:
    """What one checkpointed layer costs for one microbatch; times in seconds, or all of them in another unit."""

    forward_seconds: float
    backward_seconds: float
    """Without the recomputation."""
    boundary_bytes: int
    """What stays of it for the backward: its input. 0: the layer keeps nothing that can be offloaded."""
    recompute_seconds: float = 0.0

    def seconds(self, kind: Kind) -> float:
        """Return what an action spends on this layer: nothing in a WEIGHT action, its part is in the backward."""
        if kind is Kind.FORWARD:
            return self.forward_seconds
        return self.recompute_seconds + self.backward_seconds if kind is Kind.BACKWARD else 0.0


@dataclass(frozen=True)
class LinkSpeed:
    """How fast a device and its host copy, in both directions at once."""

    out_bytes_per_second: float
    back_bytes_per_second: float
    latency_seconds: float = 0.0
    """How long each copy keeps its stream busy before its first byte."""

    def out_seconds(self, num_bytes: int) -> float:
        """Return how long a copy to the host occupies its stream."""
        return self.latency_seconds + num_bytes / self.out_bytes_per_second

    def back_seconds(self, num_bytes: int) -> float:
        """Return how long a copy to the device occupies its stream."""
        return self.latency_seconds + num_bytes / self.back_bytes_per_second


@dataclass(frozen=True)
class LayerTask:
    """One layer's share of an action: what the compute stream does at a time."""

    index: int
    """Position in this rank's order."""
    action_index: int
    """Position of the action in this rank's list."""
    action: Action
    layer: int
    seconds: float
    num_bytes: int
    """The size of the boundary that a forward leaves for its backward; 0 for a WEIGHT action."""

    @property
    def boundary(self) -> Boundary:
        """The boundary that it leaves or needs."""
        return self.action.segment, self.action.microbatch, self.layer


def layer_tasks(actions: Sequence[Action], layers: Sequence[Sequence[LayerCost]]) -> tuple[LayerTask, ...]:
    """Return the layer tasks of one rank in order: forwards go up through the layers of their segment, the others down.

    Args:
        layers: for each of the rank's segments its layers.
    """
    tasks: list[LayerTask] = []
    for position, action in enumerate(actions):
        costs = list(enumerate(layers[action.segment]))
        for layer, cost in costs if action.kind is Kind.FORWARD else reversed(costs):
            num_bytes = 0 if action.kind is Kind.WEIGHT else cost.boundary_bytes
            tasks.append(LayerTask(len(tasks), position, action, layer, cost.seconds(action.kind), num_bytes))
    return tuple(tasks)


def needs_back(task: LayerTask) -> bool:
    """Return whether it is a backward that reads a boundary."""
    return task.action.kind is Kind.BACKWARD and task.num_bytes > 0


@dataclass(frozen=True)
class Window:
    """How far ahead of compute boundaries may be on the device; both bounds hold."""

    lead: int | None = None
    """In layer tasks, forwards and backwards alike; None: no bound."""
    horizon: int | None = None
    """In actions, as `activation_loading_horizon` counts; None: no bound."""

    def reaches(self, now: LayerTask, need: LayerTask, before: int = 0) -> bool:
        """Return whether what `need` reads may be on the device once `now` begins, or `before` layer tasks earlier."""
        near = self.lead is None or need.index - now.index + before <= self.lead
        return near and (self.horizon is None or need.action_index - now.action_index <= self.horizon)


def auto_window(tasks: Sequence[LayerTask], link: LinkSpeed, horizon: int | None = None) -> Window:
    """Return the window of the smallest lead with which no load is late by itself."""
    loads = [link.back_seconds(task.num_bytes) if needs_back(task) else 0.0 for task in tasks]
    return Window(auto_lead([task.seconds for task in tasks], loads), horizon)


def auto_lead(compute_seconds: Sequence[float], load_seconds: Sequence[float]) -> int:
    """Return how many pieces of work ahead of its use a load must be issued so that compute never waits.

    It is the smallest such number: with one less, some load is late. Where the link cannot keep up, it is what the
    whole list would need, up to `MAX_LEAD`.

    The device does the pieces in order, forwards and backwards of layers alike. Loads follow each other on one stream,
    in the order in which they are needed, so a slow one pushes those before it to an earlier time.

    Args:
        compute_seconds: how long each piece of work takes.
        load_seconds: how long the stream is busy with what each piece needs back, latency included; 0 for nothing.

    Example:
        A link twice as slow as a forward needs two forwards of time before the first backward, and a backward of three
        hides every later load:

        >>> auto_lead([1, 1, 1, 3, 3, 3], [0, 0, 0, 2, 2, 2])
        2
    """
    *starts, deadline = accumulate(compute_seconds, initial=0.0)
    lead, issue = 1, len(starts)
    for piece, (start, seconds) in reversed(list(enumerate(zip(starts, load_seconds, strict=True)))):
        if seconds:
            deadline = min(deadline, start) - seconds  # the latest time at which this load may begin
            issue = min(issue, piece)
            while issue > 0 and starts[issue] > deadline:
                issue -= 1
            lead = max(lead, piece - issue)
    return min(lead, MAX_LEAD)
