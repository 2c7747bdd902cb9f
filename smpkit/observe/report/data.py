"""Everything that a report shows of a run, as plain data: what `--json` prints, and what the page is made from.

Every file of a run may be missing or break off: the run may have been killed. `Content.missing` says what would have
recorded what is not there. Times within a step are seconds since the first action of its pipeline, so schedule, memory
and link share an axis.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from smpkit.config.confidential import hide_in_line
from smpkit.errors import SmpkitError
from smpkit.observe import runs
from smpkit.observe.events import Counter, find_events
from smpkit.observe.executed import ExecutedLinkUse, as_json, executed_step, links_of
from smpkit.observe.merge import Run, read_run
from smpkit.observe.summary import RunSummary, SummaryError, read_summary
from smpkit.observe.values import LOSS, read_values
from smpkit.units import amount

KINDS: Final = ("weights", "gradients", "states", "activations", "parked", "other", "offloaded")
"""What lies on the device, in the order in which it is stacked, and the one kind that lies on the host."""
_MOST_RANKS: Final = 16
_MOST_PIPELINES: Final = 8
_MOST_POINTS: Final = 2000
_MOST_LOGS: Final = 4
_TAIL_LINES: Final = 40
_TAIL_BYTES: Final = 64 << 10
_WARM_UP: Final = 3
"""Steps that are slower than others: the schedule is recorded, and caches fill."""
_STALL: Final = re.compile(r"offload stall of (.*), ns")
_FAILING: Final = re.compile(r"^Traceback \(most recent call last\)|^\w*(?:Error|Exception)\b", re.MULTILINE)


@dataclass(frozen=True)
class Curve:
    """One logged value over the steps."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    """None where it was not a finite number."""
    broken: str = ""
    """How often it was not one, and since when."""


@dataclass(frozen=True)
class StepTimes:
    """All recorded calls of one step function that every rank finished."""

    name: str
    trains: bool
    """Whether it runs backwards."""
    numbers: tuple[int, ...]
    """Of all step functions' calls, as `smpkit timeline --step` counts them."""
    begin_s: tuple[float, ...]
    """Since `smp.init()`; of the first rank that began."""
    seconds: tuple[float, ...]
    """Of the pipeline that took longest, from its first rank's begin to its last one's end."""
    calls: tuple[int, ...]
    """Of this function's calls alone."""

    @property
    def per_second(self) -> tuple[float | None, ...]:
        """Calls per second from the start of each step to that of the next one here; None for the last.

        Calls between count, whether they were recorded or not; evaluation and checkpoints count as time of the step
        before them.
        """
        places = pairwise(zip(self.calls, self.begin_s, strict=True))
        rates = ((n2 - n1) / (t2 - t1) if t2 > t1 else None for (n1, t1), (n2, t2) in places)
        return (*rates, None)


@dataclass(frozen=True)
class StepMemory:
    """What one rank holds over a step, and has moved to the host and back since it began; lists of one length."""

    rank: int
    at_seconds: tuple[float, ...]
    bytes: dict[str, tuple[int | None, ...]]
    """By kind, those on the host as `offloaded`; None where it was not measured."""
    out: tuple[int, ...]
    back: tuple[int, ...]


@dataclass(frozen=True)
class StepView:
    """One step in detail."""

    number: int
    why: str
    """`typical`, `slowest` or `first`."""
    pipelines: tuple[dict[str, Any], ...]
    """As `executed.as_json` has them; of many ranks the first, the last and the busiest."""
    memory: tuple[StepMemory, ...]


@dataclass(frozen=True)
class LayerStall:
    """How long one rank's compute has stood still for a layer's offloaded activations, in all recorded steps."""

    rank: int
    layer: str
    seconds: float
    steps: int
    """In how many steps."""


@dataclass(frozen=True)
class Setting:
    """One value of the job."""

    name: str
    value: str
    origin: str
    """`job.yaml:4`, `default`, or the option that set it."""


@dataclass(frozen=True)
class Warned:
    """A warning, and from where."""

    rank: int | None
    text: str


