"""A step as it was executed, beside the one that was planned, in the terms of `smpkit.plan.schedule.simulate`.

Planned means: the actions of the schedule, each as long as it took on average in this step, over links that cost
nothing. What the executed step is longer by was lost to links, to waiting for ranks that were late, and to Python.

An action begins when what it needs has arrived. The wait before is idle time, although it happens inside the
microbatch's own code; so a span here is the recorded one without the time spent in receives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Final

from smpkit.observe.events import ActionSpan, EventsError, MessageSpan
from smpkit.observe.merge import RankStep, Run
from smpkit.plan.schedule.actions import Action, Costs, Schedule, from_json
from smpkit.plan.schedule.graph import Kind, ScheduleError, Segment, SegmentGraph
from smpkit.plan.schedule.simulate import ActionInterval, Cause, IdleInterval, Timeline, simulate

__all__ = ["ExecutedLinkUse", "ExecutedStep", "Matched", "executed_step", "match_messages"]

_SECONDS: Final = 1e-9


@dataclass(frozen=True)
class Matched:
    """A message at both ends."""

    sender: int
    """Global rank; so is `receiver`."""
    receiver: int
    send: MessageSpan
    receive: MessageSpan


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

    def _repr_html_(self) -> str:
        """Draw it in a notebook, below the planned step."""
        from smpkit.plan.svg import Drawing, svg

        both = {"planned": self.planned, "executed": self.executed}
        return svg(
            [
                Drawing(f"{name}: {1e3 * each.makespan_seconds:.1f} ms, bubble {each.bubble:.1%}", each)
                for name, each in both.items()
                if each is not None
            ]
        )

    def other_seconds(self, stage: int) -> float:
        """Return how long a stage was idle without waiting for anybody: Python between actions, and sending."""
        stalled = sum(stall.end_seconds - stall.start_seconds for stall in self.executed.stalls[stage])
        return max(0.0, self.executed.idle_seconds[stage] - stalled)


def _straight(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(each for each in actions if (each.kind, each.microbatch) != (Kind.FORWARD, 0) or not each.segment)


def executed_step(run: Run, number: int, pipeline: int = 0) -> ExecutedStep:
    """Return one step of one pipeline of a run.

    Args:
        number: one of `run.steps`.
        pipeline: index into `run.pipelines`.

    Raises:
        EventsError: the step's events contradict each other.
    """
    ranks = run.pipelines[pipeline]
    steps = [run.step(rank, number) for rank in ranks]
    begin = min((action.start_ns for step in steps for action in step.actions), default=0)
    matched = match_messages(run, number, ranks)
    schedule = _schedule(steps)
    spans = tuple(tuple(_spans(step, begin)) for step in steps)
    makespan = max((stage[-1].end_seconds for stage in spans if stage), default=0.0)
    stalls = tuple(tuple(_stalls(steps[i], spans[i], matched, ranks, i, begin, makespan)) for i in range(len(ranks)))
    return ExecutedStep(
        number=number,
        name=steps[0].span.name,
        ranks=ranks,
        step_seconds=_SECONDS * (max(s.span.end_ns for s in steps) - min(s.span.start_ns for s in steps)),
        planned=_planned(run, steps, ranks, spans),
        executed=Timeline(schedule, spans, stalls),
        links=tuple(_links(run, number, ranks)),
    )


# --- the actions ------------------------------------------------------------------------------------------------------


def _action(span: ActionSpan) -> Action:
    try:
        return Action(Kind(span.kind), span.segment, span.microbatch)
    except ValueError:
        raise EventsError(f"`{span.kind}` is no kind of action") from None


def _schedule(steps: Sequence[RankStep]) -> Schedule:
    """Return what ran as a schedule, so that it compares with the planned one."""
    actions = tuple(tuple(_action(span) for span in step.actions) for step in steps)
    segments = sorted({Segment(rank, each.segment) for rank, stage in enumerate(actions) for each in stage})
    kinds = {each.kind for stage in actions for each in stage}
    count = 1 + max((each.microbatch for stage in actions for each in stage), default=-1)
    try:
        graph = SegmentGraph(len(steps), tuple(segments), (), kinds != {Kind.FORWARD})
    except ScheduleError as error:
        raise EventsError(f"the recorded actions belong to no schedule: {error.message}") from None
    return Schedule("executed", graph, count, actions, (count,) * len(steps))


def _waits(step: RankStep, action: ActionSpan) -> list[MessageSpan]:
    """Return the receives inside an action."""
    return [
        message
        for message in step.messages
        if message.direction == "receive" and action.start_ns <= message.start_ns and message.end_ns <= action.end_ns
    ]


def _spans(step: RankStep, begin_ns: int) -> Iterator[ActionInterval]:
    for each in step.actions:
        waited = sum(message.end_ns - message.start_ns for message in _waits(step, each))
        start, end = _SECONDS * (each.start_ns + waited - begin_ns), _SECONDS * (each.end_ns - begin_ns)
        yield ActionInterval(_action(each), start, end)


# --- the waits --------------------------------------------------------------------------------------------------------


def match_messages(run: Run, number: int, ranks: Sequence[int]) -> list[Matched]:
    """Pair what was sent in a step with what was received, by ranks and tag; the n-th with the n-th."""
    sent: defaultdict[tuple[int, int, int], list[MessageSpan]] = defaultdict(list)
    received: defaultdict[tuple[int, int, int], list[MessageSpan]] = defaultdict(list)
    for rank in ranks:
        for message in run.step(rank, number).messages:
            if message.direction == "send":
                sent[rank, message.peer, message.tag].append(message)
            else:
                received[message.peer, rank, message.tag].append(message)
    return [
        Matched(sender, receiver, send, receive)
        for (sender, receiver, tag), sends in sent.items()
        for send, receive in zip(sends, received[sender, receiver, tag], strict=False)
    ]


def _stalls(
    step: RankStep,
    spans: Sequence[ActionInterval],
    matched: Sequence[Matched],
    ranks: Sequence[int],
    stage: int,
    begin_ns: int,
    makespan: float,
) -> Iterator[IdleInterval]:
    """Yield why a stage was idle: another stage still computed, or a message was on its way."""
    sent_at = {each.receive: each.send.start_ns for each in matched if each.receiver == ranks[stage]}
    stages = {rank: index for index, rank in enumerate(ranks)}
    for number, each in enumerate(step.actions):
        action = _action(each)
        if number == 0 and each.start_ns > begin_ns:
            yield IdleInterval(Cause.FILL, 0.0, _SECONDS * (each.start_ns - begin_ns), action, None)
        work = Cause.FORWARD if action.kind is Kind.FORWARD else Cause.BACKWARD
        if number == 0:
            work = Cause.FILL
        for wait in _waits(step, each):
            sent = min(max(sent_at.get(wait, wait.start_ns), wait.start_ns), wait.end_ns)
            for cause, start, end in ((work, wait.start_ns, sent), (Cause.LINK, sent, wait.end_ns)):
                if end > start:
                    times = (_SECONDS * (start - begin_ns), _SECONDS * (end - begin_ns))
                    yield IdleInterval(cause, *times, action, stages.get(wait.peer))
    end_seconds = spans[-1].end_seconds if spans else 0.0
    if end_seconds < makespan:
        yield IdleInterval(Cause.DRAIN, end_seconds, makespan, None, None)


def _links(run: Run, number: int, ranks: Sequence[int]) -> Iterator[ExecutedLinkUse]:
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
    found: defaultdict[tuple[Kind, Segment], list[float]] = defaultdict(list)
    for rank, stage in enumerate(spans):
        for span in stage:
            place = Segment(rank, span.action.segment)
            found[span.action.kind, place].append(span.end_seconds - span.start_seconds)
    means = {key: fmean(seconds) for key, seconds in found.items()}

    def of(*kinds: Kind) -> Mapping[Segment, float]:
        return {each: sum(means.get((kind, each), 0.0) for kind in kinds) for each in schedule.graph.segments}

    return Costs(of(Kind.FORWARD), of(Kind.BACKWARD, Kind.WEIGHT), of(Kind.WEIGHT))
