"""What is wrong with a Chrome trace: an oracle that shares no code with the one that writes it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

TraceEvent = dict[str, Any]


def trace_problems(text: str) -> list[str]:
    """Return what is wrong with a trace: spans that cross or are negative, arrows without an end or in the air."""
    events: list[TraceEvent] = json.loads(text)["traceEvents"]
    tracks: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    problems = [f"{event['name']}: a negative duration" for event in events if event.get("dur", 0) < 0]
    for place, spans in tracks.items():
        spans.sort(key=lambda span: (span[0], -span[1]))
        problems += [f"process {place[0]}, track {place[1]}: spans cross at {at}" for at in _crossings(spans)]
    return problems + list(_flow_problems(events, tracks)) + list(_unnamed(events, tracks))


_ROUNDING: Final = 1e-3
"""Microseconds by which the sum of two numbers may be off: half of what the clock tells."""


def _crossings(spans: Sequence[tuple[float, float]]) -> Iterator[float]:
    open_ends: list[float] = []
    for start, end in spans:
        while open_ends and open_ends[-1] <= start + _ROUNDING:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + _ROUNDING:
            yield start
        open_ends.append(end)


def _flow_problems(
    events: Sequence[TraceEvent], tracks: dict[tuple[int, int], list[tuple[float, float]]]
) -> Iterator[str]:
    phases: defaultdict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            phases[event["id"]].append(event["ph"])
            spans = tracks.get((event["pid"], event["tid"]), [])
            last = bisect_right(spans, (event["ts"], float("inf"))) - 1
            if last < 0 or all(end + _ROUNDING < event["ts"] for _, end in spans[: last + 1]):
                yield f"arrow {event['id']}: `{event['ph']}` is in no span"
    yield from (f"arrow {name}: has {found}, not s and f" for name, found in phases.items() if found != ["s", "f"])


def _unnamed(events: Sequence[TraceEvent], tracks: Iterable[tuple[int, int]]) -> Iterator[str]:
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    yield from (f"process {pid}, track {tid}: has no name" for pid, tid in tracks if (pid, tid) not in named)
