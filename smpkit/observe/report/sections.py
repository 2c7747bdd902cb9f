"""The sections of the page. Its tables need no script to be read; charts are boxes that a script fills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from smpkit.config.words import duration
from smpkit.observe.report.content import Content
from smpkit.observe.report.figures import Matrix
from smpkit.observe.report.markup import Html, bar, code, element, figures, joined, legend, options, path, table
from smpkit.observe.report.settings import Setting, differences
from smpkit.observe.summary import KindBytes, RankSummary, RunSummary
from smpkit.observe.summary_text import gain_line
from smpkit.units import amount, count, seconds

__all__ = ["Section", "headline", "label_of", "per_step", "sections"]

_PARTS: Final = ("compute", "bubble", "communication", "stall", "optimizer", "other")
_KINDS: Final = ("weights", "gradients", "states", "activations", "parked", "other", "offloaded")
_MOST_ROWS: Final = 64
_MOST_STALLS: Final = 12
_LARGEST_TABLE: Final = 16
"""The most ranks whose matrix is a table of numbers; that of more is a picture."""
_HEAT: Final = 4
_NOTHING: Final = "–"


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    body: Html


def sections(contents: Sequence[Content]) -> list[Section]:
    """Return all sections of a report of one run or two, in order."""
    found = [Section("summary", "Summary", _both(contents, _summary))]
    if len(contents) == 2:
        found.insert(0, Section("differences", "Differences", _differences(contents[0], contents[1])))
    found += [
        Section("values", "Loss and other values", _values(contents)),
        Section("throughput", "Throughput", _throughput(contents)),
        Section("schedule", "Schedule", _each(contents, _schedule)),
        Section("memory", "Memory over a step", _both(contents, _memory)),
        Section("link", "Link with the host", _both(contents, _link)),
        Section("communication", "Communication", _both(contents, _communication)),
        Section("settings", "Configuration", _settings(contents)),
        Section("environment", "Environment", _environment(contents)),
        Section("output", "Warnings and output", _both(contents, _output)),
    ]
    return found


def label_of(contents: Sequence[Content], index: int) -> str:
    """Return what a run is called in a report of several."""
    return f"{'AB'[index]} · {contents[index].folder}"


def _both(contents: Sequence[Content], make: Callable[[Content, int], Html]) -> Html:
    """Return the same of each run, side by side where there is room."""
    if len(contents) == 1:
        return make(contents[0], 0)
    parts = [element("div", element("h3", label_of(contents, at)), make(each, at)) for at, each in enumerate(contents)]
    return element("div", *parts, class_="pair two")


def _each(contents: Sequence[Content], make: Callable[[Content, int], Html]) -> Html:
    """Return the same of each run, one below the other: on one axis of time they compare."""
    if len(contents) == 1:
        return make(contents[0], 0)
    return joined(
        element("div", element("h3", label_of(contents, at)), make(each, at)) for at, each in enumerate(contents)
    )


def _missing(content: Content, *names: str) -> Html | None:
    """Return the sentences about what was not recorded."""
    texts = [content.missing[name] for name in names if name in content.missing]
    return joined(element("p", code(text), class_="note") for text in texts) if texts else None


# --- summary ----------------------------------------------------------------------------------------------------------


def _summary(content: Content, _: int) -> Html:
    summary = content.summary
    if summary is None:
        return joined([_missing(content, "summary", "events"), _plan(content)])
    gains = [element("li", code(_ticked(gain_line(each)))) for each in summary.gains]
    notes = [element("p", each, class_="note") for each in summary.notes]
    parts = [figures(_key_figures(content, summary)), element("h3", "What it gained") if gains else None]
    parts += [element("ul", *gains) if gains else None, *notes]
    if any(rank.split.total for rank in summary.ranks):
        parts += [element("h3", "Where an average step's time goes"), _split(summary)]
    if any(_held(rank) for rank in summary.ranks):
        parts += [element("h3", "Peak memory by kind, beside the plan"), _peaks(content, summary)]
    else:
        parts.append(_plan(content))
    return joined(parts)


def _plan(content: Content) -> Html | None:
    """Return what is planned, of a run whose ranks have not measured anything yet."""
    stages = [(stage, kinds) for stage, kinds in enumerate(content.stages) if kinds is not None]
    if not stages:
        return None
    shown = [kind for kind in _KINDS if any(getattr(kinds, kind) for _, kinds in stages)]
    rows = [[str(stage), *(amount(getattr(kinds, kind)) for kind in shown)] for stage, kinds in stages[:_MOST_ROWS]]
    names = ["on the host" if kind == "offloaded" else kind for kind in shown]
    return joined([element("h3", "Memory by kind, as planned"), table(["stage", *names], rows, "fullest rank of each")])


def _ticked(line: str) -> str:
    feature, colon, rest = line.partition(":")
    return f"`{feature}`{colon}{rest}" if colon else line


def _key_figures(content: Content, summary: RunSummary) -> Iterator[tuple[str, str, str]]:
    rates = [
        ("tokens/s", summary.tokens_per_s),
        ("samples/s", summary.samples_per_s),
        ("steps/s", summary.steps_per_s),
    ]
    for name, value in rates:
        if value is not None:
            yield name, count(value), ""
    if summary.flops_share is not None:
        yield "of peak FLOPs", f"{summary.flops_share:.0%}", ""
    if content.steps and content.steps[0].pipelines:
        view = content.steps[0].pipelines[0]
        yield "step", seconds(view.step_ms / 1e3), f"typical: step {content.steps[0].number}"
        planned = "" if view.planned_bubble is None else f"planned {view.planned_bubble:.1%}"
        if len(view.ranks) > 1:
            yield "bubble", f"{view.executed_bubble:.1%}", planned
    if summary.ranks:
        fullest = max(summary.ranks, key=_held)
        of = f" of {amount(fullest.device_size)}" if fullest.device_size else ""
        yield "peak memory", amount(_held(fullest)), f"rank {fullest.rank}{of}"
    yield (
        "ranks",
        f"{summary.world_size:,}",
        f"{summary.pipeline} pipeline × {summary.tensor} tensor × {summary.data} data",
    )
    yield "steps", f"{summary.steps:,}", f"in {duration(summary.seconds)}"
    for curve in content.curves[:1]:
        first, last = curve.values[0], curve.values[-1]
        if first is None or last is None:
            yield curve.name, "not finite" if last is None else f"{last:.4g}", curve.broken
        else:
            yield curve.name, f"{last:.4g}", f"began at {first:.4g}"


def _held(rank: RankSummary) -> int:
    """Return the most bytes on the device; without one, what tensors hold and not what Python does."""
    if rank.device_size is not None and rank.device_peak is not None:
        return rank.device_peak
    return rank.peak.on_device - rank.peak.other


def _split(summary: RunSummary) -> Html:
    ranks = summary.ranks[:_MOST_ROWS]
    parts = [part for part in _PARTS if any(getattr(rank.split, part) >= 5e-4 * rank.split.total > 0 for rank in ranks)]
    longest = max(rank.split.total for rank in ranks)
    rows = []
    for rank in ranks:
        split = rank.split
        shares = [(part, getattr(split, part)) for part in parts]
        said = ", ".join(f"{part} {seconds(value)}" for part, value in shares)
        classes = [("rest" if part == "other" else part, value) for part, value in shares]
        cells = [_two(seconds(value), f"{value / split.total:.0%}" if split.total else "") for _, value in shares]
        drawn = element("td", bar(classes, longest, f"rank {rank.rank}: {said}"), class_="wide")
        rows.append([str(rank.rank), drawn, *cells, seconds(split.total)])
    colours = legend([("rest" if part == "other" else part, part) for part in parts])
    return joined(
        [
            colours,
            table(["rank", "", *parts, "step"], rows, _left_out(summary)),
        ]
    )


def _left_out(summary: RunSummary) -> str:
    return f"the first {_MOST_ROWS} of {len(summary.ranks)} ranks" if len(summary.ranks) > _MOST_ROWS else ""


def _two(value: str, more: str) -> Html:
    return element("td", value, element("small", more) if more else None)


def _peaks(content: Content, summary: RunSummary) -> Html:
    ranks = summary.ranks[:_MOST_ROWS]
    plans = dict(zip((rank.rank for rank in summary.ranks), content.planned, strict=False))
    kinds = [kind for kind in _KINDS if any(getattr(rank.peak, kind) for rank in ranks)]
    rows = []
    for rank in ranks:
        planned = plans.get(rank.rank)
        cells = [_kind_cell(rank.peak, planned, kind) for kind in kinds]
        most = amount(rank.device_peak) if rank.device_peak else _NOTHING
        rows.append([str(rank.rank), *cells, _two(most, f"of {amount(rank.device_size)}" if rank.device_size else "")])
    said = "most at any time of each kind" + ("; below it, the plan" if any(plans.values()) else "")
    note = None
    if not any(plans.values()):
        note = element(
            "p",
            code("No plan knows this model: `smpkit plan JOB_FILE --model MODULE:FACTORY` makes one."),
            class_="note",
        )
    if all(rank.device_size is None for rank in ranks):
        more = "Without a GPU, `other` and `at once` are those of the whole process, with Python and its libraries."
        note = joined([element("p", code(more), class_="note"), note])
    shown = ["on the host" if kind == "offloaded" else kind for kind in kinds]
    return joined([table(["rank", *shown, "at once"], rows, said), note])


def _kind_cell(peak: KindBytes, planned: KindBytes | None, kind: str) -> Html:
    value = getattr(peak, kind)
    if planned is None or kind == "other":
        return element("td", amount(value))
    expected = getattr(planned, kind)
    over = value > 1.1 * expected and expected > 0
    return element("td", amount(value), element("small", f"plan {amount(expected)}"), class_="over" if over else None)


# --- over steps -------------------------------------------------------------------------------------------------------


def _differences(before: Content, after: Content) -> Html:
    found = differences(before.settings, after.settings)
    parts = []
    if found:
        rows = [
            [element("th", path(each.name), scope="row"), each.before or _NOTHING, each.after or _NOTHING]
            for each in found
        ]
        parts.append(table(["setting", f"A · {before.folder}", f"B · {after.folder}"], rows, "", "text"))
    elif before.settings and after.settings:
        parts.append(element("p", "Both ran with the same settings.", class_="note"))
    else:
        parts += [_missing(each, "settings") or Html("") for each in (before, after)]
    changed = [
        [name, before.environment.get(name, _NOTHING), after.environment.get(name, _NOTHING)]
        for name in dict.fromkeys((*before.environment, *after.environment))
        if before.environment.get(name) != after.environment.get(name) and name not in ("started", "command")
    ]
    if changed:
        parts += [element("h3", "Environment"), table(["", "A", "B"], changed, "", "text")]
    compared = list(_compared(before, after))
    if compared:
        parts += [element("h3", "Figures"), table(["", "A", "B", "B to A"], compared)]
    return joined(parts)


def _compared(before: Content, after: Content) -> Iterator[list[str]]:
    one, other = before.summary, after.summary
    if one is None or other is None:
        return

    def fullest(summary: RunSummary) -> float | None:
        return max((_held(rank) for rank in summary.ranks), default=0) or None

    def longest(summary: RunSummary) -> float | None:
        return max((rank.split.total for rank in summary.ranks), default=0.0) or None

    lines: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
        ("tokens/s", one.tokens_per_s, other.tokens_per_s, count),
        ("samples/s", one.samples_per_s, other.samples_per_s, count),
        ("steps/s", one.steps_per_s, other.steps_per_s, count),
        ("step", longest(one), longest(other), seconds),
        ("bubble", _bubble(before), _bubble(after), lambda value: f"{value:.1%}"),
        ("peak memory of a rank", fullest(one), fullest(other), lambda value: amount(round(value))),
        ("steps", one.steps, other.steps, lambda value: f"{value:,.0f}"),
    ]
    lines += [(f"last {name}", *pair, lambda value: f"{value:.4g}") for name, pair in _last_values(before, after)]
    for name, first, second, text in lines:
        if first is None and second is None:
            continue
        shown = [_NOTHING if each is None else text(each) for each in (first, second)]
        yield [name, *shown, _change(first, second, points=name == "bubble")]


def _change(first: float | None, second: float | None, *, points: bool) -> str:
    """Say how much more the second is: in percent, or of a share in points."""
    if first is None or second is None or not first:
        return _NOTHING
    if points:
        return f"{100 * (second - first):+.1f} points"
    return f"{second / first - 1:+.1%}" if second != first else "="


def _bubble(content: Content) -> float | None:
    views = [view for step in content.steps[:1] for view in step.pipelines[:1] if len(view.ranks) > 1]
    return views[0].executed_bubble if views else None


def _last_values(before: Content, after: Content) -> Iterator[tuple[str, tuple[float | None, float | None]]]:
    ends = [{curve.name: curve.values[-1] for curve in each.curves} for each in (before, after)]
    for name in ends[0]:
        if name in ends[1]:
            yield name, (ends[0][name], ends[1][name])


def _values(contents: Sequence[Content]) -> Html:
    names = list(dict.fromkeys(curve.name for each in contents for curve in each.curves))
    notes = [_missing(each, "values") for each in contents if not each.curves][:1]
    boxes = [element("figure", element("figcaption", name), _chart("values", name=name)) for name in names]
    for at, each in enumerate(contents):
        of = f" of {label_of(contents, at)}" if len(contents) > 1 else ""
        broken = [f"`{curve.name}`{of} was {curve.broken}." for curve in each.curves if curve.broken]
        notes += [element("p", code(line), class_="note") for line in broken]
    return joined([element("div", *boxes, class_="panels") if boxes else None, *notes])


def _throughput(contents: Sequence[Content]) -> Html:
    units = [unit for unit in ("tokens", "samples") if all(per_step(each.summary, unit) for each in contents)]
    shown = [each for each in contents if each.main is not None and len(each.main.numbers) > 1]
    notes = [_missing(each, "events") for each in contents if each.main is None]
    if not shown:
        return joined([*notes, element("p", "No two steps were recorded.", class_="note") if not notes else None])
    units = ["steps", *units[:1]]
    boxes = [
        element("figure", element("figcaption", f"{unit} per second"), _chart("throughput", unit=unit))
        for unit in units
    ]
    rows = [
        [
            times.name if len(contents) == 1 else f"{'AB'[at]} · {times.name}",
            f"{len(times.numbers):,}",
            seconds(sorted(times.seconds)[len(times.seconds) // 2]),
            seconds(max(times.seconds)),
        ]
        for at, each in enumerate(contents)
        for times in each.times
    ]
    lines = table(["step function", "recorded", "median", "longest"], rows, "recorded calls of the step functions")
    return joined([element("div", *boxes, class_="panels"), lines, *notes])


def per_step(summary: RunSummary | None, unit: str) -> float | None:
    """Return how many samples or tokens a step has."""
    if summary is None or not summary.steps_per_s:
        return None
    rate = summary.tokens_per_s if unit == "tokens" else summary.samples_per_s
    return None if rate is None else rate / summary.steps_per_s


def _chart(kind: str, class_: str | None = None, **data: str | int) -> Html:
    """Return the box of a chart, with what the script needs to know about it."""
    given: dict[str, str | int] = {f"data_{key}": value for key, value in data.items()}
    return element("div", class_=class_, data_chart=kind, **given)


# --- one step ---------------------------------------------------------------------------------------------------------


def _schedule(content: Content, index: int) -> Html:
    if not content.steps:
        return _missing(content, "events") or Html("")
    choices = options(
        [f"{step.why}: step {step.number}, {seconds(step.pipelines[0].step_ms / 1e3)}" for step in content.steps]
    )
    tools = [element("label", "step ", element("select", choices, data_choice=index))]
    pipelines = content.steps[0].pipelines
    if len(pipelines) > 1:
        names = [f"ranks {', '.join(map(str, view.ranks))}" for view in pipelines]
        tools.append(element("label", "pipeline ", element("select", options(names), data_pipeline=index)))
    colours = legend(
        [
            ("F", "forward"),
            ("B", "backward"),
            *([("W", "gradients of weights")] if _splits(content) else []),
            ("wait", "waits for another rank"),
            ("linkwait", "waits for the link"),
            ("work", "reduces gradients, or other work"),
        ]
    )
    view = pipelines[0]
    rows = [
        [str(rank), *(_nonzero(view.idle_ms[stage][cause]) for cause in view.idle_ms[stage])]
        for stage, rank in enumerate(view.ranks)
    ]
    idle = table(["rank", *view.idle_ms[0]], rows, f"idle milliseconds of step {view.step}, by cause")
    return joined(
        [
            element("div", *tools, class_="tools"),
            colours,
            _chart("schedule", run=index),
            element("details", element("summary", "Idle time by cause"), idle),
        ]
    )


def _splits(content: Content) -> bool:
    return any(
        action[0] == "W" for view in content.steps[0].pipelines for row in view.executed for action in row.actions
    )


def _nonzero(value: float) -> str:
    return f"{value:.1f}" if value >= 0.05 else _NOTHING


def _memory(content: Content, index: int) -> Html:
    if not any(step.memory for step in content.steps):
        return _missing(content, "memory", "events") or Html("")
    unknown = any(None in view.bytes["activations"] for step in content.steps for view in step.memory)
    return joined(
        [
            element(
                "p",
                "Of the step chosen above. Click a name in a legend to leave it out; ",
                code("`other` is what was there before the step."),
                class_="note",
            ),
            element("p", "Activations are unknown: this C library does not count.", class_="note") if unknown else None,
            _chart("memory", "panels", run=index),
        ]
    )


def _link(content: Content, index: int) -> Html:
    moved = any(any(view.out) for step in content.steps for view in step.memory)
    if not moved and not content.stalls:
        if content.main is None:
            return _missing(content, "events") or Html("")
        said = "Nothing was offloaded: `offload_activations: true` does it to the inputs of checkpointed layers."
        return element("p", code(said), class_="note")
    rows = [
        [str(stall.rank), stall.layer, seconds(stall.seconds), f"{stall.steps:,}", seconds(stall.seconds / stall.steps)]
        for stall in content.stalls[:_MOST_STALLS]
    ]
    stalls = element("p", "Compute never waited for an offloaded activation in the recorded steps.", class_="note")
    if rows:
        stalls = table(
            ["rank", "layer", "stalled", "steps", "a step"], rows, "compute waited for these layers", "stalls"
        )
    boxes = _chart("link", "panels", run=index) if moved else None
    return joined([boxes, element("h3", "Stalls by layer"), stalls])


def _communication(content: Content, index: int) -> Html:
    found = content.matrix
    if found is None:
        return _missing(content, "events") or Html("")
    total = sum(map(sum, found.num_bytes))
    if not total:
        return element("p", "No rank sent a message to another one: there is no pipeline.", class_="note")
    messages = sum(map(sum, found.num_messages))
    step = content.steps[0].number
    said = f"Step {step}: {messages:,} messages, {amount(total)} between stages. Collectives, such as the reduction of "
    said += "gradients, are not among them."
    shown = _matrix(found) if found.ranks <= _LARGEST_TABLE else _chart("matrix", run=index)
    pairs = sorted(
        (
            (-found.waited_ms[sender][receiver], sender, receiver)
            for sender in range(found.ranks)
            for receiver in range(found.ranks)
            if found.num_messages[sender][receiver]
        ),
    )[:_MOST_STALLS]
    rows = [
        [
            f"{sender} → {receiver}",
            f"{found.num_messages[sender][receiver]:,}",
            amount(found.num_bytes[sender][receiver]),
            seconds(-waited / 1e3),
        ]
        for waited, sender, receiver in pairs
    ]
    waits = table(["link", "messages", "bytes", "receiver waited"], rows, "the longest waits")
    return joined([element("p", said, class_="note"), shown, waits])


def _matrix(found: Matrix) -> Html:
    most = max(map(max, found.num_bytes))
    rows = []
    for sender, row in enumerate(found.num_bytes):
        cells = []
        for receiver, num_bytes in enumerate(row):
            heat = -(-_HEAT * num_bytes // most) if most else 0
            text = amount(num_bytes) if num_bytes else "·"
            messages = found.num_messages[sender][receiver]
            title = f"rank {sender} to rank {receiver}: {messages:,} messages, {num_bytes:,} bytes"
            cells.append(element("td", text, class_=f"heat{heat}", title=title))
        rows.append([f"from {sender}", *cells])
    return table(
        ["", *(f"to {rank}" for rank in range(found.ranks))], rows, "bytes from rank to rank in a step", "matrix"
    )


# --- what it ran with -------------------------------------------------------------------------------------------------


def _settings(contents: Sequence[Content]) -> Html:
    """Return what was set, and below it the defaults; of two runs a column for each."""
    known = [{each.short: each for each in content.settings} for content in contents]
    notes = [_missing(content, "settings") for content in contents if not content.settings]
    names = dict.fromkeys(name for each in known for name in each)
    if not names:
        return joined(notes[:1])
    given = [name for name in names if any(name in each and each[name].origin != "default" for each in known)]
    defaults = [name for name in names if name not in set(given)]
    head = ["setting", *_columns(contents, "value", "from")]
    return joined(
        [
            table(head, [_setting_row(name, known) for name in given], "", "text"),
            element(
                "details",
                element("summary", f"{len(defaults)} defaults"),
                table(head, [_setting_row(name, known) for name in defaults], "", "text"),
            )
            if defaults
            else None,
            *notes[:1],
        ]
    )


def _columns(contents: Sequence[Content], *alone: str) -> list[str]:
    return list(alone) if len(contents) == 1 else [label_of(contents, at) for at in range(len(contents))]


def _setting_row(name: str, known: Sequence[dict[str, Setting]]) -> list[str]:
    """Return a setting's name, and for each run its value and where that came from."""
    full = next(each[name].name for each in known if name in each)
    changed = len({each[name].value if name in each else None for each in known}) > 1
    cells = []
    for each in known:
        setting = each.get(name)
        shown = _NOTHING if setting is None else setting.value
        origin = "" if setting is None else setting.origin
        if len(known) == 1:
            cells += [element("td", shown), element("td", origin)]
        else:
            cells.append(element("td", shown, element("small", origin), class_="changed" if changed else None))
    return [element("th", path(name), title=full, scope="row"), *cells]


