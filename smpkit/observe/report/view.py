"""What the template `page.html.j2` shows of runs: which rows and columns, in which order, and how two runs compare.

The page asks for nothing. A policy in it forbids every request, and every script and style but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any, Final

import jinja2
from markupsafe import Markup

from smpkit.config.words import duration
from smpkit.observe.report.data import KINDS, Content, first_last_and_busiest
from smpkit.observe.summary import RankSummary, parts_of
from smpkit.observe.summary_text import gained
from smpkit.units import amount, count, seconds
from smpkit.version import __version__

_SCRIPTS: Final = ("uplot.js", "schedule.js", "charts.js")
_STYLES: Final = ("uplot.css", "report.css")
_NOTHING: Final = "–"
_PARAMETERS: Final = "distribution.smdistributed.modelparallel.parameters."
_ALWAYS_DIFFERENT: Final = ("started", "command")


def page(contents: Sequence[Content]) -> str:
    """Return the report of one run, or of two beside each other, as HTML."""
    runs = [_RunView(content, index, len(contents)) for index, content in enumerate(contents)]
    settings = _rows([{setting.name: (setting.value, setting.origin) for setting in run.settings} for run in runs])
    environment = _rows([{name: (value, "") for name, value in run.environment.items()} for run in runs])
    return _template().render(
        runs=runs,
        title=" and ".join(run.folder for run in runs),
        failed=any(run.logs for run in runs),
        recorded=any(run.steps for run in runs),
        has_pace=any(run.main is not None and len(run.main.numbers) > 2 for run in runs),
        curves=list(dict.fromkeys(curve.name for run in runs for curve in run.curves if len(curve.steps) > 1)),
        compared=list(_compared(*runs)) if len(runs) == 2 else [],
        settings=[row for row in settings if row.is_set],
        defaults=[row for row in settings if not row.is_set],
        environment=environment,
        changed_settings=[row for row in settings if row.differs],
        changed_environment=[row for row in environment if row.differs and row.name not in _ALWAYS_DIFFERENT],
        data=_data(runs),
        scripts=[_asset(name) for name in _SCRIPTS],
        style="\n".join(map(_asset, _STYLES)),
        version=__version__,
    )


@dataclass(frozen=True)
class _Figure:
    """A number that stands out."""

    value: float | None
    """None where it was no finite number."""
    text: str
    more: str = ""
    """What there is to say about it."""
    is_share: bool = False


class _RunView:
    """A run's content, whose attributes are also those of the view, and what the template needs beside it."""

    def __init__(self, content: Content, index: int, num_runs: int) -> None:
        self.content = content
        self.letter = "AB"[index] if num_runs > 1 else ""
        self.label = f"{self.letter} · {content.folder}" if num_runs > 1 else content.folder
        summary = content.summary
        self.reason = "" if summary is None else summary.exit_reason
        self.ranks: Sequence[RankSummary] = () if summary is None else summary.ranks
        self.splits = self._chosen(lambda rank: rank.split.compute) if any(r.split.total for r in self.ranks) else []
        self.parts = parts_of(self.splits)
        held = [rank.most_bytes for rank in self.ranks]
        self.peaks = self._chosen(lambda rank: rank.most_bytes) if any(held) else []
        self.kinds = [kind for kind in KINDS if any(getattr(rank.peak, kind) for rank in self.peaks)]
        self.planned = {rank.rank: rank.planned for rank in self.ranks if rank.planned is not None}
        pipeline, tensor, data = content.degrees or (0, 0, 0)
        self.size = pipeline * tensor * data
        self.figures = dict(self._figures())
        memory = [view for step in content.steps for view in step.memory]
        self.has_memory = bool(memory)
        self.activations_unknown = any(None in view.bytes["activations"] for view in memory)
        self.moved = any(any(view.out) for view in memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.content, name)

    def _chosen(self, busy: Callable[[RankSummary], float]) -> list[RankSummary]:
        """Return the ranks for a table."""
        return [self.ranks[at] for at in first_last_and_busiest([busy(rank) for rank in self.ranks])]

    def bar(self, rank: RankSummary) -> Iterator[tuple[str, str, str]]:
        """Yield the parts of a bar 100 wide, which is the longest step of a rank: name, begin and width."""
        longest = max(rank.split.total for rank in self.splits)
        at = 0.0
        for part in self.parts:
            width = 100 * getattr(rank.split, part) / longest
            yield part, f"{at:.2f}", f"{width:.2f}"
            at += width

    @property
    def rest(self) -> str:
        """What is not drawn of many ranks and pipelines."""
        views = self.content.steps[0].pipelines
        pipelines = self.size // len(views[0]["ranks"])
        texts = [_left_out(views[0]["stages"], len(views[0]["ranks"]))]
        if pipelines > len(views):
            texts.append(f"{len(views)} of {pipelines} pipelines can be chosen: the first, the last and the slowest.")
        return " ".join(texts)

    def _figures(self) -> Iterator[tuple[str, _Figure]]:
        content, summary = self.content, self.content.summary
        for name in ("tokens", "samples"):
            rate = getattr(summary, f"{name}_per_s", None)
            if rate is not None:
                yield f"{name}/s", _Figure(rate, count(rate))
        if summary is not None and summary.flops_share is not None:
            yield "of peak FLOPs", _Figure(summary.flops_share, f"{summary.flops_share:.0%}", is_share=True)
        if summary is not None and summary.steps_per_s is not None:
            length = 1 / summary.steps_per_s
            yield "step", _Figure(length, seconds(length), "on average")
        if content.steps:
            view = content.steps[0].pipelines[0]
            if len(view["ranks"]) > 1:
                planned = "" if view["planned"] is None else f"planned {view['planned']['bubble']:.1%}"
                bubble = view["executed"]["bubble"]
                yield "bubble", _Figure(bubble, f"{bubble:.1%}", planned, is_share=True)
        if self.peaks:
            fullest = max(self.ranks, key=lambda rank: rank.most_bytes)
            more = f"of {amount(fullest.device_size)}" if fullest.device_size else "in tensors"
            most = fullest.most_bytes
            yield "peak memory", _Figure(most, amount(most), f"rank {fullest.rank}, {more}")
        if content.degrees is not None:
            pipeline, tensor, data = content.degrees
            degrees = f"{pipeline} pipeline × {tensor} tensor × {data} data"
            yield "ranks", _Figure(self.size, f"{self.size:,}", degrees)
        if summary is not None and self.ranks:
            yield "steps", _Figure(summary.steps, f"{summary.steps:,}", f"{duration(summary.seconds)} with the start")
        for curve in content.curves:
            first, last = curve.values[0], curve.values[-1]
            text = "not finite" if last is None else f"{last:.4g}"
            is_finite = first is not None and last is not None
            yield curve.name, _Figure(last, text, f"began at {first:.4g}" if is_finite else curve.broken)


