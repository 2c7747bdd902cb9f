"""A configuration text, the plain values it says, and on which line each of them stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from smpkit.config.locate import LocatedProblem
from smpkit.config.section import KeyPath
from smpkit.config.words import quoted
from smpkit.errors import ConfigError

__all__ = ["MAX_DEPTH", "Document", "Position", "check_text", "literal", "refuse", "written_twice"]

MAX_DEPTH = 64
"""Deepest nesting that is read; no honest configuration comes near."""


class Position(NamedTuple):
    """Line and column, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Document:
    """A configuration text and what it says."""

    name: str
    """What messages call it: the file as the user named it, or the variable the text came from."""

    text: str
    value: Any
    positions: Mapping[KeyPath, Position]
    """Path of each value -> where its key is, or itself in a list."""

    problems: tuple[LocatedProblem, ...] = ()
    """What is wrong although the text could be read: keys that are written twice."""

    def position(self, path: KeyPath) -> Position | None:
        """Where the value at `path` is, or the closest value around it; None in a text without lines."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.positions:
                return self.positions[path[:length]]
        return None


def literal(text: str, name: str) -> Document:
    """Take a text as it is, where a value is text by nature."""
    check_text(text, name)
    return Document(name, text, text, {})


def refuse(
    name: str,
    message: str,
    *,
    line: int | None = None,
    column: int | None = None,
    text: str = "",
    hint: str | None = None,
) -> NoReturn:
    """Raise ConfigError about a text that cannot be read; with a column, the very character is shown."""
    problem = LocatedProblem((), message, hint, name, line, column, text, exact=column is not None)
    raise ConfigError([problem])


def check_text(value: object, name: str) -> None:
    """Refuse half characters (lone surrogates): an escape can spell them, but no file or terminal can hold them."""
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        refuse(name, f"has text with half a character: {quoted(value)}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_text(key, name)
            check_text(item, name)
    elif isinstance(value, list):
        for item in value:
            check_text(item, name)


def written_twice(path: KeyPath, first_line: int, name: str, position: Position, text: str) -> LocatedProblem:
    """The problem of a key that is written a second time at `position`."""
    return LocatedProblem(path, f"is written twice, first on line {first_line}", "remove one", name, *position, text)
