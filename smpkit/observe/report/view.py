"""What the template `page.html.j2` shows of runs: which rows and columns, in which order, and how two runs compare.

The page asks for nothing. A policy in it forbids every request, and every script and style but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from functools import cache
from importlib import metadata
from importlib.resources import files
from statistics import median
from typing import Any, Final

import jinja2
from markupsafe import Markup

from smpkit.config.words import duration
from smpkit.observe.executed import ExecutedLinkUse
from smpkit.observe.report.data import DEVICE_KINDS, MOST_RANKS, Content, first_last_and_busiest
from smpkit.observe.summary import Gain, RankSummary, RunSummary, Split
from smpkit.observe.summary_text import gained
from smpkit.units import amount, count, seconds

__all__ = ["page"]

_SCRIPTS: Final = ("uplot.js", "schedule.js", "charts.js")
_STYLES: Final = ("uplot.css", "report.css")
_KINDS: Final = (*DEVICE_KINDS, "offloaded")
_PARTS: Final = tuple(field.name for field in fields(Split))
_HEAT: Final = 4
_NOTHING: Final = "–"
_PARAMETERS: Final = "distribution.smdistributed.modelparallel.parameters."
_ALWAYS_DIFFERENT: Final = ("started", "command")


def page(contents: Sequence[Content]) -> str:
    """Return the report of one run, or of two beside each other, as HTML."""
    runs = [_RunView(content, index, len(contents)) for index, content in enumerate(contents)]
    failed = any(run.logs for run in runs)
    unit = _unit(runs)
    settings, environment = _setting_rows(runs), _environment_rows(runs)
    given = [row for row in settings if any(cell["origin"] not in ("default", "") for cell in row["cells"])]
    return _template().render(
        runs=runs,
        labels=[run.label for run in runs],
        title=" and ".join(run.folder for run in runs),
        failed=failed,
        compared=list(_compared(*runs)) if len(runs) == 2 else [],
        changed_settings=[row for row in settings if row["differs"]],
        given_settings=given,
        default_settings=[row for row in settings if row not in given],
        changed_environment=[row for row in environment if row["differs"] and row["name"] not in _ALWAYS_DIFFERENT],
        all_environment=environment,
        recorded=any(run.steps for run in runs),
        curves=list(dict.fromkeys(curve.name for run in runs for curve in run.curves if len(curve.steps) > 1)),
        unit=unit,
        data=_data(runs, unit),
        scripts=[_asset(name) for name in _SCRIPTS],
        style="\n".join(map(_asset, _STYLES)),
        version=_version(),
    )


class _RunView:
    """A run's content, and what the template needs of it beside that."""

    def __init__(self, content: Content, index: int, num_runs: int) -> None:
        self.content = content
        self.letter = "AB"[index] if num_runs > 1 else ""
        self.label = f"{self.letter} · {content.folder}" if num_runs > 1 else content.folder
        summary = content.summary
        self.ranks: Sequence[RankSummary] = () if summary is None else summary.ranks
        self.gains: Sequence[Gain] = () if summary is None else summary.gains
        self.notes: Sequence[str] = () if summary is None else summary.notes
        reason = "" if summary is None else summary.exit_reason
        self.tone = "good" if reason == "finished" else "bad" if reason.startswith("failed") else ""
        self.splits = self._chosen(lambda rank: rank.split.compute) if any(r.split.total for r in self.ranks) else []
        self.parts = [part for part in _PARTS if any(_share(rank, part) >= 5e-4 for rank in self.splits)]
        self.peaks = self._chosen(_held) if any(map(_held, self.ranks)) else []
        self.kinds = [kind for kind in _KINDS if any(getattr(rank.peak, kind) for rank in self.peaks)]
        self.planned = {rank.rank: rank.planned for rank in self.ranks if rank.planned is not None}
        memory = [view for step in content.steps for view in step.memory]
        self.has_memory = bool(memory)
        self.activations_unknown = any(None in view.bytes["activations"] for view in memory)
        self.moved = any(any(view.out) for view in memory)
        most = max((link.num_bytes for link in content.links), default=0)
        self.matrix_names = [f"to {rank}" for rank in range(self.size)]
        self.matrix = list(_matrix(content.links, self.size, most)) if most and self.size <= MOST_RANKS else []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.content, name)

    @property
    def size(self) -> int:
        """The number of ranks; 0 where nothing knows it."""
        pipeline, tensor, data = self.content.degrees or (0, 0, 0)
        return pipeline * tensor * data

    def _chosen(self, busy: Callable[[RankSummary], float]) -> list[RankSummary]:
        return [self.ranks[at] for at in first_last_and_busiest([*map(busy, self.ranks)])]

    def plan_of(self, rank: RankSummary, kind: str) -> int | None:
        planned = rank.planned
        return None if planned is None or kind == "other" else getattr(planned, kind)

    def bar(self, rank: RankSummary) -> Iterator[tuple[str, str, str]]:
        """Yield the parts of a bar 100 wide, which is the longest step of a rank."""
        longest = max(each.split.total for each in self.splits)
        at = 0.0
        for part in self.parts:
            width = 100 * getattr(rank.split, part) / longest
            yield part, f"{at:.2f}", f"{width:.2f}"
            at += width

    @property
    def colours(self) -> list[tuple[str, str]]:
        """What the colours of the schedule mean."""
        spans = [
            span for view in self.content.steps[0].pipelines for rank in view["executed"]["spans"] for span in rank
        ]
        splits = any(action.startswith("W") for action, *_ in spans)
        names = [("F", "forward"), ("B", "backward"), *([("W", "gradients of weights")] if splits else [])]
        waits = [("wait", "waits for another rank"), ("linkwait", "waits for the link")]
        return [*names, *waits, ("work", "reduces gradients, or other work")]

    @property
    def rest(self) -> str:
        """What is not drawn of many ranks and pipelines."""
        views = self.content.steps[0].pipelines
        texts = []
        if len(views[0]["ranks"]) > len(views[0]["stages"]):
            texts.append(_left_out(views[0]["stages"], len(views[0]["ranks"])))
        pipelines = self.size // len(views[0]["ranks"])
        if pipelines > len(views):
            texts.append(f"{len(views)} of {pipelines} pipelines can be chosen: the first, the last and the slowest.")
        return " ".join(texts)

    @property
    def figures(self) -> Iterator[tuple[str, str, str]]:
        """The numbers that stand out: name, number, and what there is to say about it."""
        content, summary = self.content, self.content.summary
        for name, rate in _rates(summary):
            yield name, count(rate), ""
        if summary is not None and summary.flops_share is not None:
            yield "of peak FLOPs", f"{summary.flops_share:.0%}", ""
        if content.steps:
            view = content.steps[0].pipelines[0]
            yield "step", seconds(view["step_seconds"]), f"typical: step {view['step']}"
            if len(view["ranks"]) > 1:
                planned = "" if view["planned"] is None else f"planned {view['planned']['bubble']:.1%}"
                yield "bubble", f"{view['executed']['bubble']:.1%}", planned
        if self.peaks:
            fullest = max(self.ranks, key=_held)
            more = f"of {amount(fullest.device_size)}" if fullest.device_size else "without Python and libraries"
            yield "peak memory", amount(_held(fullest)), f"rank {fullest.rank}, {more}"
        if content.degrees is not None:
            pipeline, tensor, data = content.degrees
            yield "ranks", f"{self.size:,}", f"{pipeline} pipeline × {tensor} tensor × {data} data"
        if summary is not None and self.ranks:
            yield "steps", f"{summary.steps:,}", f"in {duration(summary.seconds)}"
        for curve in content.curves[:1]:
            first, last = curve.values[0], curve.values[-1]
            if first is None or last is None:
                yield curve.name, "not finite" if last is None else f"{last:.4g}", curve.broken
            else:
                yield curve.name, f"{last:.4g}", f"began at {first:.4g}"