@dataclass(frozen=True)
class LogTail:
    """The last lines that a rank printed."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Content:
    """A run, ready to be shown."""

    name: str
    folder: str
    """Its name only: a report is sent to others."""
    summary: RunSummary | None
    degrees: tuple[int, int, int] | None
    """Of pipeline, tensor and data parallelism."""
    curves: tuple[Curve, ...]
    times: tuple[StepTimes, ...]
    main: StepTimes | None
    """The step function that the run is about."""
    steps: tuple[StepView, ...]
    """A typical one, the slowest and the first."""
    links: tuple[ExecutedLinkUse, ...]
    """Of the typical step."""
    stalls: tuple[LayerStall, ...]
    """The longest first."""
    settings: tuple[Setting, ...]
    environment: dict[str, str]
    warnings: tuple[Warned, ...]
    logs: tuple[LogTail, ...]
    """Of ranks that failed."""
    missing: dict[str, str]
    """By section, what would have recorded it."""


def content_of(run: runs.Run) -> Content:
    """Read the folder of a run, or any folder with events; raise SmpkitError if there is nothing of a run in it."""
    missing: dict[str, str] = {}
    events = _events(run.path, missing)
    summary = _summary(run.path, missing)
    curves = tuple(map(_thinned, _curves(run.path)))
    environment = _parsed(_text(run.path / runs.ENVIRONMENT))
    if events is None and summary is None and not curves and not environment:
        find_events(run.path)  # raises the sentence about events
    settings = tuple(Setting(name, _shown(value), origin) for name, value, origin in environment.pop("settings", ()))
    if not curves:
        missing["values"] = "No values: a step's `loss.reduce_mean()` records the loss, `smp.log` anything else."
    if not settings:
        missing["settings"] = "The settings were not recorded: `smpkit run JOB_FILE` does it."
    if not environment:
        missing["environment"] = "The environment was not recorded: `smpkit run JOB_FILE` does it."
    times = () if events is None else _step_times(events)
    main = _main_step(times)
    steps: tuple[StepView, ...] = ()
    links: tuple[ExecutedLinkUse, ...] = ()
    if events is not None and main is None:
        missing["events"] = "No step was finished by all ranks."
    if events is not None and main is not None:
        try:
            steps = tuple(_step_views(events, main))
            number = steps[0].number
            links = tuple(link for ranks in events.pipelines for link in links_of(events, number, ranks))
        except SmpkitError as error:
            missing["events"] = f"The events cannot be used: {error.message}."
    return Content(
        name=run.name,
        # The results of every managed job are in a folder called `run`.
        folder=run.label if run.label.startswith(run.name) else run.name,
        summary=summary,
        degrees=_degrees(events, summary),
        curves=curves,
        times=times,
        main=main,
        steps=steps,
        links=links,
        stalls=() if events is None else _layer_stalls(events),
        settings=settings,
        environment=dict(_flat(environment)),
        warnings=tuple(_warnings(run.path)),
        logs=tuple(_logs(run.path, summary)),
        missing=missing,
    )


def first_last_and_busiest(busy: Sequence[float], most: int = _MOST_RANKS) -> list[int]:
    """Return which of many to show, in order; all of them if they are not more than `most`."""
    last = len(busy) - 1
    if last < most:
        return list(range(len(busy)))
    busiest = sorted(range(1, last), key=lambda at: -busy[at])
    return sorted([0, *busiest[: most - 2], last])


# --- files ------------------------------------------------------------------------------------------------------------


def _events(folder: Path, missing: dict[str, str]) -> Run | None:
    try:
        find_events(folder)
    except SmpkitError:
        missing["events"] = (
            "No events were recorded: `smpkit run` records them from `smp.init()` on, and any other job where the "
            "variable `SMPKIT_EVENTS_DIR` names a folder on every host."
        )
        return None
    try:
        return read_run(folder)
    except SmpkitError as error:
        missing["events"] = f"The events cannot be used: {error.message}."
        return None


def _summary(folder: Path, missing: dict[str, str]) -> RunSummary | None:
    try:
        summary = read_summary(folder)
        return replace(summary, exit_reason=hide_in_line(summary.exit_reason))
    except SummaryError as error:
        is_there = (folder / runs.SUMMARY).exists()
        absent = "The run wrote no summary: it does at its end where `smpkit run` started it."
        missing["summary"] = f"{error.message}." if is_there else absent
        return None


def _curves(folder: Path) -> Iterator[Curve]:
    """Yield what was logged, the loss first."""
    points: defaultdict[str, dict[int, float | None]] = defaultdict(dict)
    for logged in read_values(folder):
        for name, value in logged.values.items():
            # A run that was resumed logs some steps again: the last time counts.
            points[name][logged.step] = value if math.isfinite(value) else None
    for name in sorted(points, key=lambda name: name != LOSS):
        steps = sorted(points[name])
        values = tuple(points[name][step] for step in steps)
        gaps = [step for step, value in zip(steps, values, strict=True) if value is None]
        often = "once, at" if len(gaps) == 1 else f"{len(gaps):,} times, first at"
        yield Curve(name, tuple(steps), values, f"NaN or infinite {often} step {gaps[0]:,}" if gaps else "")


def _thinned(curve: Curve) -> Curve:
    """Leave out points of a long curve, but never a lowest or a highest one, or where it was no number."""
    length = len(curve.steps)
    if length <= _MOST_POINTS:
        return curve
    kept = {0, length - 1}
    size = -(-length // (_MOST_POINTS // 2))
    for start in range(0, length, size):
        places = range(start, min(start + size, length))
        points = [(value, at) for at in places if (value := curve.values[at]) is not None]
        kept |= {min(points)[1], max(points)[1]} if points else {start}
    shown = sorted(kept)
    return replace(curve, steps=tuple(curve.steps[at] for at in shown), values=tuple(curve.values[at] for at in shown))


def _degrees(events: Run | None, summary: RunSummary | None) -> tuple[int, int, int] | None:
    """Return the degrees; a summary whose ranks came to none does not know them."""
    if events is not None:
        return events.mesh.pp_size, events.mesh.tp_size, events.mesh.rdp_size
    return (summary.pipeline, summary.tensor, summary.data) if summary is not None and summary.ranks else None


def _warnings(folder: Path) -> Iterator[Warned]:
    for line in _text(folder / runs.WARNINGS).splitlines():
        warning = _parsed(line)
        if warning:
            yield Warned(warning.get("rank"), hide_in_line(str(warning.get("text", ""))))


def _logs(folder: Path, summary: RunSummary | None) -> Iterator[LogTail]:
    """Yield the last lines of the ranks that failed; of a run that went well, of none."""
    reason = "" if summary is None else summary.exit_reason
    if reason in ("finished", "stopped"):
        return
    # rank-2 before rank-10, and the launcher's at the end.
    paths = sorted((folder / runs.LOGS).glob("*.log"), key=lambda path: (path.name < "rank", len(path.name), path.name))
    tails = {path.stem: _text(path, _TAIL_BYTES) for path in paths}
    named = [f"rank-{rank}" for rank in re.findall(r"\brank (\d+)", reason)]
    failing = [name for name in tails if name in named]
    failing += [name for name, tail in tails.items() if name not in named and _FAILING.search(tail)]
    if not failing and reason.startswith("failed"):
        failing = [name for name in tails if name == "launcher"]
    for name in failing[:_MOST_LOGS]:
        yield LogTail(name, tuple(map(hide_in_line, tails[name].rstrip().splitlines()[-_TAIL_LINES:])))


def _text(path: Path, most_bytes: int | None = None) -> str:
    """Return a file, or the end of it; of one that cannot be read, nothing."""
    try:
        with path.open("rb") as file:
            if most_bytes is not None:
                file.seek(max(0, path.stat().st_size - most_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _parsed(text: str) -> dict[str, Any]:
    """Return a JSON object; an empty one for what is none, as a line that breaks off."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a mapping with their paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, amount(value) if path.endswith("_bytes") and value else _shown(value)