def _environment(contents: Sequence[Content]) -> Html:
    notes = [_missing(content, "environment") for content in contents if not content.environment]
    names = dict.fromkeys(name for content in contents for name in content.environment)
    if not names:
        return joined(notes[:1])
    rows = []
    for name in names:
        values = [content.environment.get(name, _NOTHING) for content in contents]
        changed = "changed" if len(set(values)) > 1 else None
        rows.append([name, *(element("td", element("code", value), class_=changed) for value in values)])
    return joined([table(["", *_columns(contents, "")], rows, "", "text"), *notes[:1]])


def _output(content: Content, _: int) -> Html:
    warnings = [element("li", _rank(each.rank), each.text) for each in content.warnings]
    logs = [
        joined([element("h3", f"last lines of {log.name}"), element("pre", "\n".join(log.lines), tabindex=0)])
        for log in content.logs
    ]
    if not warnings and not logs:
        return element("p", "No warnings, and no rank failed.", class_="note")
    return joined([element("ul", *warnings) if warnings else None, *logs])


def _rank(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}: "


def headline(content: Content) -> Html:
    """Return when a run began, how long it took, and how it ended."""
    summary = content.summary
    if summary is None:
        return element("p", "a run without a summary", class_="lead")
    began = datetime.fromtimestamp(summary.started).astimezone()
    reason = summary.exit_reason
    tone = "good" if reason == "finished" else "bad" if reason.startswith("failed") else ""
    chip = None if reason == "unknown" else element("span", reason, class_=f"chip {tone}".strip())
    return element("p", f"{began:%Y-%m-%d %H:%M %Z}, {duration(summary.seconds)} ", chip, class_="lead")
