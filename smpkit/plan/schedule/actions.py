"""A schedule: for each pipeline rank the list of actions that it executes, in order, one after the other.

The same object is drawn, simulated, checked and executed. It holds no times: how long an action takes and how long a
value travels are `Costs`, by which the planner compares schedules. `check` follows the actions
by itself, so it does not repeat a mistake of the planner's search.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Final

from pydantic import TypeAdapter

from smpkit.plan.schedule.graph import Kind, Need, ScheduleError, Segment, SegmentGraph, Transfer

_LABEL: Final = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Action:
    """One thing a rank does: a kind of work on one of its own segments, for one microbatch."""

    kind: Kind
    segment: int
    """Index of the segment on the rank whose list this action is in."""
    microbatch: int

    def __str__(self) -> str:
        """`F3`: forward of microbatch 3; `F3.1`: of the rank's second segment (the first one's index is left out)."""
        suffix = f".{self.segment}" if self.segment else ""
        return f"{self.kind}{self.microbatch}{suffix}"

    @classmethod
    def parse(cls, label: str) -> Action:
        """Read what `str` wrote; raise ScheduleError for anything else."""
        if not (match := _LABEL.fullmatch(label)):
            raise ScheduleError(f"`{label}` is not an action", hint="write F, B or W, a microbatch, and .segment")
        return cls(Kind(match[1]), int(match[3] or 0), int(match[2]))


Seconds = float | Mapping[Segment, float]


@dataclass(frozen=True)
class Costs:
    """How long things take, in seconds or in any other single unit; a number stands for every segment."""

    forward_seconds: Seconds = 1.0
    backward_seconds: Seconds = 2.0
    """Of the whole backward."""
    weight_seconds: Seconds | None = None
    """The part of the backward that WEIGHT actions take over where it is split; None: half of it."""
    latency_seconds: float = 0.0
    """From the end of the action that sends to the arrival of an empty message."""
    seconds_per_byte: float = 0.0
    """Time that a message occupies its link; the messages of one ordered pair of ranks follow each other."""

    def seconds(self, kind: Kind, segment: Segment, split_backward: bool = False) -> float:
        if kind is Kind.FORWARD:
            return _of(self.forward_seconds, segment)
        backward = _of(self.backward_seconds, segment)
        weight = backward / 2 if self.weight_seconds is None else _of(self.weight_seconds, segment)
        if kind is Kind.WEIGHT:
            return weight
        return max(0.0, backward - weight) if split_backward else backward

    def occupancy_seconds(self, transfer: Transfer) -> float:
        """Return how long a message keeps its link busy."""
        return transfer.num_bytes * self.seconds_per_byte


def _of(seconds: Seconds, segment: Segment) -> float:
    return seconds[segment] if isinstance(seconds, Mapping) else seconds


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, and what they were made from."""

    name: str
    graph: SegmentGraph
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """One list per rank."""
    caps: tuple[int, ...]
    """How many microbatches may be live on each rank: begun, and not finished with their last action there."""

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the backward is split into input and weight halves."""
        return any(action.kind is Kind.WEIGHT for action in chain.from_iterable(self.actions))

    @cached_property
    def peak_live_microbatches(self) -> tuple[int, ...]:
        """The most microbatches that are live at a time on each rank."""
        return tuple(max(live_microbatches(actions), default=0) for actions in self.actions)

    @cached_property
    def peak_live_segments(self) -> tuple[int, ...]:
        """The most segments of microbatches that are live at a time on each rank: begun and not finished.

        Where a rank has several chunks of the model, this measures what is kept better than whole microbatches do.
        """
        return tuple(
            max(_num_live([(action.segment, action.microbatch) for action in actions]), default=0)
            for actions in self.actions
        )

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions))


def live_microbatches(actions: tuple[Action, ...]) -> list[int]:
    """Return how many microbatches are live while each action of one rank runs."""
    return _num_live([action.microbatch for action in actions])


def _num_live(keys: Sequence[Hashable]) -> list[int]:
    """Return for each index of the list how many keys occur up to there and again from there on."""
    left, counts, live = Counter(keys), [], 0
    begun: set[Hashable] = set()
    for key in keys:
        if key not in begun:
            begun.add(key)
            live += 1
        counts.append(live)
        left[key] -= 1
        live -= not left[key]
    return counts


def to_json(schedule: Schedule) -> str:
    """Write a schedule as text that `from_json` reads; the same schedule gives the same text."""
    rest = asdict(replace(schedule, actions=()))
    return json.dumps({**rest, "actions": [" ".join(map(str, actions)) for actions in schedule.actions]})


def from_json(text: str) -> Schedule:
    """Read what `to_json` wrote; raise ScheduleError if it is not that.

    The result is well formed, not yet proven: `check` does that.
    """
    try:
        content = json.loads(text)
        actions = [list(map(Action.parse, line.split())) for line in content["actions"]]
        return TypeAdapter(Schedule).validate_python({**content, "actions": actions})
    except (KeyError, TypeError, ValueError) as error:
        raise ScheduleError(f"not a schedule: {type(error).__name__}: {error}") from None


# ---- whether a schedule runs to its end: every rank replays its list, and blocks where the executor would ------------


def check(schedule: Schedule) -> None:
    """Raise ScheduleError, naming rank and action, unless the schedule can be executed.

    It can when every rank does everything exactly once, no rank ever has more microbatches live than its cap, and, with
    receives that block and sends that do not, every rank comes to the end of its list (no deadlock).
    """
    for rank in range(schedule.graph.num_ranks):
        _check_complete(schedule, rank)
        _check_cap(schedule, rank)
    _replay(schedule)


def _check_complete(schedule: Schedule, rank: int) -> None:
    expected = Counter[Action]()
    for segment in range(schedule.graph.counts[rank]):
        for kind in schedule.graph.kinds(Segment(rank, segment), schedule.splits_backward):
            expected.update(Action(kind, segment, microbatch) for microbatch in range(schedule.num_microbatches))
    actual = Counter(schedule.actions[rank])
    if missing := sorted((expected - actual).elements()):
        raise ScheduleError(f"rank {rank} never runs {' '.join(map(str, missing))}")
    if surplus := sorted((actual - expected).elements()):
        text = "more than once" if surplus[0] in expected else "which does not exist in this graph"
        raise ScheduleError(f"rank {rank} runs {surplus[0]}, {text}")


def _check_cap(schedule: Schedule, rank: int) -> None:
    actions, cap = schedule.actions[rank], schedule.caps[rank]
    for action, live in zip(actions, live_microbatches(actions), strict=True):
        if live > cap:
            raise ScheduleError(f"rank {rank} has {live} microbatches live in {action}, its cap is {cap}")


Done = set[tuple[Kind, Segment, int]]


def _replay(schedule: Schedule) -> None:
    """Let the ranks take turns, each running until it blocks, until none of them gets further."""
    done: Done = set()
    next_index = [0] * schedule.graph.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while next_index[rank] < len(actions):
                action = actions[next_index[rank]]
                if _blocker(schedule, rank, action, done) is not None:
                    break
                done.add((action.kind, Segment(rank, action.segment), action.microbatch))
                next_index[rank] += 1
                moved = True
    stuck = [rank for rank, actions in enumerate(schedule.actions) if next_index[rank] < len(actions)]
    if stuck:
        waits = [_wait(schedule, rank, schedule.actions[rank][next_index[rank]], done) for rank in stuck]
        raise ScheduleError(f"the schedule stands still: {'; '.join(waits)}")


def _blocker(schedule: Schedule, rank: int, action: Action, done: Done) -> Need | None:
    for need in schedule.graph.needs(action.kind, Segment(rank, action.segment)):
        if (need.kind, need.segment, action.microbatch) not in done:
            return need
    return None


def _wait(schedule: Schedule, rank: int, action: Action, done: Done) -> str:
    need = _blocker(schedule, rank, action, done)
    assert need is not None
    missing = Action(need.kind, need.segment.index, action.microbatch)
    return f"rank {rank} in {action} waits for {missing} of rank {need.segment.rank}"
