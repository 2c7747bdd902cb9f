"""Figures of a run from its events: pure functions, whose results are what the charts draw.

Times in a step are milliseconds since the first action of its pipeline: schedule, memory and link share an axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from smpkit.observe.events import Counter, MemorySample
from smpkit.observe.executed import ExecutedStep, executed_step
from smpkit.observe.merge import RankStep, Run
from smpkit.observe.summary import KindBytes, RankSummary, RunSummary, Split
from smpkit.plan.schedule.simulate import Cause, Timeline

__all__ = [
    "DEVICE_KINDS",
    "Chosen",
    "LayerStall",
    "Matrix",
    "PipelineView",
    "RankMemoryView",
    "Row",
    "StepTimes",
    "chosen_steps",
    "layer_stalls",
    "main_step",
    "matrix",
    "memory_view",
    "peaks",
    "pipeline_view",
    "step_times",
    "summary_of_events",
]

DEVICE_KINDS: Final = ("weights", "gradients", "states", "activations", "parked", "other")
"""What lies on the device, in the order in which it is stacked."""
_WARM_UP: Final = 3
"""Steps that are slower than others: the schedule is recorded, and caches fill."""
_MOST_SPLIT: Final = 40
"""How many steps the average split of a step is taken of."""
_STALL: Final = "offload stall of "
_MS: Final = 1e-6


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """All calls of one step function that every rank finished."""

    name: str
    trains: bool
    """Whether it runs backwards."""
    numbers: tuple[int, ...]
    begin_s: tuple[float, ...]
    """Since `smp.init()`; of the first rank that began."""
    seconds: tuple[float, ...]
    """From the first rank's begin to the last one's end."""

    @property
    def per_second(self) -> tuple[float | None, ...]:
        """The steps per second from the begin of each step to that of the next one here; None for the last.

        Steps between count, whether they were recorded or not; a checkpoint counts as part of the step before it.
        """
        places = list(zip(self.numbers, self.begin_s, strict=True))
        rates = [
            (number - before) / (at - since) if at > since else None
            for (before, since), (number, at) in pairwise(places)
        ]
        return (*rates, None)


def step_times(run: Run) -> tuple[StepTimes, ...]:
    """Return the steps of a run by name, in the order of their first call."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    trains: set[str] = set()
    for number in run.steps:
        steps = [run.step(rank, number) for rank in range(run.mesh.size)]
        begin = min(step.span.start_ns for step in steps)
        end = max(step.span.end_ns for step in steps)
        name = steps[0].span.name
        found.setdefault(name, []).append((number, begin * 1e-9, (end - begin) * 1e-9))
        if any(action.kind != "F" for action in steps[0].actions):
            trains.add(name)
    return tuple(
        StepTimes(name, name in trains, *(tuple(column) for column in zip(*rows, strict=True)))
        for name, rows in found.items()
    )


def main_step(times: Sequence[StepTimes]) -> StepTimes | None:
    """Return the step function that the run is about: of those that train, else of all, where most time went."""
    some = [each for each in times if each.trains] or list(times)
    return max(some, key=lambda each: sum(each.seconds), default=None)


@dataclass(frozen=True)
class Chosen:
    """A step that is shown."""

    number: int
    why: str


def chosen_steps(times: StepTimes) -> tuple[Chosen, ...]:
    """Return a typical step, the slowest after the first ones, and the first; each once."""
    rows = list(zip(times.seconds, times.numbers, strict=True))
    settled = rows[_WARM_UP:] or rows
    middle = median(seconds for seconds, _ in settled)
    typical = min(settled, key=lambda row: (abs(row[0] - middle), row[1]))
    picked = {typical[1]: "typical", max(settled)[1]: "slowest", rows[0][1]: "first"}
    picked = {typical[1]: "typical"} | {number: why for number, why in picked.items() if number != typical[1]}
    return tuple(Chosen(number, why) for number, why in picked.items())


