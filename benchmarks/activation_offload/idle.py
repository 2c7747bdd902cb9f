"""How long a GPU's copy engines stand still although copies could run, from a trace of the profiler.

A copy is *ready* when the host has asked for it and the work that was launched on the device before has ended: what
leaves must have been computed, and what comes goes into memory that this work may still use. From then on only the
engine can be late: it notes the event that the copy waits for, and starts::

    compute   ▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒
    out                 ·██████   ·██████        · ready, and the engine does nothing; █ it copies
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Idle", "Lane", "idle_in", "idle_of", "length", "trace_of", "union"]

Interval = tuple[float, float]

_LAUNCHES: Final = ("cuda_runtime", "cuda_driver")
_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_UNKNOWN: Final = 0  # CUPTI counts from 1


@dataclass(frozen=True)
class Lane:
    """The copies of one direction; microseconds."""

    copies: int
    busy: float
    """While one runs."""
    pending: float
    """While one runs or is ready."""

    @property
    def idle(self) -> float:
        """While one is ready and none runs."""
        return self.pending - self.busy


@dataclass(frozen=True)
class Idle:
    """What the copy engines do in a profiled piece of work."""

    out: Lane
    """To the host."""
    back: Lane
    span: float
    """From the first to the last that the device does; microseconds."""

    @property
    def share(self) -> float:
        """The part of the work in which an engine does nothing although a copy is ready; the worse direction's."""
        return max(self.out.idle, self.back.idle) / self.span if self.span else 0.0


def idle_of(work: Callable[[], object]) -> Idle:
    """Profile a piece of work until the device is idle."""
    return idle_in(trace_of(work))


def trace_of(work: Callable[[], object]) -> list[dict[str, Any]]:
    """Return what happens on the host, and on the GPU if there is one, until the device is idle: see `idle_in`."""
    activities = [ProfilerActivity.CPU]
    settle: Callable[[], object] = list
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        settle = torch.cuda.synchronize
    settle()
    with profile(activities=activities) as profiler:
        work()
        settle()
    with tempfile.TemporaryDirectory(prefix="smpkit-trace.") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return events


def idle_in(events: Iterable[Mapping[str, Any]]) -> Idle:
    """Return what a trace says.

    Args:
        events: of Chrome's trace format, as torch's profiler writes them: what the device does, and what the host asks
            for, with the `correlation` that both have in common.

    Raises:
        ValueError: the host's requests are not among them: without these nobody knows when a copy could have begun.
    """
    asked: dict[int, Interval] = {}
    done: list[tuple[str, int, Interval]] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        category, correlation = event.get("cat"), event.get("args", {}).get("correlation", _UNKNOWN)
        interval = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if category in _LAUNCHES and correlation != _UNKNOWN:
            asked[correlation] = interval
        elif category in _DEVICE:
            done.append((_kind_of(str(event["name"])), correlation, interval))
    copies = [each for each in done if each[0] != "work"]
    if copies and not any(correlation in asked for _, correlation, _ in copies):
        raise ValueError("the trace has copies, but not the calls that asked for them")
    work = sorted((asked[c][0], end) for kind, c, (_, end) in done if kind == "work" and c in asked)
    launched, ended = [at for at, _ in work], list(accumulate((end for _, end in work), max))
    lanes = {
        way: _lane([(asked.get(c), interval) for kind, c, interval in copies if kind == way], launched, ended)
        for way in ("out", "back")
    }
    span = max((end for *_, (_, end) in done), default=0.0) - min((begin for *_, (begin, _) in done), default=0.0)
    return Idle(lanes["out"], lanes["back"], span)


def _lane(copies: Sequence[tuple[Interval | None, Interval]], launched: list[float], ended: list[float]) -> Lane:
    """Return what a lane does.

    Args:
        copies: each with when it was asked for.
        launched: when work of the device was asked for, in order.
        ended: until when the work up to there took.
    """
    pending = []
    for asked, (begin, end) in copies:
        ready = begin
        if asked is not None:
            before = bisect_left(launched, asked[0])
            ready = min(begin, max(asked[1], ended[before - 1] if before else asked[1]))
        pending.append((ready, end))
    return Lane(len(copies), length(union(interval for _, interval in copies)), length(union(pending)))


def _kind_of(name: str) -> str:
    if name.startswith("Memcpy"):
        return "out" if "DtoH" in name else "back" if "HtoD" in name else "work"
    return "work"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return how long intervals are together."""
    return sum(end - begin for begin, end in intervals)
