"""Closed formulas of boundary offloading: what bounds the time of a step and the memory of its boundaries.

They say in one line what the simulator plays; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil

from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, needs_back
from smpkit.plan.schedule.graph import Kind

__all__ = ["backlog_boundaries", "offloaded", "peak_bound_bytes", "resident_bytes", "step_bound_seconds"]


def backlog_boundaries(num_warm_up: int, layer: LayerCost, link: LinkSpeed) -> int:
    """Return how many boundaries wait for the link after as many forwards in a row, rounded up."""
    return ceil(num_warm_up * max(0.0, 1 - layer.forward_seconds / link.out_seconds(layer.boundary_bytes)))


def peak_bound_bytes(
    boundary_bytes: int, num_layers: int, live_microbatches: int, window: Window, backlog: int = 0, ring: int = 1
) -> int:
    """Return what boundaries of equal layers occupy on the device at most.

    All of them are `layers * live microbatches`; a window of h layers needs h, the one in use and the one that leaves,
    one of H actions `layers * (H + 1)` and the one of the present forward; what waits for the link comes on top.

    Args:
        num_layers: of one microbatch on this rank.
        backlog: from `backlog_boundaries`.
        ring: how many of the latest are not given back; 2 where the host cannot know when a copy has ended.
    """
    bounds = [num_layers * live_microbatches]
    if window.lead is not None:
        bounds.append(window.lead + 1 + ring + backlog)
    if window.horizon is not None:
        bounds.append(num_layers * (window.horizon + 1) + 1 + backlog)
    return boundary_bytes * min(bounds)


def resident_bytes(work: Sequence[LayerTask]) -> int:
    """Return the most bytes of boundaries at a time if all of them stay on the device."""
    return max(accumulate(task.num_bytes if task.action.kind is Kind.FORWARD else -task.num_bytes for task in work))


def offloaded(work: Sequence[LayerTask], window: Window) -> list[LayerTask]:
    """Return the forwards whose boundaries leave the device: their backwards are beyond the window."""
    needs = {task.boundary: task for task in work if needs_back(task)}
    forwards = [task for task in work if task.action.kind is Kind.FORWARD and task.boundary in needs]
    return [task for task in forwards if not window.reaches(task, needs[task.boundary])]


def step_bound_seconds(work: Sequence[LayerTask], link: LinkSpeed, window: Window) -> float:
    """Return what no step can be faster than in which all that leaves comes back: the compute, or either direction."""
    sizes = [task.num_bytes for task in offloaded(work, window)]
    return max(
        sum(task.seconds for task in work), sum(map(link.out_seconds, sizes)), sum(map(link.back_seconds, sizes))
    )