# --- schedule ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One stage in time."""

    actions: tuple[tuple[str, int, int, float, float], ...]
    """Kind, segment, microbatch, begin and end."""
    idle: tuple[tuple[str, float, float, int | None], ...]
    """Cause, begin, end, and the stage that it waits for."""
    works: tuple[tuple[str, float, float], ...] = ()
    """Anything else: what, begin, end."""


@dataclass(frozen=True)
class PipelineView:
    """One step of one pipeline, as planned and as run."""

    step: int
    name: str
    ranks: tuple[int, ...]
    step_ms: float
    num_microbatches: int
    follows_plan: bool
    planned: tuple[Row, ...] | None
    planned_ms: float | None
    planned_bubble: float | None
    executed: tuple[Row, ...]
    executed_ms: float
    executed_bubble: float
    idle_ms: tuple[dict[str, float], ...]
    """By stage and cause."""


def pipeline_view(run: Run, number: int, pipeline: int) -> PipelineView:
    """Return a step of a pipeline for the drawing of its schedule.

    Raises:
        EventsError: the step's events contradict each other.
    """
    step = executed_step(run, number, pipeline)
    begin = _begin(run, number, step.ranks)
    works = [
        tuple((work.name, *_span(work.start_ns, work.end_ns, begin)) for work in run.step(rank, number).works)
        for rank in step.ranks
    ]
    executed, planned = step.executed, step.planned
    return PipelineView(
        step=number,
        name=step.name,
        ranks=step.ranks,
        step_ms=_round(step.step_seconds * 1e3),
        num_microbatches=executed.schedule.num_microbatches,
        follows_plan=step.follows_plan,
        planned=None if planned is None else _rows(planned, [()] * len(step.ranks)),
        planned_ms=None if planned is None else _round(planned.makespan_seconds * 1e3),
        planned_bubble=None if planned is None else round(planned.bubble, 4),
        executed=_rows(executed, works),
        executed_ms=_round(executed.makespan_seconds * 1e3),
        executed_bubble=round(executed.bubble, 4),
        idle_ms=tuple(_idle(step, stage) for stage in range(len(step.ranks))),
    )


def _rows(timeline: Timeline, works: Sequence[tuple[tuple[str, float, float], ...]]) -> tuple[Row, ...]:
    return tuple(
        Row(
            tuple(
                (
                    each.action.kind.value,
                    each.action.segment,
                    each.action.microbatch,
                    _round(each.start_seconds * 1e3),
                    _round(each.end_seconds * 1e3),
                )
                for each in spans
            ),
            tuple(
                (str(each.cause), _round(each.start_seconds * 1e3), _round(each.end_seconds * 1e3), each.waits_for)
                for each in timeline.stalls[stage]
            ),
            works[stage],
        )
        for stage, spans in enumerate(timeline.spans)
    )


def _idle(step: ExecutedStep, stage: int) -> dict[str, float]:
    found = {str(cause): _round(1e3 * seconds) for cause, seconds in step.executed.stall_seconds(stage).items()}
    return {**found, "other": _round(1e3 * step.other_seconds(stage))}


def _begin(run: Run, number: int, ranks: Iterable[int]) -> int:
    """Return when the first action of a pipeline begins, or its step where it has none."""
    steps = [run.step(rank, number) for rank in ranks]
    starts = [action.start_ns for step in steps for action in step.actions]
    return min(starts or [step.span.start_ns for step in steps])


def _span(start_ns: int, end_ns: int, begin_ns: int) -> tuple[float, float]:
    return _round((start_ns - begin_ns) * _MS), _round((end_ns - begin_ns) * _MS)


def _round(milliseconds: float) -> float:
    """Round to microseconds: shorter numbers in the file."""
    return round(milliseconds, 3)


