"""Simulate a schedule with costs: when every action starts and ends, who waits for what, and how full the ranks get.

The bubble is the idle share, `idle / (ranks * makespan)`. Of a chain without link time it is `(P - 1) / (M + P - 1)`
for `simple` and for `interleaved`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from smpkit.plan.schedule.actions import Action, Costs, Schedule
from smpkit.plan.schedule.graph import Kind, ScheduleError, Segment
from smpkit.plan.schedule.tasks import Edge, LinkModel, Task, tasks_of


class Cause(StrEnum):
    """Why a rank is idle."""

    FILL = "fill"
    """Nothing has reached it yet."""
    FORWARD = "forward"
    """An activation that it needs is still being computed."""
    BACKWARD = "backward"
    """A gradient that it needs is still being computed."""
    LINK = "link"
    """What it needs is on its way."""
    DRAIN = "drain"
    """It has finished and others have not."""


@dataclass(frozen=True)
class ActionInterval:
    """One action in time."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class IdleInterval:
    """A time in which a rank is idle."""

    cause: Cause
    start_seconds: float
    end_seconds: float
    waits_for: int | None
    """The rank that it waits for; None where it waits for nobody in particular."""


@dataclass(frozen=True)
class Timeline:
    """A schedule in time."""

    schedule: Schedule
    spans: tuple[tuple[ActionInterval, ...], ...]
    """For each rank, in order."""
    stalls: tuple[tuple[IdleInterval, ...], ...]

    @cached_property
    def makespan_seconds(self) -> float:
        """When the last action ends."""
        return max((spans[-1].end_seconds for spans in self.spans if spans), default=0.0)

    @cached_property
    def idle_seconds(self) -> tuple[float, ...]:
        busy = (sum(span.end_seconds - span.start_seconds for span in spans) for spans in self.spans)
        return tuple(self.makespan_seconds - seconds for seconds in busy)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks together, 0 to 1."""
        total = len(self.spans) * self.makespan_seconds
        return sum(self.idle_seconds) / total if total else 0.0

    def stall_seconds(self, rank: int) -> dict[Cause, float]:
        """Return how long a rank is idle for each cause."""
        seconds: dict[Cause, float] = {}
        for cause in Cause:
            stalls = [stall for stall in self.stalls[rank] if stall.cause is cause]
            seconds[cause] = sum(stall.end_seconds - stall.start_seconds for stall in stalls)
        return seconds


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule in simulated time; raise ScheduleError if it deadlocks."""
    return _Simulator(schedule, costs or Costs()).timeline()


@dataclass(frozen=True)
class _Arrival:
    """What reached a task last: when, when it was sent, and from where."""

    seconds: float = 0.0
    sent_seconds: float = 0.0
    kind: Kind = Kind.FORWARD
    rank: int | None = None


class _Simulator:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._tasks = tasks_of(schedule.graph, costs, schedule.splits_backward)
        self._numbers = {(task.kind, task.segment): number for number, task in enumerate(self._tasks)}
        self._links = LinkModel(costs)
        self._missing = [[task.num_needs for task in self._tasks] for _ in range(schedule.num_microbatches)]
        self._arrivals = [[_Arrival()] * len(self._tasks) for _ in range(schedule.num_microbatches)]
        self._spans: list[list[ActionInterval]] = [[] for _ in schedule.actions]
        self._stalls: list[list[IdleInterval]] = [[] for _ in schedule.actions]

    def timeline(self) -> Timeline:
        """Let ranks run until they block, and again when something has reached them."""
        turns = deque(range(len(self._spans)))
        while turns:
            turns.extend(self._advance(turns.popleft()))
        for rank, actions in enumerate(self._schedule.actions):
            if len(self._spans[rank]) < len(actions):
                raise ScheduleError(f"rank {rank} stands still before {actions[len(self._spans[rank])]}")
        self._drain()
        return Timeline(self._schedule, tuple(map(tuple, self._spans)), tuple(map(tuple, self._stalls)))

    def _advance(self, rank: int) -> set[int]:
        """Run a rank's list as far as it goes; return the other ranks that got something."""
        reached: set[int] = set()
        spans, actions = self._spans[rank], self._schedule.actions[rank]
        while len(spans) < len(actions):
            action = actions[len(spans)]
            number = self._numbers[action.kind, Segment(rank, action.segment)]
            if self._missing[action.microbatch][number]:
                break
            reached |= self._run(rank, action, number)
        return reached - {rank}

    def _run(self, rank: int, action: Action, number: int) -> set[int]:
        """Run one action; return the ranks to which it has sent something."""
        arrival = self._arrivals[action.microbatch][number]
        spans, task = self._spans[rank], self._tasks[number]
        free = spans[-1].end_seconds if spans else 0.0
        if arrival.seconds > free:
            self._stalls[rank] += _stalls(arrival, free, is_first=not spans)
        start = max(free, arrival.seconds)
        spans.append(ActionInterval(action, start, start + task.seconds))
        return {self._send(task, edge, action.microbatch, start + task.seconds) for edge in task.edges}

    def _send(self, task: Task, edge: Edge, microbatch: int, now_seconds: float) -> int:
        source, target = task.segment.rank, self._tasks[edge.target].segment.rank
        seconds = self._links.arrival_seconds(source, target, edge.transfer, now_seconds)
        if seconds >= self._arrivals[microbatch][edge.target].seconds:
            self._arrivals[microbatch][edge.target] = _Arrival(seconds, now_seconds, task.kind, source)
        self._missing[microbatch][edge.target] -= 1
        return target

    def _drain(self) -> None:
        makespan = max((spans[-1].end_seconds for spans in self._spans if spans), default=0.0)
        for spans, stalls in zip(self._spans, self._stalls, strict=True):
            end = spans[-1].end_seconds if spans else 0.0
            if end < makespan:
                stalls.append(IdleInterval(Cause.DRAIN, end, makespan, None))


def _stalls(arrival: _Arrival, free_seconds: float, is_first: bool) -> list[IdleInterval]:
    """Split the idle time before an action into waiting for another rank's work and waiting for the link."""
    by_kind = Cause.BACKWARD if arrival.kind is Kind.BACKWARD else Cause.FORWARD
    sent = max(free_seconds, arrival.sent_seconds)
    parts = [
        IdleInterval(Cause.FILL if is_first else by_kind, free_seconds, sent, arrival.rank),
        IdleInterval(Cause.LINK, sent, arrival.seconds, arrival.rank),
    ]
    return [part for part in parts if part.end_seconds > part.start_seconds]