def _shown(value: Any) -> str:
    """Return a value of a file as the page has it."""
    if value in (None, {}, []):
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- steps ------------------------------------------------------------------------------------------------------------


def _step_times(run: Run) -> tuple[StepTimes, ...]:
    """Return the steps of a run by name, in the order of their first call."""
    rows: defaultdict[str, list[tuple[int, float, float, int]]] = defaultdict(list)
    trains: set[str] = set()
    for number in run.steps:
        # Replicas wait for each other where they average gradients only; in evaluation one may be seconds ahead.
        pipelines = [[run.step(rank, number).span for rank in ranks] for ranks in run.pipelines]
        begins = [min(span.start_ns for span in spans) for spans in pipelines]
        ends = [max(span.end_ns for span in spans) for spans in pipelines]
        length = max(end - begin for begin, end in zip(begins, ends, strict=True))
        first = run.step(0, number)
        name = first.span.name
        call = first.span.call if first.span.call >= 0 else number
        rows[name].append((number, min(begins) * 1e-9, length * 1e-9, call))
        if any(action.kind != "F" for action in first.actions):
            trains.add(name)
    return tuple(StepTimes(name, name in trains, *zip(*calls, strict=True)) for name, calls in rows.items())


def _main_step(times: Sequence[StepTimes]) -> StepTimes | None:
    """Return, of the step functions that train, else of all, the one where most time went."""
    candidates = [step for step in times if step.trains] or times
    return max(candidates, key=lambda step: sum(step.seconds), default=None)


