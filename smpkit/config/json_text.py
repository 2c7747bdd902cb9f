"""Read strict JSON, and find on which line each value stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from smpkit.config.document import MAX_DEPTH, Document, Position, check_text, refuse, written_twice
from smpkit.config.locate import LocatedProblem
from smpkit.config.section import KeyPath

__all__ = ["parse_json"]


def parse_json(text: str, name: str) -> Document:
    """Read strict JSON: no comments, no NaN, and a key that is written twice is a problem.

    Raises:
        ConfigError: with the place of the syntax error.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        message = error.msg[:1].lower() + error.msg[1:]
        refuse(name, f"is not JSON: {message}", line=error.lineno, column=error.colno, text=text)
    except RecursionError:
        refuse(name, f"is nested more than {MAX_DEPTH} levels deep")
    except ValueError as error:  # NaN and its like, or a number of more digits than Python reads
        refuse(name, f"is not JSON: {str(error).split(';')[0]}")
    reader = _JsonPositions(text, name)
    reader.value((), 0)
    check_text(value, name)
    return Document(name, text, value, reader.positions, tuple(reader.problems))


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"`{constant}` is not a number that JSON knows")


class _JsonPositions:
    """A second walk over text known to be JSON, for what `json` does not tell: positions and keys written twice."""

    _TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')

    def __init__(self, text: str, name: str) -> None:
        self.positions: dict[KeyPath, Position] = {}
        self.problems: list[LocatedProblem] = []
        self._text, self._name = text, name
        self._tokens = self._scan()

    def _scan(self) -> Iterator[tuple[str, Position]]:
        line, line_start = 1, 0
        for match in self._TOKEN.finditer(self._text):
            newlines = self._text.count("\n", line_start, match.start())
            if newlines:
                line += newlines
                line_start = self._text.rindex("\n", line_start, match.start()) + 1
            yield match[0], Position(line, match.start() - line_start + 1)

    def value(self, path: KeyPath, depth: int) -> None:
        """Read the next value."""
        word, position = next(self._tokens)
        self._value(word, position, path, depth)

    def _value(self, word: str, position: Position, path: KeyPath, depth: int) -> None:
        if depth > MAX_DEPTH:
            refuse(self._name, f"is nested more than {MAX_DEPTH} levels deep", line=position.line)
        self.positions.setdefault(path, position)
        if word == "{":
            self._object(path, depth)
        elif word == "[":
            self._array(path, depth)

    def _object(self, path: KeyPath, depth: int) -> None:
        first_lines: dict[str, int] = {}
        for word, position in self._tokens:
            if word == "}":
                return
            if word == ",":
                continue
            key = json.loads(word)
            here: KeyPath = (*path, key)
            if key in first_lines:
                self.problems.append(written_twice(here, first_lines[key], self._name, position, self._text))
            first_lines.setdefault(key, position.line)
            self.positions[here] = position
            next(self._tokens)  # the colon
            self.value((*path, key), depth + 1)

    def _array(self, path: KeyPath, depth: int) -> None:
        index = 0
        for word, position in self._tokens:
            if word == "]":
                return
            if word != ",":
                self._value(word, position, (*path, index), depth + 1)
                index += 1
