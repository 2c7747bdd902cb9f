"""A step as it was executed, beside the one that was planned, in the terms of `smpkit.plan.schedule.simulate`.

Planned means: the actions of the schedule, each as long as it took on average in this step, over links that cost
nothing. What the executed step is longer by was lost to links, to waiting for ranks that were late, and to Python.

An action begins when what it needs has arrived. The wait before is idle time, although it happens inside the
microbatch's own code; so a span here is the recorded one without the time spent in receives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Final

from smpkit.observe.events import ActionSpan, EventsError, MessageSpan
from smpkit.observe.merge import RankStep, Run
from smpkit.plan.schedule.actions import Action, Costs, Schedule, from_json
from smpkit.plan.schedule.graph import Kind, ScheduleError, Segment, SegmentGraph
from smpkit.plan.schedule.simulate import ActionInterval, Cause, IdleInterval, Timeline, simulate, timeline_of
from smpkit.plan.svg import svg
from smpkit.units import seconds

_SECONDS: Final = 1e-9


@dataclass(frozen=True)
class ExecutedLinkUse:
    """What one rank sent to another in the step."""

    sender: int
    receiver: int
    num_messages: int
    num_bytes: int
    waited_seconds: float
    """How long the receiver waited for these messages, whatever the reason."""


@dataclass(frozen=True)
class ExecutedStep:
    """One step of one pipeline."""

    number: int
    name: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of stages."""
    step_seconds: float
    """From the first rank's begin to the last one's end, with what comes before and after the microbatches."""
    planned: Timeline | None
    """None if the microbatches ran straight through, without a schedule."""
    executed: Timeline
    works: tuple[tuple[tuple[str, float, float], ...], ...]
    """For each rank whatever else it did, such as the reduction of gradients: what, begin and end."""
    links: tuple[ExecutedLinkUse, ...]

    @cached_property
    def follows_plan(self) -> bool:
        """Whether every rank ran the actions that were planned, in that order.

        The first microbatch of a new kind of step runs straight through, so that the schedule can be made: its later
        forward segments are part of its first action.
        """
        if self.planned is None:
            return False
        planned, ran = self.planned.schedule.actions, self.executed.schedule.actions
        return planned == ran or tuple(map(_straight, planned)) == ran

    def as_svg(self) -> str:
        """Draw it, below the planned step."""
        both = {"planned": self.planned, "executed": self.executed}
        return svg({f"{name}: {summary(timeline)}": timeline for name, timeline in both.items() if timeline})

    def other_seconds(self, stage: int) -> float:
        """Return how long a stage was idle without waiting for anybody: Python between actions, and sending."""
        return max(0.0, self.executed.idle_seconds[stage] - sum(self.executed.stall_seconds(stage).values()))


