"""Write a run as a Chrome trace, which Perfetto opens: a process per rank, spans, arrows from send to receive.

::

    rank 0 · stage 0   steps                [ train_step 3                              ]
                       compute              [ F0 ][ F1 ][ F2 ]      [ B0     ]
                       sends                     []   []
                       torch: thread 4711   [ aten::linear ]  ╲
    rank 1 · stage 1   receives             [    ]             ╲ ...

Times are microseconds. What torch's profiler has made of some steps stands beside their events, on their clock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from smpkit.observe.events import Counter, Event, EventsError, Mark, MemorySample
from smpkit.observe.executed import match_messages
from smpkit.observe.merge import RankStep, Run
from smpkit.observe.profiles import PROFILED, rank_of

TraceEvent: TypeAlias = dict[str, Any]

_TRACKS: Final = ("steps", "compute", "sends", "receives", "other")
_LANES: Final = 100
"""Thread ids that each track has for spans that overlap; those of a profile come above all of them."""
_FIRST_PROFILED: Final = 10_000
_STACKED: Final = ("weights", "gradients", "states", "activations", "parked")
_OF_THE_PROFILER: Final = ("Record Window End", "Iteration Start: PyTorch Profiler")


def chrome_trace(
    run: Run, steps: Iterable[int] | None = None, profiles: Mapping[int, Mapping[str, Any]] | None = None
) -> str:
    """Return the trace as JSON text, with profiles by rank; of all steps that every rank finished, or of some."""
    numbers = list(run.steps if steps is None else steps)
    events = [event for rank in range(run.mesh.size) for event in _rank_events(run, rank, numbers)]
    events += [event for number in numbers for event in _flows(run, number, events)]
    for rank, profile in (profiles or {}).items():
        events += _profile_events(run, rank, profile)
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"producer": "smpkit"}}
    return json.dumps(content, separators=(",", ":"))


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000


class _Tracks:
    """The tracks of one rank. Spans of one track are nested or disjoint: one that crosses another gets a new lane."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lanes: defaultdict[str, list[list[int]]] = defaultdict(list)
        """For each lane of a track the ends of the spans that are open, outermost first."""

    def span(self, track: str, name: str, start_ns: int, end_ns: int, **arguments: int) -> TraceEvent:
        """Return a span; those of a track come by their starts, of equal starts the longest first."""
        return {
            "ph": "X",
            "name": name,
            "cat": track,
            "pid": self.rank,
            "tid": _TRACKS.index(track) * _LANES + self._lane(track, start_ns, end_ns),
            "ts": _microseconds(start_ns),
            "dur": _microseconds(end_ns - start_ns),
            "args": arguments,
        }

    def _lane(self, track: str, start_ns: int, end_ns: int) -> int:
        lanes = self._lanes[track]
        for number, open_ends in enumerate(lanes):
            while open_ends and open_ends[-1] <= start_ns:
                open_ends.pop()
            if not open_ends or end_ns <= open_ends[-1]:
                open_ends.append(end_ns)
                return number
        lanes.append([end_ns])
        return len(lanes) - 1

    def names(self) -> Iterator[TraceEvent]:
        for track, lanes in self._lanes.items():
            for lane in range(len(lanes)):
                name = track if lane == 0 else f"{track} {lane + 1}"
                yield from _thread_name(self.rank, _TRACKS.index(track) * _LANES + lane, name)


