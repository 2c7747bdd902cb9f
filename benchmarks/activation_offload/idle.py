"""How long a GPU's copy engines stand still although copies could run, from a trace of the profiler.

A copy is *ready* when the host has asked for it and the work that was launched on the device before has ended: what
leaves must have been computed, and what comes goes into memory that this work may still use::

    compute   ▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒
    out                 ·██████   ·██████        · ready, and the engine does nothing; █ it copies
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Idle", "Lane", "idle_of", "length", "union"]

Interval = tuple[float, float]


@dataclass(frozen=True)
class Lane:
    """The copies of one direction; microseconds."""

    copies: int
    busy: float
    """While one runs."""
    idle: float
    """While one is ready and none runs."""


@dataclass(frozen=True)
class Idle:
    """What the copy engines do in a profiled piece of work."""

    out: Lane
    back: Lane
    span: float
    """From the first to the last that the device does; microseconds."""

    @property
    def share(self) -> float:
        """The part of the work in which an engine does nothing although a copy is ready; the worse direction's."""
        return max(self.out.idle, self.back.idle) / self.span


def idle_of(work: Callable[[], object]) -> Idle:
    """Profile a piece of work on a GPU until that is idle."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="smpkit-trace.") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return idle_in([event for event in events if event.get("ph") == "X"])


def idle_in(events: list[dict[str, Any]]) -> Idle:
    """Return what a trace says: the requests of the host and the work of the device, each with its `correlation`."""

    def of(*categories: str) -> Iterable[tuple[str, int, Interval]]:
        for event in (event for event in events if event.get("cat") in categories):
            yield event["name"], event["args"].get("correlation", 0), (event["ts"], event["ts"] + event["dur"])

    asked = {request: interval for _, request, interval in of("cuda_runtime", "cuda_driver")}
    device = list(of("kernel", "gpu_memcpy", "gpu_memset"))
    is_copy = [name.startswith("Memcpy") and ("DtoH" in name or "HtoD" in name) for name, *_ in device]
    work = [entry for entry, copies in zip(device, is_copy, strict=True) if not copies]
    launches = sorted((asked[request][0], end) for _, request, (_, end) in work if request in asked)
    launched, ended = [at for at, _ in launches], list(accumulate((end for _, end in launches), max))

    def lane(kind: str) -> Lane:
        copies = [(asked[request], interval) for name, request, interval in device if kind in name]
        pending = []
        for (began, returned), (begin, end) in copies:
            before = bisect_left(launched, began)
            ready = max(returned, ended[before - 1] if before else returned)
            pending.append((min(begin, ready), end))
        busy = length(union(interval for _, interval in copies))
        return Lane(len(copies), busy, length(union(pending)) - busy)

    intervals = [interval for *_, interval in device]
    return Idle(lane("DtoH"), lane("HtoD"), max(end for _, end in intervals) - min(begin for begin, _ in intervals))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same."""
    disjoint: list[Interval] = []
    for begin, end in sorted(intervals):
        if disjoint and begin <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], end))
        else:
            disjoint.append((begin, end))
    return disjoint


def length(intervals: Iterable[Interval]) -> float:
    """Return how long intervals are together."""
    return sum(end - begin for begin, end in intervals)
