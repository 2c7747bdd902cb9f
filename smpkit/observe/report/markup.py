"""Pieces of HTML. Texts are escaped here and nowhere else: names come from the job, and may hold anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

__all__ = ["Html", "bar", "code", "element", "figures", "joined", "legend", "options", "path", "table"]


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


_VOID: Final = frozenset({"br", "rect", "wbr"})


def element(name: str, *content: str | None, **attributes: str | int | None) -> Html:
    """Return an element; content that is no Html is escaped, and None left out, as are attributes that are None.

    An underscore at the end of an attribute's name is dropped (`class_`), others become hyphens.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items())
    if name in _VOID:
        return Html(f"<{name}{head}/>")
    return Html(f"<{name}{head}>{joined(content)}</{name}>")


def joined(parts: Iterable[str | None]) -> Html:
    """Put pieces together."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts if part is not None))


def code(text: str) -> Html:
    """Return a sentence in which what stands in backticks is code."""
    parts = text.split("`")
    return joined(element("code", part) if at % 2 else part for at, part in enumerate(parts))


def path(name: str) -> Html:
    """Return a dotted name as code that breaks between its words, and within one only where it must."""
    parts = re.split(r"(?<=[._])(?=.)", name)
    return element("code", *(joined([element("wbr") if at else None, part]) for at, part in enumerate(parts)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", class_: str | None = None) -> Html:
    """Return a table whose first column names the rows, in a box that scrolls by itself where it is too wide."""
    cells = [
        element(
            "tr", *(cell if _is_cell(cell) else element("th" if at == 0 else "td", cell) for at, cell in enumerate(row))
        )
        for row in rows
    ]
    made = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", *(element("th", each, scope="col") for each in head))),
        element("tbody", *cells),
        class_=class_,
    )
    return element("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption or "table")


def _is_cell(cell: str) -> bool:
    return isinstance(cell, Html) and cell.startswith(("<td", "<th"))


def bar(parts: Sequence[tuple[str, float]], total: float, label: str) -> Html:
    """Return a bar of parts, each with the class that colours it.

    Args:
        total: what the whole width stands for.
        label: what a screen reader says.
    """
    boxes = []
    at = 0.0
    for name, value in parts:
        width = 100 * value / total if total else 0.0
        if width:
            boxes.append(element("rect", class_=name, x=f"{at:.2f}", y=0, width=f"{width:.2f}", height=12))
        at += width
    return element(
        "svg",
        *boxes,
        class_="bar",
        viewBox="0 0 100 12",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )


def legend(names: Sequence[tuple[str, str]]) -> Html:
    """Return what colours mean: class and words."""
    square = {
        name: element("svg", element("rect", class_=name, width=10, height=10), aria_hidden="true") for name, _ in names
    }
    return element("ul", *(element("li", square[name], words) for name, words in names), class_="legend")


def figures(pairs: Iterable[tuple[str, str, str]]) -> Html:
    """Return a few numbers that stand out: name, number, and what there is to say about it."""
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value, element("small", more) if more else None))
            for name, value, more in pairs
        ),
        class_="figures",
    )


def options(names: Sequence[str]) -> Html:
    """Return the options of a select, with their positions as values."""
    return joined(element("option", name, value=at) for at, name in enumerate(names))
