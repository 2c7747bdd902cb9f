"""The page: one file that asks for nothing. A policy in it forbids every request, and every script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

import smpkit
from smpkit.observe.report.content import Content
from smpkit.observe.report.markup import Html, element
from smpkit.observe.report.sections import headline, label_of, per_step, sections

__all__ = ["page"]

_SCRIPTS: Final = ("uplot.js", "charts.js", "schedule.js", "page.js")
_STYLES: Final = ("uplot.css", "report.css")


def page(contents: Sequence[Content]) -> str:
    """Return the report of one run, or of two beside each other, as HTML."""
    parts = sections(contents)
    scripts, styles = [_asset(name) for name in _SCRIPTS], "\n".join(_asset(name) for name in _STYLES)
    title = " and ".join(each.folder for each in contents)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {_hash(styles)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    head = element(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        element("title", f"{title} · smpkit"),
        element("style", Html(styles)),
    )
    links = [element("li", element("a", part.title, href=f"#{part.name}")) for part in parts]
    body = element(
        "body",
        element("header", element("h1", title), *map(headline, contents)),
        element("nav", element("ul", *links), aria_label="sections"),
        element("main", *(_section(part.name, part.title, part.body) for part in parts)),
        element("footer", f"Made by smpkit {smpkit.__version__} with uPlot 1.6.32 (MIT). No part of it was loaded."),
        element("noscript", "The charts need JavaScript; all tables can be read without."),
        element("script", Html(_embedded(_data(contents))), type="application/json", id="data"),
        *(element("script", Html(script)) for script in scripts),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _section(name: str, title: str, body: Html) -> Html:
    return element("section", element("h2", title), body, id=name, aria_label=title)


@cache
def _asset(name: str) -> str:
    return (files("smpkit.observe.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return how a policy names a script or style that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: Any) -> str:
    """Return JSON that no HTML parser takes for anything else, whatever names are in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(contents: Sequence[Content]) -> dict[str, Any]:
    """Return what the charts draw."""
    has_device = any(rank.device_size is not None for each in contents if each.summary for rank in each.summary.ranks)
    return {
        # Without a GPU it is Python and its libraries, beside which nothing else would be seen.
        "hidden": [] if has_device else ["other"],
        "runs": [_run(contents, index) for index in range(len(contents))],
    }


def _run(contents: Sequence[Content], index: int) -> dict[str, Any]:
    content = contents[index]
    ranks = () if content.summary is None else content.summary.ranks
    planned = dict(zip((rank.rank for rank in ranks), content.planned, strict=False))
    pace = None
    if content.main is not None:
        pace = {
            "numbers": content.main.numbers,
            "per_second": [None if rate is None else float(f"{rate:.5g}") for rate in content.main.per_second],
            "samples": per_step(content.summary, "samples"),
            "tokens": per_step(content.summary, "tokens"),
        }
    return {
        "label": "AB"[index] if len(contents) > 1 else label_of(contents, index),
        "curves": [vars(curve) for curve in content.curves],
        "pace": pace,
        "steps": [
            {
                "number": step.number,
                "pipelines": [
                    {**vars(view), "planned": _rows(view.planned), "executed": _rows(view.executed)}
                    for view in step.pipelines
                ],
                "memory": [vars(view) for view in step.memory],
            }
            for step in content.steps
        ],
        "planned": {rank: vars(kinds) for rank, kinds in planned.items() if kinds is not None},
        "matrix": None if content.matrix is None else content.matrix.num_bytes,
    }


def _rows(rows: Any) -> Any:
    return None if rows is None else [vars(row) for row in rows]
