"""Draw plans as an SVG: schedules, a row per pipeline rank and time to the right, and bars of what adds up.

::

    planned   291.3 ms, bubble 33.9%
    stage 0   [F0][F1]            [B0     ][F2] ...
    stage 1       [F0][B0     ][F1][B1     ] ...

    memory of 24 GiB                           |
    stage 0   [parameters][optimizer][activ.]  | 22.7 GiB

The picture is 400 units wide, so its text is readable on a telephone. It has a background of its own, which follows the
reader's choice of light or dark, so it stands on any page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from smpkit.plan.memory import RankMemory
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.simulate import ActionInterval, Timeline

__all__ = ["Bar", "Bars", "Drawing", "html", "svg"]

_WIDTH: Final = 400
_LEFT: Final = 56
_RIGHT: Final = 8
_ROW: Final = 20
_GAP: Final = 3
_TITLE: Final = 22
_LEGEND: Final = 18
_BOTTOM: Final = 6
_LETTER: Final = 6.2
"""How wide a letter of the boxes is, about."""
_NUMBER: Final = 62
"""Room for a bar's number, right of it."""
_NAMES: Final = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "gradients of weights"}
_FILLS: Final = {
    "forward": "f",
    "backward": "b",
    "gradients of weights": "w",
    "parameters": "f",
    "gradients": "b",
    "optimizer": "w",
    "activations": "a",
    "gathered": "g",
    "reduction": "r",
    "workspace": "r",
    "weights in": "a",
    "gradients out": "g",
    "update": "w",
}
"""The class, and so the colour, of each kind of box."""
_STYLE: Final = """\
.bg{fill:#fff;stroke:#d0d7de}.row{fill:#eef1f4}.t{fill:#1f2328}.n{fill:#57606a}.l{fill:#fff}
.f{fill:#2563a8}.b{fill:#1a7f4b}.w{fill:#9a5b00}
@media (prefers-color-scheme:dark){.bg{fill:#161b22;stroke:#30363d}.row{fill:#242b33}.t{fill:#e6edf3}.n{fill:#9da7b1}
.l{fill:#0b0f14}.f{fill:#79b8ff}.b{fill:#6fdd8b}.w{fill:#f2b866}}
text{font:11px system-ui,sans-serif}.l{font-size:10px;text-anchor:middle}"""
_BAR_STYLE: Final = """
.a{fill:#7b3fa0}.g{fill:#a8345f}.r{fill:#5c6773}.v{text-anchor:end}.e{fill:#b3261e;text-anchor:end}.m{stroke:#b3261e}
@media (prefers-color-scheme:dark){.a{fill:#d2a8ff}.g{fill:#f4a1bd}.r{fill:#aab4be}.e{fill:#ff8a80}
.m{stroke:#ff8a80}}"""


@dataclass(frozen=True)
class Drawing:
    """A timeline and the line above it."""

    title: str
    timeline: Timeline


@dataclass(frozen=True)
class Bar:
    """One row of `Bars`."""

    name: str
    parts: Mapping[str, float]
    """By kind, in the order in which they are stacked; each kind is one of those with a colour."""


@dataclass(frozen=True)
class Bars:
    """Stacked bars with one scale, and a line at what they must not exceed."""

    title: str
    bars: Sequence[Bar]
    unit: str
    limit: float | None = None