def _rank_events(run: Run, rank: int, numbers: Sequence[int]) -> Iterator[TraceEvent]:
    tracks = _Tracks(rank)
    steps = [run.step(rank, number) for number in numbers]
    for step in steps:
        yield from _step_events(tracks, step)
    for event in run.logs[rank].events:
        if isinstance(event, Counter | MemorySample | Mark) and any(
            step.span.start_ns <= event.at_ns <= step.span.end_ns for step in steps
        ):
            yield _moment(rank, event)
    common = {"ph": "M", "pid": rank, "tid": 0}
    yield {**common, "name": "process_name", "args": {"name": f"rank {rank} · stage {run.mesh.coordinates(rank).pp}"}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": rank}}
    yield {**common, "name": "process_labels", "args": {"labels": run.logs[rank].header.host}}
    yield from tracks.names()


def _step_events(tracks: _Tracks, step: RankStep) -> Iterator[TraceEvent]:
    yield tracks.span("steps", f"{step.span.name} {step.span.number}", step.span.start_ns, step.span.end_ns)
    spans = []
    for action in step.actions:
        name = f"{action.kind}{action.microbatch}{f'.{action.segment}' if action.segment else ''}"
        arguments = {"step": action.step, "microbatch": action.microbatch, "segment": action.segment}
        spans.append((name, action.start_ns, action.end_ns, arguments))
    receives = [message for message in step.messages if message.direction == "receive"]
    spans += [(f"wait for rank {receive.peer}", receive.start_ns, receive.end_ns, {}) for receive in receives]
    for name, start_ns, end_ns, arguments in sorted(spans, key=lambda span: (span[1], -span[2])):
        yield tracks.span("compute", name, start_ns, end_ns, **arguments)
    for message in step.messages:
        track, word = ("sends", "to") if message.direction == "send" else ("receives", "from")
        arguments = {"bytes": message.num_bytes, "tag": message.tag}
        yield tracks.span(track, f"{word} rank {message.peer}", message.start_ns, message.end_ns, **arguments)
    for work in step.works:
        yield tracks.span("other", work.name, work.start_ns, work.end_ns)
    # A microbatch is live from its first action to the end of its last one.
    first = {action.microbatch: action.start_ns for action in reversed(step.actions)}
    last = {action.microbatch: action.end_ns for action in step.actions}
    live = 0
    for at_ns, change in sorted([*((at, 1) for at in first.values()), *((at, -1) for at in last.values())]):
        live += change
        yield _counter(tracks.rank, "live microbatches", at_ns, value=live)


def _counter(rank: int, name: str, at_ns: int, **values: int) -> TraceEvent:
    """Return a counter; Perfetto stacks several values."""
    return {"ph": "C", "name": name, "pid": rank, "ts": _microseconds(at_ns), "args": values}


def _moment(rank: int, event: Event) -> TraceEvent:
    if isinstance(event, Counter):
        return _counter(rank, event.name, event.at_ns, value=event.value)
    if isinstance(event, MemorySample):
        return _counter(rank, "device", event.at_ns, **{kind: max(0, getattr(event, kind)) for kind in _STACKED})
    assert isinstance(event, Mark)
    return {"ph": "i", "name": event.name, "s": "p", "pid": rank, "tid": 0, "ts": _microseconds(event.at_ns)}


def _thread_name(rank: int, thread: int, name: str) -> Iterator[TraceEvent]:
    common = {"ph": "M", "pid": rank, "tid": thread}
    yield {**common, "name": "thread_name", "args": {"name": name}}
    yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _flows(run: Run, number: int, events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Draw an arrow for every message, from the span that sends to the one that receives."""
    threads = {(e["pid"], e["cat"], e["ts"], e["args"].get("tag")): e["tid"] for e in events if e["ph"] == "X"}
    for pipeline, ranks in enumerate(run.pipelines):
        for count, (send, receive) in enumerate(match_messages(run, number, ranks)):
            # A receive may have been waiting before the send: the arrow ends inside of it, after its own beginning.
            landing = min(max(receive.start_ns, send.start_ns), receive.end_ns)
            for phase, rank, track, message, at_ns in (
                ("s", receive.peer, "sends", send, send.start_ns),
                ("f", send.peer, "receives", receive, landing),
            ):
                thread = threads[rank, track, _microseconds(message.start_ns), message.tag]
                name = {"name": "message", "cat": "message", "id": f"{number}.{pipeline}.{count}"}
                place = {"pid": rank, "tid": thread, "ts": _microseconds(at_ns)}
                yield {"ph": phase, **name, **place, **({"bp": "e"} if phase == "f" else {})}


# --- profiles ---------------------------------------------------------------------------------------------------------


def profiles_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the profiles in a folder of events, by rank."""
    profiles = {}
    for path in sorted(folder.glob("profile_*.json")):
        rank = rank_of(path.name)
        if rank is None:
            continue
        try:
            profiles[rank] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            assert isinstance(profiles[rank]["traceEvents"], list)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise EventsError(f"{path} is no profile", hint="the rank may have been killed while it wrote it") from None
    return profiles


def _profile_events(run: Run, rank: int, profile: Mapping[str, Any]) -> Iterator[TraceEvent]:
    """Yield a profile's events as those of the rank's process in the trace of the run.

    The profiler's clock is not ours: the begin of a profiled step is in both, and moves all the rest.
    """
    marks = [mark for mark in profile["traceEvents"] if mark.get("ph") == "X" and mark.get("cat") == "user_annotation"]
    ours = [mark for mark in marks if str(mark.get("name", "")).startswith(PROFILED)]
    begins = {int(mark["name"].removeprefix(PROFILED)): float(mark["ts"]) for mark in ours}
    recorded = next((number for number in begins if number in run.steps), None)
    if recorded is None:
        message = f"the profile of rank {rank} has none of the recorded steps"
        raise EventsError(message, hint="record as many steps: SMPKIT_EVENTS_STEPS")
    offset = _microseconds(run.step(rank, recorded).span.start_ns) - begins[recorded]
    threads: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    for event in profile["traceEvents"]:
        place = event.get("pid"), event.get("tid")
        if event.get("name") == "thread_name" and event.get("ph") == "M":
            names[place] = str(event.get("args", {}).get("name", ""))
        if event.get("ph") == "M" or "ts" not in event or event.get("cat") == "Trace":
            continue
        if event.get("name") in _OF_THE_PROFILER:
            continue
        thread = threads.setdefault(place, _FIRST_PROFILED + len(threads))
        moved = {**event, "pid": rank, "tid": thread, "ts": float(event["ts"]) + offset}
        if event["ph"] in ("s", "t", "f"):
            moved["id"] = f"torch.{rank}.{event.get('id')}"
        yield moved
    for place, thread in threads.items():
        yield from _thread_name(rank, thread, f"torch: {names.get(place) or f'thread {place[1]}'}")