def _rates(summary: RunSummary | None) -> list[tuple[str, float]]:
    names = ("tokens", "samples", "steps")
    rates = [] if summary is None else [(f"{name}/s", getattr(summary, f"{name}_per_s")) for name in names]
    return [(name, rate) for name, rate in rates if rate is not None]


def _share(rank: RankSummary, part: str) -> float:
    return float(getattr(rank.split, part)) / rank.split.total if rank.split.total else 0.0


def _held(rank: RankSummary) -> int:
    """Return the most bytes on the device; without one, what tensors hold and not what Python does."""
    if rank.device_size is not None and rank.device_peak is not None:
        return rank.device_peak
    return rank.peak.on_device - rank.peak.other


def _left_out(shown: Sequence[object], num_ranks: int) -> str:
    if len(shown) == num_ranks:
        return ""
    return f"{len(shown)} of {num_ranks:,} ranks are shown: the first, the last and the busiest."


def _matrix(
    links: Sequence[ExecutedLinkUse], size: int, most: int
) -> Iterator[tuple[int, list[tuple[ExecutedLinkUse | None, int]]]]:
    """Yield for each sender its links to all receivers, with how much of the most bytes they carried, in quarters."""
    by_pair = {(link.sender, link.receiver): link for link in links}
    for sender in range(size):
        row = [by_pair.get((sender, receiver)) for receiver in range(size)]
        yield sender, [(link, 0 if link is None else -(-_HEAT * link.num_bytes // most)) for link in row]


# --- two runs beside each other ---------------------------------------------------------------------------------------


def _compared(before: _RunView, after: _RunView) -> Iterator[tuple[str, str, str, str]]:
    """Yield figures of two runs: name, both values, and how they changed."""
    lines: list[tuple[str, Callable[[_RunView], float | None], Callable[[float], str]]] = [
        *((f"{unit}/s", _rate_of(f"{unit}/s"), count) for unit in ("tokens", "samples", "steps")),
        ("step", lambda run: max((rank.split.total for rank in run.ranks), default=0) or None, seconds),
        ("bubble", _bubble, lambda value: f"{value:.1%}"),
        ("peak memory of a rank", lambda run: max(map(_held, run.ranks), default=0) or None, amount),
        ("steps", lambda run: run.summary.steps if run.ranks else None, lambda value: f"{value:,.0f}"),
        *((f"last {name}", _last_value(name), lambda value: f"{value:.4g}") for name in _shared_curves(before, after)),
    ]
    for name, figure, text in lines:
        first, second = figure(before), figure(after)
        if first is not None or second is not None:
            shown = [_NOTHING if value is None else text(value) for value in (first, second)]
            yield name, shown[0], shown[1], _change(first, second, is_share=name == "bubble")


def _rate_of(name: str) -> Callable[[_RunView], float | None]:
    return lambda run: dict(_rates(run.summary)).get(name)


def _bubble(run: _RunView) -> float | None:
    views = [step.pipelines[0] for step in run.content.steps[:1]]
    return views[0]["executed"]["bubble"] if views and len(views[0]["ranks"]) > 1 else None


def _shared_curves(before: _RunView, after: _RunView) -> list[str]:
    names = {curve.name for curve in after.content.curves}
    return [curve.name for curve in before.content.curves if curve.name in names]


def _last_value(name: str) -> Callable[[_RunView], float | None]:
    return lambda run: next(curve.values[-1] for curve in run.curves if curve.name == name)


def _change(first: float | None, second: float | None, *, is_share: bool) -> str:
    """Say how much more the second is: in percent, as a multiple, or of a share in points."""
    if first is None or second is None or not first:
        return _NOTHING
    if is_share:
        return f"{100 * (second - first):+.1f} points"
    ratio = second / first
    if not 0.5 <= ratio < 2:
        return f"× {ratio:.3g}"
    percent = f"{ratio - 1:+.1%}"
    return "=" if percent in ("+0.0%", "-0.0%") else percent


def _setting_rows(runs: Sequence[_RunView]) -> list[dict[str, Any]]:
    """Return the settings by name, with a cell of value and origin for each run."""
    known = [{setting.name: setting for setting in run.settings} for run in runs]
    rows = []
    for name in dict.fromkeys(name for settings in known for name in settings):
        found = [settings.get(name) for settings in known]
        cells = [{"value": s.value, "origin": s.origin} if s else {"value": _NOTHING, "origin": ""} for s in found]
        differs = len({cell["value"] for cell in cells}) > 1
        rows.append({"name": name, "short": name.removeprefix(_PARAMETERS), "cells": cells, "differs": differs})
    return rows


def _environment_rows(runs: Sequence[_RunView]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for run in runs for name in run.environment)
    rows = [(name, [run.environment.get(name, _NOTHING) for run in runs]) for name in names]
    return [{"name": name, "cells": cells, "differs": len(set(cells)) > 1} for name, cells in rows]


# --- what the charts draw ---------------------------------------------------------------------------------------------


def _unit(runs: Sequence[_RunView]) -> str | None:
    """Return what throughput is counted in; None if no two steps were recorded."""
    if not any(run.main is not None and len(run.main.numbers) > 1 for run in runs):
        return None
    return next((unit for unit in ("tokens", "samples") if all(_per_step(run.summary, unit) for run in runs)), "steps")


def _per_step(summary: RunSummary | None, unit: str) -> float | None:
    """Return how many samples, tokens or steps a step has."""
    rates = dict(_rates(summary))
    if unit == "steps":
        return 1.0
    return rates[f"{unit}/s"] / rates["steps/s"] if rates.get("steps/s") and f"{unit}/s" in rates else None


def _data(runs: Sequence[_RunView], unit: str | None) -> dict[str, Any]:
    has_device = any(rank.device_size is not None for run in runs for rank in run.ranks)
    return {
        # Without a GPU it is Python and its libraries, beside which nothing else would be seen.
        "hidden": [] if has_device else ["other"],
        "runs": [
            {
                "label": run.letter,
                "curves": [asdict(curve) for curve in run.curves],
                "pace": _pace(run, unit),
                "steps": [asdict(step) for step in run.steps],
                "planned": {rank: asdict(kinds) for rank, kinds in run.planned.items()},
            }
            for run in runs
        ],
    }


def _pace(run: _RunView, unit: str | None) -> dict[str, Any] | None:
    if unit is None or run.main is None:
        return None
    scale = _per_step(run.summary, unit) or 1.0
    rates = [(number, rate) for number, rate in zip(run.main.numbers, run.main.per_second, strict=True) if rate]
    return {
        "numbers": [number for number, _ in rates],
        "per_second": [float(f"{rate * scale:.5g}") for _, rate in rates],
    }


# --- the template -----------------------------------------------------------------------------------------------------


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.PackageLoader("smpkit.observe.report", "."),
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters.update(
        amount=lambda size: _NOTHING if size is None else amount(size),
        breakable=lambda name: Markup("<wbr>").join(re.split(r"(?<=[._])(?=.)", name)),
        duration=duration,
        gained=gained,
        kind=lambda kind: "on the host" if kind == "offloaded" else kind,
        left_out=lambda shown, run: _left_out(shown, len(run.ranks)),
        median=median,
        percent=lambda share: f"{share:.0%}",
        policy=_policy,
        seconds=seconds,
        time=lambda when: f"{datetime.fromtimestamp(when).astimezone():%Y-%m-%d %H:%M %Z}",
        zip=lambda one, other: list(zip(one, other, strict=True)),
    )
    return environment.get_template("page.html.j2")


@cache
def _asset(name: str) -> str:
    return (files("smpkit.observe.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(text: str) -> str:
    """Return how a policy names a script or style that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _version() -> str:
    try:
        return metadata.version("smpkit")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "of a checkout"
