"""Logs of runs that never were: what ranks would record if a schedule ran exactly as it is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from smpkit.observe.events import (
    ActionSpan,
    Counter,
    Event,
    EventWriter,
    Header,
    MessageSpan,
    PlannedSchedule,
    RankLog,
    StepSpan,
    WorkSpan,
)
from smpkit.plan.schedule.actions import Action, Costs, Schedule, to_json
from smpkit.plan.schedule.graph import Kind, SegmentGraph
from smpkit.plan.schedule.simulate import Timeline, simulate
from smpkit.plan.schedule.templates import one_f_one_b
from tests.plan.graphs import carrying

MILLISECOND = 1_000_000
COSTS = Costs(forward_seconds=1e-3, backward_seconds=2e-3, latency_seconds=1e-4)


def chain(num_ranks: int, num_microbatches: int, num_bytes: int = 1024) -> Schedule:
    """1F1B of a chain whose ranks hand on `num_bytes`."""
    return replace(one_f_one_b(num_ranks, num_microbatches), graph=carrying(num_bytes, SegmentGraph.chain(num_ranks)))


def write_log(folder: Path, log: RankLog) -> Path:
    """Write the file of one rank, and return it."""
    writer = EventWriter(folder, log.header)
    for event in log.events:
        writer.write_rows([(type(event), [*vars(event).values()])])
    writer.close()
    return writer.path


def header(rank: int, size: int, **changes: object) -> Header:
    """A header of a run that is one pipeline."""
    made = Header(
        rank=rank,
        host="algo-1",
        run="abc",
        clock="one",
        anchor_ns=0,
        pp=rank,
        tp=0,
        rdp=0,
        pp_size=size,
        tp_size=1,
        rdp_size=1,
        placement_strategy="cluster",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def logs_of(schedule: Schedule, costs: Costs = COSTS, num_steps: int = 1) -> list[RankLog]:
    """What the ranks of a pipeline record; each step begins when the one before has ended everywhere."""
    timeline = simulate(schedule, costs)
    length = _ns(timeline.makespan_seconds) + MILLISECOND
    logs = []
    for rank in range(schedule.graph.num_ranks):
        events: list[Event] = [PlannedSchedule("0", to_json(schedule))]
        for step in range(num_steps):
            events += list(_step(timeline, rank, step, step * length))
        logs.append(RankLog(header(rank, schedule.graph.num_ranks), tuple(events), truncated=False))
    return logs


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _step(timeline: Timeline, rank: int, step: int, begin: int) -> Iterator[Event]:
    free = begin
    for span in timeline.spans[rank]:
        start, end = begin + _ns(span.start_seconds), begin + _ns(span.end_seconds)
        # What a rank waits for is received inside the action: it is recorded from when the rank was free.
        yield ActionSpan(step, span.action.kind.value, span.action.segment, span.action.microbatch, free, end)
        backward = span.action.kind is Kind.BACKWARD
        if (source := _neighbour(timeline, rank, -1 if not backward else 1)) is not None:
            yield MessageSpan(step, "receive", source, _tag(span.action), 1024, free, start)
        if (target := _neighbour(timeline, rank, 1 if not backward else -1)) is not None:
            yield MessageSpan(step, "send", target, _tag(span.action), 1024, end, end + 1000)
        free = end
    finish = begin + _ns(timeline.makespan_seconds)
    yield WorkSpan(step, "reduce gradients", free, finish)
    yield Counter("memory, bytes", 1000 + step, finish)
    yield StepSpan(step, "train_step", "0", begin, finish)


def _tag(action: Action) -> int:
    return 2 * action.microbatch + (action.kind is Kind.BACKWARD)


def _neighbour(timeline: Timeline, rank: int, offset: int) -> int | None:
    return rank + offset if 0 <= rank + offset < len(timeline.spans) else None