# --- memory and the link ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemoryView:
    """What one rank holds over a step, and has moved; lists of one length."""

    rank: int
    at_ms: tuple[float, ...]
    bytes: dict[str, tuple[int | None, ...]]
    """By kind; None where it was not measured."""
    offloaded: tuple[int, ...]
    """On the host."""
    out: tuple[int, ...]
    """Moved to the host since the step began."""
    back: tuple[int, ...]


def memory_view(run: Run, number: int, rank: int) -> RankMemoryView | None:
    """Return the memory of a rank over a step; None if it was not recorded."""
    samples = run.step(rank, number).samples
    if not samples:
        return None
    begin = _begin(run, number, next(ranks for ranks in run.pipelines if rank in ranks))
    return RankMemoryView(
        rank,
        tuple(_round((each.at_ns - begin) * _MS) for each in samples),
        {kind: tuple(_known(getattr(each, kind)) for each in samples) for kind in DEVICE_KINDS},
        tuple(each.offloaded for each in samples),
        tuple(each.bytes_out for each in samples),
        tuple(each.bytes_back for each in samples),
    )


def _known(num_bytes: int) -> int | None:
    return None if num_bytes < 0 else num_bytes


def peaks(run: Run, rank: int) -> tuple[KindBytes, int] | None:
    """Return the most bytes of each kind, and of all kinds on the device at one moment; None if not recorded."""
    samples = [event for event in run.logs[rank].events if isinstance(event, MemorySample)]
    if not samples:
        return None
    kinds = {kind: max(0, *(getattr(each, kind) for each in samples)) for kind in (*DEVICE_KINDS, "offloaded")}
    return KindBytes(**kinds), max(_on_device(each) for each in samples)


def _on_device(sample: MemorySample) -> int:
    return sum(max(0, getattr(sample, kind)) for kind in DEVICE_KINDS)


@dataclass(frozen=True)
class LayerStall:
    """How long one rank's compute has stood still for a layer's offloaded activations."""

    rank: int
    layer: str
    seconds: float
    steps: int
    """In how many steps."""


def layer_stalls(run: Run) -> tuple[LayerStall, ...]:
    """Return the stalls of offloading over the whole run, the longest first."""
    found: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, log in enumerate(run.logs):
        for event in log.events:
            if isinstance(event, Counter) and event.name.startswith(_STALL):
                found[rank, event.name.removeprefix(_STALL).removesuffix(", ns")].append(event.value)
    stalls = [LayerStall(rank, layer, sum(ns) * 1e-9, len(ns)) for (rank, layer), ns in found.items()]
    return tuple(sorted(stalls, key=lambda stall: (-stall.seconds, stall.rank, stall.layer)))


# --- communication ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """Messages between ranks in some steps: sender by receiver."""

    ranks: int
    num_bytes: tuple[tuple[int, ...], ...]
    num_messages: tuple[tuple[int, ...], ...]
    waited_ms: tuple[tuple[float, ...], ...]
    """How long the receiver waited for them, whatever the reason."""


def matrix(run: Run, numbers: Iterable[int]) -> Matrix:
    """Return what ranks have sent to each other in these steps."""
    size = run.mesh.size
    num_bytes, num_messages = _square(size), _square(size)
    waited = [[0.0] * size for _ in range(size)]
    for number in numbers:
        for rank in range(size):
            for message in run.step(rank, number).messages:
                if message.direction == "send":
                    num_bytes[rank][message.peer] += message.num_bytes
                    num_messages[rank][message.peer] += 1
                else:
                    waited[message.peer][rank] += (message.end_ns - message.start_ns) * _MS
    rounded = tuple(tuple(map(_round, row)) for row in waited)
    return Matrix(size, tuple(map(tuple, num_bytes)), tuple(map(tuple, num_messages)), rounded)


def _square(size: int) -> list[list[int]]:
    return [[0] * size for _ in range(size)]


# --- summary ----------------------------------------------------------------------------------------------------------