def _left_out(shown: Sequence[object], num_ranks: int) -> str:
    if len(shown) == num_ranks:
        return ""
    return f"{len(shown)} of {num_ranks:,} ranks are shown: the first, the last and the busiest."


# --- two runs beside each other ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A setting or a part of the environment, with value and origin in each run."""

    name: str
    cells: list[tuple[str, str]]

    @property
    def short(self) -> str:
        """The name as people say it: without the path to the parameters."""
        return self.name.removeprefix(_PARAMETERS)

    @property
    def differs(self) -> bool:
        return len({value for value, _ in self.cells}) > 1

    @property
    def is_set(self) -> bool:
        """Whether somebody has set it in one of the runs."""
        return any(origin not in ("default", "") for _, origin in self.cells)


def _rows(known: Sequence[dict[str, tuple[str, str]]]) -> list[_Row]:
    names = dict.fromkeys(name for values in known for name in values)
    return [_Row(name, [values.get(name, (_NOTHING, "")) for values in known]) for name in names]


def _compared(before: _RunView, after: _RunView) -> Iterator[tuple[str, str, str, str]]:
    """Yield the figures of two runs: name, both values, and how they changed."""
    for name in dict.fromkeys((*before.figures, *after.figures)):
        first, second = before.figures.get(name), after.figures.get(name)
        change = _NOTHING if first is None or second is None else _change(first, second)
        yield name, first.text if first else _NOTHING, second.text if second else _NOTHING, change


def _change(first: _Figure, second: _Figure) -> str:
    """Say how much more the second is: in percent, as a multiple, or of a share in points."""
    if not first.value or second.value is None:
        return _NOTHING
    if first.is_share:
        return f"{100 * (second.value - first.value):+.1f} points"
    ratio = second.value / first.value
    if not 0.5 <= ratio < 2:
        return f"× {ratio:.3g}"
    percent = f"{ratio - 1:+.1%}"
    return "=" if percent in ("+0.0%", "-0.0%") else percent


# --- the page ---------------------------------------------------------------------------------------------------------


def _data(runs: Sequence[_RunView]) -> dict[str, Any]:
    """Return what the charts draw."""
    return {
        "runs": [
            {
                "label": run.letter,
                "curves": [asdict(curve) for curve in run.curves],
                "pace": None if run.main is None else [run.main.calls[:-1], run.main.per_second[:-1]],
                "steps": [asdict(step) for step in run.steps],
                "planned": {rank: asdict(kinds) for rank, kinds in run.planned.items()},
            }
            for run in runs
        ],
    }


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.PackageLoader("smpkit.observe.report", "."),
    )
    environment.globals["zip"] = zip
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
        share=RankSummary.share,
        tenths=lambda idle: f"{1e3 * idle:.1f}" if idle >= 5e-5 else _NOTHING,
        time=lambda when: f"{datetime.fromtimestamp(when).astimezone():%Y-%m-%d %H:%M %Z}",
    )
    return environment.get_template("page.html.j2")


def _asset(name: str) -> str:
    return (files("smpkit.observe.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(text: str) -> str:
    """Return how a policy names a script or style that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