def svg(drawings: Sequence[Drawing | Bars], description: str = "") -> str:
    """Return an SVG of drawings below each other; all timelines have the scale of the longest.

    Args:
        drawings: at least one.
        description: what a screen reader says; the titles, if empty.
    """
    timelines = [each.timeline for each in drawings if isinstance(each, Drawing)]
    longest = max((each.makespan_seconds for each in timelines), default=0.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest if longest else 0.0
    body: list[str] = []
    top = 4.0
    for number, each in enumerate(drawings):
        body += _timeline(each, top, scale) if isinstance(each, Drawing) else _bars(each, top)
        top += _height(each)
        if number + 1 == len(drawings) or isinstance(drawings[number + 1], Bars) or isinstance(each, Bars):
            for line in _legend(timelines if isinstance(each, Drawing) else each, top):
                body += line
                top += _LEGEND
    height = top + _BOTTOM
    said = escape(description or "; ".join(each.title for each in drawings))
    style = _STYLE + (_BAR_STYLE if len(timelines) < len(drawings) else "")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img">',
            f"<title>{said}</title>",
            f"<style>{style}</style>",
            f'<rect class="bg" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1:g}" rx="6"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _height(drawing: Drawing | Bars) -> float:
    if isinstance(drawing, Drawing):
        return _TITLE + len(drawing.timeline.spans) * (_ROW + _GAP) + 4
    lines = sum(_TITLE - 4 for bar in drawing.bars if _is_long(bar))
    return _TITLE + len(drawing.bars) * (_ROW + _GAP) + lines + 4


def _timeline(drawing: Drawing, top: float, scale: float) -> Iterator[str]:
    yield f'<text class="t" x="10" y="{top + 14:g}">{escape(drawing.title)}</text>'
    for stage, spans in enumerate(drawing.timeline.spans):
        y = top + _TITLE + stage * (_ROW + _GAP)
        yield f'<text class="n" x="10" y="{y + 14:g}">stage {stage}</text>'
        yield f'<rect class="row" x="{_LEFT}" y="{y:g}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}"/>'
        for span in spans:
            yield from _box(span, y, scale)


def _box(span: ActionInterval, y: float, scale: float) -> Iterator[str]:
    """Yield a box, and what fits into it: `F3`, or only the number of the microbatch."""
    x, width = _LEFT + span.start_seconds * scale, (span.end_seconds - span.start_seconds) * scale
    yield _filled(_NAMES[span.action.kind], x, y, width, str(span.action))
    for label in (str(span.action), str(span.action.microbatch)):
        if len(label) * _LETTER <= width:
            yield f'<text class="l" x="{x + width / 2:.2f}" y="{y + 13.5:g}">{label}</text>'
            return


def _filled(kind: str, x: float, y: float, width: float, said: str) -> str:
    shown = f'x="{x:.2f}" y="{y:g}" width="{max(width - 0.7, 0.3):.2f}" height="{_ROW}"'
    return f'<rect class="{_FILLS[kind]}" {shown} rx="1.5"><title>{escape(said)}</title></rect>'


def _is_long(bar: Bar) -> bool:
    """Return whether the name has no room left of the bar, and stands above it."""
    return len(bar.name) * _LETTER > _LEFT - 4


def _left(drawing: Bars) -> int:
    return 10 if all(map(_is_long, drawing.bars)) else _LEFT


def _bars(drawing: Bars, top: float) -> Iterator[str]:
    yield f'<text class="t" x="10" y="{top + 14:g}">{escape(drawing.title)}</text>'
    left = _left(drawing)
    room = _WIDTH - left - _RIGHT - _NUMBER
    scale = room / max([*(sum(bar.parts.values()) for bar in drawing.bars), drawing.limit or 0.0, 1e-12])
    y = top + _TITLE
    for bar in drawing.bars:
        if _is_long(bar):
            yield f'<text class="n" x="10" y="{y + 10:g}">{escape(bar.name)}</text>'
            y += _TITLE - 4
        else:
            yield f'<text class="n" x="10" y="{y + 14:g}">{escape(bar.name)}</text>'
        yield f'<rect class="row" x="{left}" y="{y:g}" width="{room}" height="{_ROW}"/>'
        x, total = float(left), sum(bar.parts.values())
        for kind, value in bar.parts.items():
            yield _filled(kind, x, y, value * scale, f"{kind} {_number(value, drawing.unit)}")
            x += value * scale
        exceeds = drawing.limit is not None and total > drawing.limit
        number = f'x="{_WIDTH - _RIGHT}" y="{y + 14:g}">{_number(total, drawing.unit)}'
        yield f'<text class="{"e" if exceeds else "n v"}" {number}</text>'
        if drawing.limit is not None:
            at = left + drawing.limit * scale
            yield f'<path class="m" d="M{at:.2f} {y - 2:g}v{_ROW + 4}" stroke-width="1.5" stroke-dasharray="3 2"/>'
        y += _ROW + _GAP


def _number(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}" if value < 9.995 else f"{value:.1f} {unit}"


def _legend(drawn: Sequence[Timeline] | Bars, top: float) -> Iterator[list[str]]:
    """Yield what each line of the legend has."""
    left = float(_left(drawn) if isinstance(drawn, Bars) else _LEFT)
    x, line = left, list[str]()
    for kind in _kinds(drawn):
        width = 14 + len(kind) * 5.8
        if x + width > _WIDTH - _RIGHT:
            yield line
            x, line, top = left, [], top + _LEGEND
        line.append(f'<rect class="{_FILLS[kind]}" x="{x:g}" y="{top + 4:g}" width="10" height="10" rx="1.5"/>')
        line.append(f'<text class="n" x="{x + 14:g}" y="{top + 13:g}">{kind}</text>')
        x += width + 14
    yield line


def _kinds(drawn: Sequence[Timeline] | Bars) -> Iterable[str]:
    if isinstance(drawn, Bars):
        return dict.fromkeys(kind for bar in drawn.bars for kind in bar.parts)
    seen = {span.action.kind for timeline in drawn for row in timeline.spans for span in row}
    return [_NAMES[kind] for kind in Kind if kind in seen]


def html(timeline: Timeline, memory: Sequence[RankMemory]) -> str:
    """Return a schedule as a drawing, and the memory of its stages as a table, for notebooks."""
    schedule = timeline.schedule
    title = f"{schedule.name}, {schedule.num_microbatches} microbatches, bubble {timeline.bubble:.1%}"
    drawing = svg([Drawing(title, timeline)])
    if not memory:
        return drawing
    rows = []
    for stage, each in enumerate(memory):
        gradients, optimizer = each.gradients_bytes + each.reduction_bytes, each.optimizer_bytes + each.masters_bytes
        sizes = (each.parameters_bytes, gradients, optimizer, each.activations_bytes, each.host_bytes, each.total_bytes)
        rows.append([str(stage), *map(_mebibytes, sizes)])
    names = ("stage", "parameters", "gradients", "optimizer", "activations", "on the host", "total")
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    caption = "<caption>MiB of each stage's fullest rank</caption>"
    return f"{drawing}<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _mebibytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:,.1f}"