def _straight(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(
        action for action in actions if (action.kind, action.microbatch) != (Kind.FORWARD, 0) or not action.segment
    )


def summary(timeline: Timeline) -> str:
    """Say how long a step took, and how much of it ranks were idle."""
    return f"{seconds(timeline.makespan_seconds)}, bubble {timeline.bubble:.1%}"


def executed_step(run: Run, number: int, pipeline: int = 0) -> ExecutedStep:
    """Return a step, one of `run.steps`, of a pipeline; its times are seconds since the pipeline's first action."""
    ranks = run.pipelines[pipeline]
    steps = [run.step(rank, number) for rank in ranks]
    begin = run.begin_ns(number, pipeline)
    sent_at = {receive: send.start_ns for send, receive in match_messages(run, number, ranks)}
    stages = [_stage(step, sent_at, ranks, begin) for step in steps]
    spans, stalls = zip(*stages, strict=True)
    return ExecutedStep(
        number=number,
        name=steps[0].span.name,
        ranks=ranks,
        step_seconds=_SECONDS * (max(s.span.end_ns for s in steps) - min(s.span.start_ns for s in steps)),
        planned=_planned(run, steps, ranks, spans),
        executed=timeline_of(_schedule(spans), spans, stalls),
        works=tuple(
            tuple((w.name, _SECONDS * (w.start_ns - begin), _SECONDS * (w.end_ns - begin)) for w in step.works)
            for step in steps
        ),
        links=tuple(links_of(run, number, ranks)),
    )


def as_json(step: ExecutedStep, stages: Sequence[int] | None = None) -> dict[str, Any]:
    """Return a step as `smpkit timeline --json` prints it and the page of a report draws it; times are seconds.

    Args:
        stages: those of which lists by stage tell; None: all.
    """
    shown = range(len(step.ranks)) if stages is None else stages
    return {
        "step": step.number,
        "name": step.name,
        "ranks": step.ranks,
        "stages": list(shown),
        "step_seconds": step.step_seconds,
        "follows_plan": step.follows_plan,
        "planned": None if step.planned is None else _timeline_json(step.planned, shown),
        "executed": {
            **_timeline_json(step.executed, shown),
            "works": [step.works[stage] for stage in shown],
            "other_seconds": [step.other_seconds(stage) for stage in shown],
        },
        "links": [asdict(link) for link in step.links],
    }


def _timeline_json(timeline: Timeline, stages: Sequence[int]) -> dict[str, Any]:
    def times(interval: ActionInterval | IdleInterval) -> tuple[float, float]:
        return round(interval.start_seconds, 7), round(interval.end_seconds, 7)

    return {
        "makespan_seconds": timeline.makespan_seconds,
        "bubble": timeline.bubble,
        "idle_seconds": [timeline.idle_seconds[stage] for stage in stages],
        "stall_seconds": [{str(c): s for c, s in timeline.stall_seconds(stage).items()} for stage in stages],
        "peak_live_microbatches": [timeline.schedule.peak_live_microbatches[stage] for stage in stages],
        "spans": [[(str(span.action), *times(span)) for span in timeline.spans[stage]] for stage in stages],
        "stalls": [[(str(e.cause), *times(e), e.waits_for) for e in timeline.stalls[stage]] for stage in stages],
    }


# --- the actions ------------------------------------------------------------------------------------------------------


def _action(span: ActionSpan) -> Action:
    try:
        return Action(Kind(span.kind), span.segment, span.microbatch)
    except ValueError:
        raise EventsError(f"`{span.kind}` is no kind of action") from None


def _schedule(spans: Sequence[Sequence[ActionInterval]]) -> Schedule:
    """Return what ran as a schedule, so that it compares with the planned one."""
    actions = tuple(tuple(span.action for span in stage) for stage in spans)
    segments = sorted({Segment(rank, action.segment) for rank, stage in enumerate(actions) for action in stage})
    kinds = {action.kind for stage in actions for action in stage}
    count = 1 + max((action.microbatch for stage in actions for action in stage), default=-1)
    graph = SegmentGraph(len(spans), tuple(segments), (), kinds != {Kind.FORWARD})
    return Schedule("executed", graph, count, actions, (count,) * len(spans))


# --- the waits --------------------------------------------------------------------------------------------------------


def match_messages(run: Run, number: int, ranks: Sequence[int]) -> Iterator[tuple[MessageSpan, MessageSpan]]:
    """Yield what was sent in a step with what was received of it, by ranks and tag; the n-th with the n-th."""
    sent: defaultdict[tuple[int, int, int], list[MessageSpan]] = defaultdict(list)
    received: defaultdict[tuple[int, int, int], list[MessageSpan]] = defaultdict(list)
    for rank in ranks:
        for message in run.step(rank, number).messages:
            if message.direction == "send":
                sent[rank, message.peer, message.tag].append(message)
            else:
                received[message.peer, rank, message.tag].append(message)
    for key, sends in sent.items():
        yield from zip(sends, received[key], strict=False)


def _stage(
    step: RankStep, sent_at: Mapping[MessageSpan, int], ranks: Sequence[int], begin_ns: int
) -> tuple[tuple[ActionInterval, ...], list[IdleInterval]]:
    """Return what a stage ran, and why it was idle before it had finished.

    Another stage still computed, or a message was on its way.
    """
    receives = [message for message in step.messages if message.direction == "receive"]
    starts = [message.start_ns for message in receives]
    spans: list[ActionInterval] = []
    stalls: list[IdleInterval] = []

    def at(nanoseconds: int) -> float:
        return _SECONDS * (nanoseconds - begin_ns)

    for number, interval in enumerate(step.actions):
        action = _action(interval)
        begun = receives[bisect_left(starts, interval.start_ns) : bisect_right(starts, interval.end_ns)]
        waits = [message for message in begun if message.end_ns <= interval.end_ns]
        waited = sum(message.end_ns - message.start_ns for message in waits)
        spans.append(ActionInterval(action, at(interval.start_ns + waited), at(interval.end_ns)))
        work = Cause.FILL if number == 0 else Cause.FORWARD if action.kind is Kind.FORWARD else Cause.BACKWARD
        if number == 0 and interval.start_ns > begin_ns:
            stalls.append(IdleInterval(Cause.FILL, 0.0, at(interval.start_ns), None))
        for wait in waits:
            sent = min(max(sent_at.get(wait, wait.start_ns), wait.start_ns), wait.end_ns)
            peer = ranks.index(wait.peer) if wait.peer in ranks else None
            for cause, start, end in ((work, wait.start_ns, sent), (Cause.LINK, sent, wait.end_ns)):
                if end > start:
                    stalls.append(IdleInterval(cause, at(start), at(end), peer))
    return tuple(spans), stalls


def links_of(run: Run, number: int, ranks: Sequence[int]) -> Iterator[ExecutedLinkUse]:
    """Yield what the ranks of a pipeline sent to each other in a step."""
    waited: defaultdict[tuple[int, int], int] = defaultdict(int)
    sizes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in ranks:
        for message in run.step(rank, number).messages:
            if message.direction == "send":
                sizes[rank, message.peer].append(message.num_bytes)
            else:
                waited[message.peer, rank] += message.end_ns - message.start_ns
    for pair in sorted(sizes):
        yield ExecutedLinkUse(*pair, len(sizes[pair]), sum(sizes[pair]), _SECONDS * waited[pair])


# --- the plan ---------------------------------------------------------------------------------------------------------


def _planned(
    run: Run, steps: Sequence[RankStep], ranks: Sequence[int], spans: Sequence[Sequence[ActionInterval]]
) -> Timeline | None:
    key = steps[0].span.schedule
    if not key:
        return None
    text = run.schedule_text(ranks[0], key)
    if text is None:
        raise EventsError(f"step {steps[0].span.number} refers to a schedule `{key}` that was not recorded")
    try:
        schedule = from_json(text)
        return simulate(schedule, _costs(schedule, spans))
    except ScheduleError as error:
        raise EventsError(f"the planned schedule of step {steps[0].span.number} is damaged: {error.message}") from None


def _costs(schedule: Schedule, spans: Sequence[Sequence[ActionInterval]]) -> Costs:
    """Return what the actions of each segment took on average; 0 where none ran."""
    took: defaultdict[tuple[Kind, Segment], list[float]] = defaultdict(list)
    for rank, stage in enumerate(spans):
        for span in stage:
            place = Segment(rank, span.action.segment)
            took[span.action.kind, place].append(span.end_seconds - span.start_seconds)
    means = {key: fmean(times) for key, times in took.items()}

    def of(*kinds: Kind) -> Mapping[Segment, float]:
        return {segment: sum(means.get((kind, segment), 0.0) for kind in kinds) for segment in schedule.graph.segments}

    return Costs(of(Kind.FORWARD), of(Kind.BACKWARD, Kind.WEIGHT), of(Kind.WEIGHT))
