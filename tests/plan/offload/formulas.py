"""Closed formulas of boundary offloading: what bounds the time of a step and the memory of its boundaries.

They say in one line what the simulator plays; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from smpkit.plan.offload.work import LayerCost, LayerTask, LinkSpeed, Window, needs_back
from smpkit.plan.schedule.graph import Kind

__all__ = ["backlog_boundaries", "headroom", "offloaded_bytes", "peak_bound_bytes", "step_bound_seconds"]


def headroom(layer: LayerCost, link: LinkSpeed) -> float:
    """Return how many times a boundary could be copied out during the layer's forward.

    From 1 on nothing piles up. For a dense block of width d, 12.25 d² parameters, a link of B bytes/s and R FLOP/s it
    is `12.25 * B * d / R`.
    """
    copy = link.latency_seconds + layer.boundary_bytes / (link.out_bytes_per_second * link.slowdown)
    return layer.forward_seconds / copy


def backlog_boundaries(num_warm_up: int, layer: LayerCost, link: LinkSpeed) -> int:
    """Return how many boundaries wait for the link after as many forwards in a row, rounded up."""
    return ceil(num_warm_up * max(0.0, 1 - headroom(layer, link)))


def peak_bound_bytes(
    boundary_bytes: int, num_layers: int, live_microbatches: int, window: Window, backlog: int = 0, ring: int = 1
) -> int:
    """Return what boundaries of equal layers occupy on the device at most.

    All of them are `layers * live microbatches`; a window of h layers needs h, the one in use and the one that leaves,
    one of H actions `layers * (H + 1)` and the one being made; what waits for the link comes on top.

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


def offloaded_bytes(work: Sequence[LayerTask], window: Window) -> int:
    """Return what leaves the device in a step, and comes back: boundaries whose backward is beyond the window."""
    return sum(each.num_bytes for each in _offloaded(work, window))


def step_bound_seconds(work: Sequence[LayerTask], link: LinkSpeed, window: Window, slowdown: float = 0.0) -> float:
    """Return what no step can be faster than: the compute, either direction, or both together.

    Args:
        slowdown: the share by which copies that run beside it slow compute; 0.03 is 3 %.
    """
    offloaded = _offloaded(work, window)
    latency, num_bytes = link.latency_seconds * len(offloaded), sum(each.num_bytes for each in offloaded)
    bounds = [
        sum(each.seconds for each in work) * (1 + slowdown),
        latency + num_bytes / link.out_bytes_per_second,
        latency + num_bytes / link.back_bytes_per_second,
    ]
    if link.both_bytes_per_second is not None:
        bounds.append(2 * num_bytes / link.both_bytes_per_second)
    return max(bounds)


def _offloaded(work: Sequence[LayerTask], window: Window) -> list[LayerTask]:
    needs = {each.boundary: each for each in work if needs_back(each)}
    made = [each for each in work if each.action.kind is Kind.FORWARD and each.boundary in needs]
    return [each for each in made if not window.reaches(each, needs[each.boundary])]
