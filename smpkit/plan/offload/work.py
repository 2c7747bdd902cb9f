"""What offloading is planned from: the layers' costs, the link, the window of loading, and one rank's layer tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from smpkit.errors import UsageError
from smpkit.plan.offload.lead import auto_lead
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind

__all__ = ["LayerCost", "LayerTask", "LinkSpeed", "Window", "auto_window", "layer_tasks", "needs_back"]


@dataclass(frozen=True)
class LayerCost:
    """What one checkpointed layer costs for one microbatch; times in seconds, or in any other unit if it is one."""

    forward_seconds: float
    backward_seconds: float
    """Without the recomputation."""
    boundary_bytes: int
    """What stays of it for the backward: its input. 0: the layer keeps nothing that can be offloaded."""
    recompute_seconds: float = 0.0
    weight_seconds: float = 0.0
    """The part of the backward that WEIGHT actions take over where it is split."""

    def seconds(self, kind: Kind, split_backward: bool = False) -> float:
        """Return what an action spends on this layer."""
        if kind is Kind.FORWARD:
            return self.forward_seconds
        if kind is Kind.WEIGHT:
            return self.weight_seconds
        backward = self.recompute_seconds + self.backward_seconds
        return backward - self.weight_seconds if split_backward else backward


@dataclass(frozen=True)
class LinkSpeed:
    """How fast a device and its host copy."""

    out_bytes_per_second: float
    back_bytes_per_second: float
    both_bytes_per_second: float | None = None
    """Both directions together while both copy; None: neither slows the other."""
    latency_seconds: float = 0.0
    """How long each copy keeps its stream busy before its first byte."""

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            if rate is not None and (rate < 0 or (rate == 0 and name != "latency_seconds")):
                raise UsageError(f"`{name}` of the link is {rate}", hint="give what was measured, more than 0")

    @property
    def slowdown(self) -> float:
        """The share of its speed that each direction keeps while both copy."""
        if self.both_bytes_per_second is None:
            return 1.0
        return min(1.0, self.both_bytes_per_second / (self.out_bytes_per_second + self.back_bytes_per_second))

    def back_seconds(self, num_bytes: int) -> float:
        """Return how long a load occupies its stream when the other one is idle."""
        return self.latency_seconds + num_bytes / self.back_bytes_per_second if num_bytes else 0.0


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
    """Of the boundary that a forward makes and a backward needs; 0 for neither."""

    def __str__(self) -> str:
        return f"{self.action} layer {self.layer}"

    @property
    def boundary(self) -> tuple[int, int, int]:
        """Which boundary it is: its segment, microbatch and layer."""
        return self.action.segment, self.action.microbatch, self.layer


def layer_tasks(actions: Sequence[Action], layers: Sequence[Sequence[LayerCost]]) -> tuple[LayerTask, ...]:
    """Return the layer tasks of one rank in order: forwards go up through the layers of their segment, the others down.

    Args:
        actions: the rank's list of a schedule.
        layers: for each of the rank's segments its layers.
    """
    splits = any(action.kind is Kind.WEIGHT for action in actions)
    found: list[LayerTask] = []
    for task, action in enumerate(actions):
        costs = list(enumerate(layers[action.segment]))
        for layer, cost in costs if action.kind is Kind.FORWARD else reversed(costs):
            num_bytes = 0 if action.kind is Kind.WEIGHT else cost.boundary_bytes
            found.append(LayerTask(len(found), task, action, layer, cost.seconds(action.kind, splits), num_bytes))
    return tuple(found)


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

    def __post_init__(self) -> None:
        for name, bound in (("lead", self.lead), ("horizon", self.horizon)):
            if bound is not None and bound < 1:
                raise UsageError(f"a {name} of {bound} loads nothing", hint="use 1 or more")

    def reaches(self, now: LayerTask, need: LayerTask, before: int = 0) -> bool:
        """Return whether what `need` reads may be on the device once `now` begins, or `before` layer tasks earlier."""
        near = self.lead is None or need.index - now.index + before <= self.lead
        return near and (self.horizon is None or need.action_index - now.action_index <= self.horizon)


_UNBOUNDED: Final = Window()


def auto_window(tasks: Sequence[LayerTask], link: LinkSpeed, bound: Window = _UNBOUNDED) -> Window:
    """Return the smallest window in which no load is late by itself, within `bound`."""
    loads = [link.back_seconds(each.num_bytes) if needs_back(each) else 0.0 for each in tasks]
    return Window(auto_lead([each.seconds for each in tasks], loads, bound.lead), bound.horizon)
