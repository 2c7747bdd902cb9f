"""What a part of the goldens consists of, where it is recorded, and how two collections are compared."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["DETAIL", "RECORDED", "Item", "Items", "Part", "Recording", "differences", "lowered", "readable"]

RECORDED = Path(__file__).parent / "recorded"
DETAIL = "detail"
"""A key of items that is compared between two commits, but too long to be recorded."""
_DIFF_LINES = 14
_LINE = 100

Item = Any
"""A text, or a JSON value."""
Items = dict[str, Item]


@dataclass(frozen=True)
class Recording:
    """The items of a part, and what of the machine they depend on."""

    machine: dict[str, str]
    items: Items

    @classmethod
    def load(cls, text: str) -> Recording:
        return cls(**json.loads(text))

    def dump(self) -> str:
        """Return sorted JSON with one value a line."""
        return readable(vars(self)) + "\n"

    def without_detail(self) -> Recording:
        return Recording(self.machine, {name: _stripped(item) for name, item in self.items.items()})


def readable(value: Any, indent: str = "", line: int = _LINE) -> str:
    """Return sorted JSON in which a list that fits `line` characters is one line."""
    inside = indent + " "
    if isinstance(value, Mapping) and value:
        lines = [f"{inside}{_text(key)}: {readable(value[key], inside, line)}" for key in sorted(value)]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and len(_text(value)) > line:
        lines = [f"{inside}{readable(each, inside, line)}" for each in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Part:
    """One kind of goldens.

    Args:
        name: for `--only`, and of the file.
        about: one line for `--list`.
        collect: returns the items of the code that this process imports.
        machine: returns what of this machine the items depend on.
        default: whether it runs when nobody asks for it.
        may_fall: whether numbers may be lower than recorded.
        tolerances: by item, by which share its numbers may be higher.
    """

    name: str
    about: str
    collect: Callable[[], Items]
    machine: Callable[[], dict[str, str]] = dict
    default: bool = True
    may_fall: bool = False
    tolerances: Mapping[str, float] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return RECORDED / f"{self.name}.json"

    def record(self) -> Recording:
        return Recording(self.machine(), self.collect())


def differences(part: Part, before: Items, now: Items) -> list[str]:
    """Return one report per item that changed: a line, and a short diff below it."""
    found = []
    for name in sorted({*before, *now}):
        if name not in now:
            found.append(f"{part.name}: `{name}` is gone")
        elif name not in before:
            found.append(f"{part.name}: `{name}` is new\n{_indented(_lines(now[name]))}")
        elif changed := [*_changes(part, name, before[name], now[name])]:
            found.append(f"{part.name}: `{name}` changed\n{_indented(changed)}")
    return found


def lowered(part: Part, before: Items, now: Items) -> list[str]:
    """Return one line per number that is lower than it was, where that is fine."""
    if not part.may_fall:
        return []
    return [
        f"{part.name}: `{name}`, {path}: {old} -> {new}"
        for name in sorted({*before} & {*now})
        for path, old, new in _numbers(before[name], now[name])
        if new < old * (1 - part.tolerances.get(name, 0))
    ]


def _changes(part: Part, name: str, before: Item, now: Item) -> Iterator[str]:
    has_detail = _detail(before) is not None and _detail(now) is not None
    plain, other = _stripped(before), _stripped(now)
    if part.may_fall:
        numbers, limit = _numbers(plain, other), 1 + part.tolerances.get(name, 0)
        higher = [(path, old, new) for path, old, new in numbers if new > old * limit]
        yield from (f"{path}: {old} -> {new}" for path, old, new in higher)
        plain, other = _without_numbers(plain), _without_numbers(other)
        if plain != other:
            yield from _diff(plain, other)
        elif not higher:
            return
    elif plain == other:
        return
    else:
        yield from _diff(plain, other)
    if has_detail:
        yield from _diff(_detail(before), _detail(now))


def _diff(before: Item, now: Item) -> Iterator[str]:
    lines = [*difflib.unified_diff(_lines(before), _lines(now), "recorded", "now", lineterm="", n=1)][2:]
    yield from lines[:_DIFF_LINES]
    if len(lines) > _DIFF_LINES:
        yield f"... {len(lines) - _DIFF_LINES} more lines"


def _lines(item: Item) -> list[str]:
    if isinstance(item, str):
        return item.splitlines()
    return readable(_stripped(item), line=2).splitlines()


def _indented(lines: list[str]) -> str:
    shown = lines[: _DIFF_LINES + 4]
    return "\n".join(f"    {line}" for line in shown)


def _stripped(item: Item) -> Item:
    return {key: value for key, value in item.items() if key != DETAIL} if isinstance(item, dict) else item


def _detail(item: Item) -> Item:
    return item.get(DETAIL) if isinstance(item, dict) else None


def _numbers(before: Item, now: Item, path: str = "") -> Iterator[tuple[str, float, float]]:
    """Give the numbers that two items have in the same place; a message that is gone counts as 0."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now} - {DETAIL}):
            old, new = before.get(key), now.get(key)
            if old is None and isinstance(new, int | float):
                old = 0
            if new is None and isinstance(old, int | float):
                new = 0
            yield from _numbers(old, new, f"{path}, {key}" if path else str(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _numbers(old, new, f"{path} {index}")
    elif isinstance(before, int | float) and isinstance(now, int | float):
        yield path, before, now


def _without_numbers(item: Item) -> Item:
    if isinstance(item, Mapping):
        return {
            key: _without_numbers(value)
            for key, value in item.items()
            if not isinstance(value, int | float) and key != DETAIL
        }
    if isinstance(item, list):
        return [_without_numbers(value) for value in item]
    return None if isinstance(item, int | float) else item