def summary_of_events(run: Run, name: str) -> RunSummary:
    """Return the summary of a run that wrote none, as far as its events tell."""
    times = main_step(step_times(run))
    header = run.logs[0].header
    mesh = run.mesh
    seconds = max((step.span.end_ns for step in _last_steps(run)), default=0) * 1e-9
    common = {"world_size": mesh.size, "pipeline": mesh.pp_size, "tensor": mesh.tp_size, "data": mesh.rdp_size}
    started = header.anchor_unix_ns * 1e-9
    if times is None:
        notes = ("no step was finished by all ranks",)
        return RunSummary(name, started, seconds, 0, "unknown", ranks=_ranks(run, {}), notes=notes, **common)  # type: ignore[arg-type]
    settled = times.numbers[_WARM_UP:] or times.numbers
    return RunSummary(
        name,
        started,
        seconds,
        len(times.numbers),
        "unknown",
        steps_per_s=_pace(times),
        ranks=_ranks(run, _splits(run, times, settled)),
        notes=("from the events: the run wrote no summary, so optimizer and loading of data count as other",),
        **common,  # type: ignore[arg-type]
    )


def _last_steps(run: Run) -> list[RankStep]:
    return [run.step(rank, run.steps[-1]) for rank in range(run.mesh.size)] if run.steps else []


def _pace(times: StepTimes) -> float | None:
    """Return the median pace: pauses between some steps do not count."""
    rates = [each for each in times.per_second[_WARM_UP:] if each] or [each for each in times.per_second if each]
    return median(rates) if rates else None


def _ranks(run: Run, splits: dict[int, Split]) -> tuple[RankSummary, ...]:
    found = []
    for rank, log in enumerate(run.logs):
        kinds, most = peaks(run, rank) or (KindBytes(), None)
        found.append(RankSummary(rank, log.header.host, splits.get(rank, Split()), kinds, most))
    return tuple(found)


def _splits(run: Run, times: StepTimes, numbers: Sequence[int]) -> dict[int, Split]:
    """Return where each rank's time goes in an average of some steps."""
    some = numbers[:: max(1, len(numbers) // _MOST_SPLIT)]
    pace = _pace(times)
    sums: dict[int, list[float]] = {rank: [0.0] * 4 for rank in range(run.mesh.size)}
    lengths: dict[int, float] = dict.fromkeys(sums, 0.0)
    for number in some:
        for pipeline, ranks in enumerate(run.pipelines):
            step = executed_step(run, number, pipeline)
            for stage, rank in enumerate(ranks):
                span = run.step(rank, number).span
                lengths[rank] += (span.end_ns - span.start_ns) * 1e-9 / len(some)
                for index, seconds in enumerate(_parts(run, step, stage)):
                    sums[rank][index] += seconds / len(some)
    found = {}
    for rank, (compute, bubble, communication, stall) in sums.items():
        total = max(1 / pace if pace else 0.0, lengths[rank])
        rest = max(0.0, total - compute - bubble - communication - stall)
        found[rank] = Split(compute, bubble, communication, stall, 0.0, rest)
    return found


def _parts(run: Run, step: ExecutedStep, stage: int) -> tuple[float, float, float, float]:
    """Return seconds of compute, bubble, communication and stall of one stage."""
    recorded = run.step(step.ranks[stage], step.number)
    stall = communication = 0.0
    for work in recorded.works:
        if work.name.startswith("wait for the activation"):
            stall += (work.end_ns - work.start_ns) * 1e-9
        else:
            communication += (work.end_ns - work.start_ns) * 1e-9
    waits = step.executed.stall_seconds(stage)
    link = waits.pop(Cause.LINK)
    # A rank that has finished before others reduces its gradients meanwhile.
    waits[Cause.DRAIN] = max(0.0, waits[Cause.DRAIN] - communication)
    busy = sum(span.end_seconds - span.start_seconds for span in step.executed.spans[stage])
    return max(0.0, busy - stall), sum(waits.values()), communication + link, stall
