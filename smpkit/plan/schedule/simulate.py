"""Simulate a schedule with costs: when every action starts and ends, who waits for what, and how full the ranks get.

The bubble is the idle share, `idle / (ranks * makespan)`. Of a chain without link time it is `(P - 1) / (M + P - 1)`
for `simple` and for `interleaved`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from smpkit.plan.schedule.actions import Action, Costs, Schedule
from smpkit.plan.schedule.graph import Kind, ScheduleError, Segment
from smpkit.plan.schedule.tasks import LinkModel, Task, tasks_of


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
        lengths = [(stall.cause, stall.end_seconds - stall.start_seconds) for stall in self.stalls[rank]]
        return {cause: sum(seconds for why, seconds in lengths if why is cause) for cause in Cause}


def timeline_of(
    schedule: Schedule, spans: Sequence[Sequence[ActionInterval]], stalls: Sequence[Sequence[IdleInterval]]
) -> Timeline:
    """Put together what each rank ran and what it waited for before; then it waits for the last one to end."""
    ends = [of_rank[-1].end_seconds if of_rank else 0.0 for of_rank in spans]
    last = max(ends, default=0.0)
    drains = [[IdleInterval(Cause.DRAIN, end, last, None)] if end < last else [] for end in ends]
    idle = tuple((*waits, *drain) for waits, drain in zip(stalls, drains, strict=True))
    return Timeline(schedule, tuple(map(tuple, spans)), idle)


@dataclass(frozen=True)
class _Arrival:
    """What reached a task last: when, when it was sent, and from where."""

    seconds: float = 0.0
    sent_seconds: float = 0.0
    kind: Kind = Kind.FORWARD
    rank: int | None = None


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule in simulated time; raise ScheduleError if it deadlocks.

    Each rank runs until it blocks, and again when something has reached it.
    """
    costs = costs or Costs()
    tasks = tasks_of(schedule.graph, costs, schedule.splits_backward)
    numbers = {(task.kind, task.segment): number for number, task in enumerate(tasks)}
    links = LinkModel(costs)
    missing = [[task.num_needs for task in tasks] for _ in range(schedule.num_microbatches)]
    arrivals = [[_Arrival()] * len(tasks) for _ in range(schedule.num_microbatches)]
    spans: list[list[ActionInterval]] = [[] for _ in schedule.actions]
    stalls: list[list[IdleInterval]] = [[] for _ in schedule.actions]

    def run(rank: int, action: Action, task: Task, arrival: _Arrival) -> float:
        """Run an action once what it needs is there; return when it ends."""
        free = spans[rank][-1].end_seconds if spans[rank] else 0.0
        if arrival.seconds > free:
            stalls[rank] += _stalls(arrival, free, is_first=not spans[rank])
        start = max(free, arrival.seconds)
        spans[rank].append(ActionInterval(action, start, start + task.seconds))
        return start + task.seconds

    turns = deque(range(len(spans)))
    while turns:
        rank, reached = turns.popleft(), set[int]()
        for action in schedule.actions[rank][len(spans[rank]) :]:
            number, microbatch = numbers[action.kind, Segment(rank, action.segment)], action.microbatch
            if missing[microbatch][number]:
                break
            task = tasks[number]
            end = run(rank, action, task, arrivals[microbatch][number])
            for edge in task.edges:
                target = tasks[edge.target].segment.rank
                seconds = links.arrival_seconds(rank, target, edge.transfer, end)
                if seconds >= arrivals[microbatch][edge.target].seconds:
                    arrivals[microbatch][edge.target] = _Arrival(seconds, end, task.kind, rank)
                missing[microbatch][edge.target] -= 1
                reached.add(target)
        turns.extend(reached - {rank})
    for rank, actions in enumerate(schedule.actions):
        if len(spans[rank]) < len(actions):
            raise ScheduleError(f"rank {rank} stands still before {actions[len(spans[rank])]}")
    return timeline_of(schedule, spans, stalls)


def _stalls(arrival: _Arrival, free_seconds: float, is_first: bool) -> list[IdleInterval]:
    """Split the idle time before an action into waiting for another rank's work and waiting for the link."""
    by_kind = Cause.BACKWARD if arrival.kind is Kind.BACKWARD else Cause.FORWARD
    sent = max(free_seconds, arrival.sent_seconds)
    parts = [
        IdleInterval(Cause.FILL if is_first else by_kind, free_seconds, sent, arrival.rank),
        IdleInterval(Cause.LINK, sent, arrival.seconds, arrival.rank),
    ]
    return [part for part in parts if part.end_seconds > part.start_seconds]