def _chosen_steps(times: StepTimes) -> dict[int, str]:
    """Return a typical step, the slowest after the first ones, and the first; each once, with the reason."""
    rows = list(zip(times.seconds, times.numbers, strict=True))
    settled = rows[_WARM_UP:] or rows
    middle = median(seconds for seconds, _ in settled)
    typical = min(settled, key=lambda row: (abs(row[0] - middle), row[1]))
    chosen = {typical[1]: "typical"}
    for number, why in ((max(settled)[1], "slowest"), (times.numbers[0], "first")):
        chosen.setdefault(number, why)
    return chosen


def _step_views(run: Run, main: StepTimes) -> Iterator[StepView]:
    chosen = _chosen_steps(main)
    typical = next(iter(chosen))
    spans = [[run.step(rank, typical).span for rank in ranks] for ranks in run.pipelines]
    lengths = [max(span.end_ns - span.start_ns for span in pipeline) for pipeline in spans]
    shown = first_last_and_busiest(lengths, _MOST_PIPELINES)
    for number, why in chosen.items():
        steps = [executed_step(run, number, pipeline) for pipeline in shown]
        stages = [first_last_and_busiest([-idle for idle in step.executed.idle_seconds]) for step in steps]
        memory = [
            _memory(run, number, step.ranks[stage], run.begin_ns(number, pipeline))
            for pipeline, step, stages_of_step in zip(shown, steps, stages, strict=True)
            for stage in stages_of_step
        ]
        pipelines = tuple(map(as_json, steps, stages))
        yield StepView(number, why, pipelines, tuple(timeline for timeline in memory if timeline is not None))


def _memory(run: Run, number: int, rank: int, begin_ns: int) -> StepMemory | None:
    """Return the memory of a rank over a step; None if it was not recorded."""
    samples = run.step(rank, number).samples
    if not samples:
        return None
    held = {kind: [getattr(sample, kind) for sample in samples] for kind in KINDS}
    return StepMemory(
        rank=rank,
        at_seconds=tuple(round((sample.at_ns - begin_ns) * 1e-9, 7) for sample in samples),
        bytes={kind: tuple(None if size < 0 else size for size in sizes) for kind, sizes in held.items()},
        out=tuple(sample.bytes_out for sample in samples),
        back=tuple(sample.bytes_back for sample in samples),
    )


def _layer_stalls(run: Run) -> tuple[LayerStall, ...]:
    waits: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, log in enumerate(run.logs):
        for event in log.events:
            if isinstance(event, Counter) and (name := _STALL.fullmatch(event.name)):
                waits[rank, name[1]].append(event.value)
    stalls = [LayerStall(*place, sum(ns) * 1e-9, len(ns)) for place, ns in waits.items()]
    return tuple(sorted(stalls, key=lambda stall: (-stall.seconds, stall.rank, stall.layer)))
