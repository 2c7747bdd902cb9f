"""Draw schedules as an SVG, a row per pipeline rank and time to the right.

::

    planned   291.3 ms, bubble 33.9%
    stage 0   [F0][F1]            [B0     ][F2] ...
    stage 1       [F0][B0     ][F1][B1     ] ...

The picture is 400 units wide, so its text is readable on a telephone. It has a background of its own, which follows the
reader's choice of light or dark, so it stands on any page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from xml.sax.saxutils import escape

from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.simulate import ActionInterval, Timeline

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
_NAMES: Final = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "gradients of weights"}
_FILLS: Final = {Kind.FORWARD: "f", Kind.BACKWARD: "b", Kind.WEIGHT: "w"}
"""The class, and so the colour, of each kind of box."""
_STYLE: Final = """\
.bg{fill:#fff;stroke:#d0d7de}.row{fill:#eef1f4}.t{fill:#1f2328}.n{fill:#57606a}.l{fill:#fff}
.f{fill:#2563a8}.b{fill:#1a7f4b}.w{fill:#9a5b00}
@media (prefers-color-scheme:dark){.bg{fill:#161b22;stroke:#30363d}.row{fill:#242b33}.t{fill:#e6edf3}.n{fill:#9da7b1}
.l{fill:#0b0f14}.f{fill:#79b8ff}.b{fill:#6fdd8b}.w{fill:#f2b866}}
text{font:11px system-ui,sans-serif}.l{font-size:10px;text-anchor:middle}"""


def svg(drawings: Mapping[str, Timeline]) -> str:
    """Return an SVG of at least one timeline, by the line above each: below each other, to the scale of the longest."""
    longest = max(timeline.makespan_seconds for timeline in drawings.values())
    scale = (_WIDTH - _LEFT - _RIGHT) / longest if longest else 0.0
    body: list[str] = []
    top = 4.0
    for title, timeline in drawings.items():
        body += _timeline(title, timeline, top, scale)
        top += _TITLE + len(timeline.spans) * (_ROW + _GAP) + 4
    body += _legend(drawings.values(), top)
    height = top + _LEGEND + _BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img">',
            f"<title>{escape('; '.join(drawings))}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="bg" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1:g}" rx="6"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _timeline(title: str, timeline: Timeline, top: float, scale: float) -> Iterator[str]:
    yield f'<text class="t" x="10" y="{top + 14:g}">{escape(title)}</text>'
    for stage, spans in enumerate(timeline.spans):
        y = top + _TITLE + stage * (_ROW + _GAP)
        yield f'<text class="n" x="10" y="{y + 14:g}">stage {stage}</text>'
        yield f'<rect class="row" x="{_LEFT}" y="{y:g}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}"/>'
        for span in spans:
            yield from _box(span, y, scale)


def _box(span: ActionInterval, y: float, scale: float) -> Iterator[str]:
    """Yield a box, and what fits into it: `F3`, or only the number of the microbatch."""
    x, width = _LEFT + span.start_seconds * scale, (span.end_seconds - span.start_seconds) * scale
    place = f'x="{x:.2f}" y="{y:g}" width="{max(width - 0.7, 0.3):.2f}" height="{_ROW}"'
    yield f'<rect class="{_FILLS[span.action.kind]}" {place} rx="1.5"><title>{span.action}</title></rect>'
    for label in (str(span.action), str(span.action.microbatch)):
        if len(label) * _LETTER <= width:
            yield f'<text class="l" x="{x + width / 2:.2f}" y="{y + 13.5:g}">{label}</text>'
            return


def _legend(timelines: Iterable[Timeline], top: float) -> Iterator[str]:
    seen = {span.action.kind for timeline in timelines for row in timeline.spans for span in row}
    x = float(_LEFT)
    for kind in [kind for kind in Kind if kind in seen]:
        yield f'<rect class="{_FILLS[kind]}" x="{x:g}" y="{top + 4:g}" width="10" height="10" rx="1.5"/>'
        yield f'<text class="n" x="{x + 14:g}" y="{top + 13:g}">{_NAMES[kind]}</text>'
        x += 28 + len(_NAMES[kind]) * 5.8
