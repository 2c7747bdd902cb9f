"""Write a run as a Chrome trace, which Perfetto opens: a process per rank, spans, arrows from send to receive.

::

    rank 0 · stage 0   steps       [ train_step 3                              ]
                       compute     [ F0 ][ F1 ][ F2 ]      [ B0     ]
                       sends            []   []
                                          ╲
    rank 1 · stage 1   receives      [    ]╲ ...

Times are microseconds. Spans of one track are nested or disjoint: one that partly overlaps another is moved to a track
of its own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from smpkit.observe.events import ActionSpan, Counter, Mark, MemorySample, MessageSpan
from smpkit.observe.executed import match_messages
from smpkit.observe.merge import RankStep, Run

__all__ = ["chrome_trace"]

TraceEvent = dict[str, Any]

_TRACKS: Final = ("steps", "compute", "sends", "receives", "other")
_LANES: Final = 100
"""Thread ids that each track has for spans that overlap."""


def chrome_trace(run: Run, steps: Iterable[int] | None = None) -> str:
    """Return the trace as JSON text; of all steps that every rank finished, unless some are named."""
    numbers = list(run.steps if steps is None else steps)
    events = [event for rank in range(run.mesh.size) for event in _Rank(run, rank).events(numbers)]
    events += [event for number in numbers for event in _flows(run, number, events)]
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"producer": "smpkit"}}
    return json.dumps(content, separators=(",", ":"))


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000


@dataclass
class _Rank:
    """The events of one rank, and the lanes its tracks have needed so far."""

    run: Run
    rank: int
    _lanes: dict[str, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    """For each lane of a track the ends of the spans that are open, outermost first."""

    def events(self, numbers: Sequence[int]) -> Iterator[TraceEvent]:
        for number in numbers:
            yield from self._step(self.run.step(self.rank, number))
        window = [self.run.step(self.rank, number).span for number in numbers]
        for event in self.run.logs[self.rank].events:
            if isinstance(event, Counter | MemorySample | Mark) and any(
                s.start_ns <= event.at_ns <= s.end_ns for s in window
            ):
                yield self._moment(event)
        yield from self._names()

    def _step(self, step: RankStep) -> Iterator[TraceEvent]:
        span = step.span
        yield self._span("steps", f"{span.name} {span.number}", span.start_ns, span.end_ns, {})
        shown: list[ActionSpan | MessageSpan] = [*step.actions]
        shown += [message for message in step.messages if message.direction == "receive"]
        for event in sorted(shown, key=lambda each: (each.start_ns, -each.end_ns)):
            if isinstance(event, ActionSpan):
                yield self._action(event)
            else:
                yield self._span("compute", f"wait for rank {event.peer}", event.start_ns, event.end_ns, {})
        for message in step.messages:
            yield self._message(message)
        for work in step.works:
            yield self._span("other", work.name, work.start_ns, work.end_ns, {})
        yield from self._live(step)

    def _action(self, action: ActionSpan) -> TraceEvent:
        suffix = f".{action.segment}" if action.segment else ""
        arguments = {"step": action.step, "microbatch": action.microbatch, "segment": action.segment}
        name = f"{action.kind}{action.microbatch}{suffix}"
        return self._span("compute", name, action.start_ns, action.end_ns, arguments)

    def _message(self, message: MessageSpan) -> TraceEvent:
        sends = message.direction == "send"
        name = f"{'to' if sends else 'from'} rank {message.peer}"
        arguments = {"bytes": message.num_bytes, "tag": message.tag}
        return self._span("sends" if sends else "receives", name, message.start_ns, message.end_ns, arguments)

    def _span(self, track: str, name: str, start_ns: int, end_ns: int, arguments: dict[str, Any]) -> TraceEvent:
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
        """Return the first lane of a track on which a span crosses no other; starts come in ascending order."""
        lanes = self._lanes[track]
        for number, open_ends in enumerate(lanes):
            while open_ends and open_ends[-1] <= start_ns:
                open_ends.pop()
            if not open_ends or end_ns <= open_ends[-1]:
                open_ends.append(end_ns)
                return number
        lanes.append([end_ns])
        return len(lanes) - 1

    def _live(self, step: RankStep) -> Iterator[TraceEvent]:
        """Count the microbatches that are live: begun, and not finished with their last action."""
        last = {action.microbatch: action for action in step.actions}
        live: set[int] = set()
        for action in step.actions:
            if action.microbatch not in live:
                live.add(action.microbatch)
                yield self._value("live microbatches", len(live), action.start_ns)
            if last[action.microbatch] is action:
                live.remove(action.microbatch)
                yield self._value("live microbatches", len(live), action.end_ns)

    def _value(self, name: str, value: int, at_ns: int) -> TraceEvent:
        return {"ph": "C", "name": name, "pid": self.rank, "ts": _microseconds(at_ns), "args": {"value": value}}

    def _moment(self, event: Counter | MemorySample | Mark) -> TraceEvent:
        if isinstance(event, MemorySample):
            return self._memory(event)
        if isinstance(event, Counter):
            return self._value(event.name, event.value, event.at_ns)
        at = _microseconds(event.at_ns)
        return {"ph": "i", "name": event.name, "s": "p", "pid": self.rank, "tid": 0, "ts": at}

    def _memory(self, sample: MemorySample) -> TraceEvent:
        """Return a counter of several values, which Perfetto stacks: what the device holds."""
        kinds = ("weights", "gradients", "states", "activations", "parked")
        held = {kind: max(0, getattr(sample, kind)) for kind in kinds}
        return {"ph": "C", "name": "device", "pid": self.rank, "ts": _microseconds(sample.at_ns), "args": held}

    def _names(self) -> Iterator[TraceEvent]:
        """Name and order the process and its tracks."""
        place = self.run.mesh.coordinates(self.rank)
        yield self._metadata("process_name", 0, name=f"rank {self.rank} · stage {place.pp}")
        yield self._metadata("process_sort_index", 0, sort_index=self.rank)
        yield self._metadata("process_labels", 0, labels=self.run.logs[self.rank].header.host)
        for track, lanes in self._lanes.items():
            for lane in range(len(lanes)):
                thread = _TRACKS.index(track) * _LANES + lane
                name = track if lane == 0 else f"{track} {lane + 1}"
                yield self._metadata("thread_name", thread, name=name)
                yield self._metadata("thread_sort_index", thread, sort_index=thread)

    def _metadata(self, what: str, thread: int, **arguments: Any) -> TraceEvent:
        return {"ph": "M", "name": what, "pid": self.rank, "tid": thread, "args": arguments}


def _flows(run: Run, number: int, events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Draw an arrow for every message, from the span that sends to the one that receives."""
    threads = {(e["pid"], e["cat"], e["ts"], e["args"].get("tag")): e["tid"] for e in events if e["ph"] == "X"}
    for pipeline, ranks in enumerate(run.pipelines):
        for count, each in enumerate(match_messages(run, number, ranks)):
            # A receive may have been waiting before the send: the arrow ends inside of it, after its own beginning.
            landing = min(max(each.receive.start_ns, each.send.start_ns), each.receive.end_ns)
            name = f"{number}.{pipeline}.{count}"
            for phase, rank, track, message, at_ns in (
                ("s", each.sender, "sends", each.send, each.send.start_ns),
                ("f", each.receiver, "receives", each.receive, landing),
            ):
                thread = threads[rank, track, _microseconds(message.start_ns), message.tag]
                common = {"ph": phase, "name": "message", "cat": "message", "id": name, "pid": rank, "tid": thread}
                yield {**common, "ts": _microseconds(at_ns), **({"bp": "e"} if phase == "f" else {})}
