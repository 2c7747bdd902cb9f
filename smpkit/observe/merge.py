"""Put the files of all ranks together: one run, one clock, events by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

from smpkit.observe.events import (
    ActionSpan,
    Event,
    EventsError,
    Header,
    MemorySample,
    MessageSpan,
    PlannedSchedule,
    RankLog,
    StepSpan,
    WorkSpan,
    find_events,
    read_events,
)
from smpkit.plan.mesh import CommGroup, Coordinates, Mesh

_LISTED: Final = 8


@dataclass(frozen=True)
class RankStep:
    """What one rank did in one step."""

    span: StepSpan
    actions: tuple[ActionSpan, ...]
    messages: tuple[MessageSpan, ...]
    works: tuple[WorkSpan, ...]
    samples: tuple[MemorySample, ...] = ()


@dataclass(frozen=True)
class Run:
    """The events of all ranks, on one clock: nanoseconds since the barrier in `smp.init()`."""

    mesh: Mesh
    logs: tuple[RankLog, ...]
    """In rank order."""

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps that every rank finished."""
        finished = [{event.number for event in _of(log.events, StepSpan)} for log in self.logs]
        return tuple(sorted(set.intersection(*finished)))

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of each pipeline, in the order of its stages."""
        groups = self.mesh.groups(CommGroup.PP_GROUP)
        return tuple(tuple(sorted(group, key=lambda rank: self.mesh.coordinates(rank).pp)) for group in groups)

    def step(self, rank: int, number: int) -> RankStep:
        """Return what a rank did in a step that is in `steps`."""
        return self._by_step[rank][number]

    def begin_ns(self, number: int, pipeline: int) -> int:
        """Return when the first action of a pipeline begins in a step, or the step where it has none."""
        steps = [self.step(rank, number) for rank in self.pipelines[pipeline]]
        starts = [action.start_ns for step in steps for action in step.actions]
        return min(starts or [step.span.start_ns for step in steps])

    @cached_property
    def _by_step(self) -> tuple[dict[int, RankStep], ...]:
        return tuple(_steps(log.events) for log in self.logs)

    def schedule_text(self, rank: int, key: str) -> str | None:
        """Return the planned schedule that a step of a rank refers to."""
        return next((plan.text for plan in _of(self.logs[rank].events, PlannedSchedule) if plan.key == key), None)

    @property
    def truncated(self) -> tuple[int, ...]:
        """The ranks whose file breaks off in a line."""
        return tuple(log.header.rank for log in self.logs if log.truncated)


_Kind = TypeVar("_Kind", bound=Event)


def _of(events: Sequence[Event], kind: type[_Kind]) -> list[_Kind]:
    return [event for event in events if isinstance(event, kind)]


def _begin_ns(event: Event) -> int:
    times = vars(event)
    return int(times.get("start_ns", times.get("at_ns", 0)))


def _steps(events: Sequence[Event]) -> dict[int, RankStep]:
    by_step: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=_begin_ns):
        if isinstance(event, ActionSpan | MessageSpan | WorkSpan | MemorySample):
            by_step[event.step].append(event)
    return {
        span.number: RankStep(
            span,
            actions=tuple(_of(by_step[span.number], ActionSpan)),
            messages=tuple(_of(by_step[span.number], MessageSpan)),
            works=tuple(_of(by_step[span.number], WorkSpan)),
            samples=tuple(_of(by_step[span.number], MemorySample)),
        )
        for span in _of(events, StepSpan)
    }


def read_run(folder: Path) -> Run:
    """Read and merge the events of a run; raise EventsError if files are missing, damaged, or of different runs."""
    return merge([read_events(path) for path in find_events(folder)])


def merge(logs: Sequence[RankLog]) -> Run:
    """Put the files of one run on one clock; raises EventsError unless they are those of all its ranks."""
    headers = [log.header for log in logs]
    mesh = _mesh(headers[0])
    _check(mesh, headers)
    # The begin of a clock is its earliest reading after the barrier, the closest to the barrier's end.
    begins = {header.clock: min(h.anchor_ns for h in headers if h.clock == header.clock) for header in headers}
    return Run(mesh, tuple(_shifted(log, begins[log.header.clock]) for log in logs))


def _mesh(header: Header) -> Mesh:
    return Mesh(header.pp_size, header.tp_size, header.rdp_size, header.placement_strategy)


def _check(mesh: Mesh, headers: Sequence[Header]) -> None:
    missing = sorted({*range(mesh.size)} - {header.rank for header in headers})
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        listed = ", ".join(map(str, missing[:_LISTED]))
        hint = "bring the files of all hosts into one folder"
        raise EventsError(f"of {mesh.size} ranks, the events of {listed}{more} are missing", hint=hint)
    for rank, header in enumerate(headers):
        if header.run != headers[0].run or _mesh(header) != mesh:
            hint = "record each run into a folder of its own"
            raise EventsError(f"the events of rank {header.rank} are of another run than those of rank 0", hint=hint)
        if header.rank != rank or mesh.coordinates(rank) != Coordinates(header.pp, header.tp, header.rdp):
            raise EventsError(f"the events of rank {header.rank} claim a place in the grid that is not its own")


def _shifted(log: RankLog, begin_ns: int) -> RankLog:
    def moved(event: Event) -> Event:
        times = {name: value - begin_ns for name, value in vars(event).items() if name.endswith("_ns")}
        return replace(event, **times)

    return replace(log, events=tuple(map(moved, log.events)))
