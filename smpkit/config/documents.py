"""Read a configuration file: the plain values it says, and on which line each of them stands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from smpkit.config.explain import LocatedProblem
from smpkit.config.regular_files import read_regular
from smpkit.config.section import KeyPath
from smpkit.config.words import printable, quoted, suggestion
from smpkit.config.yaml_errors import explain_syntax
from smpkit.errors import ConfigError

__all__ = [
    "MAX_DEPTH",
    "Document",
    "Position",
    "check_text",
    "literal",
    "parse_json",
    "parse_value",
    "parse_yaml",
    "read_document",
    "refuse",
    "similar",
    "written_twice",
]

MAX_DEPTH = 64
"""Deepest nesting that is read; real configurations are far below it."""


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
    """Return the text itself, for values that are always text."""
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
    """Refuse lone surrogates: an escape sequence can spell them, but they cannot be written to a file or terminal."""
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


_MAX_BYTES = 1 << 20


def read_document(path: Path, name: str | None = None) -> Document:
    """Read a file: strict JSON if it is called `.json`, YAML 1.2 (core schema) otherwise.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or has a syntax error.
    """
    shown = printable(str(path)) if name is None else name
    try:
        data = read_regular(path, _MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        refuse(
            shown,
            f"cannot be read: {_reason(error)}",
            hint=similar(path) if isinstance(error, FileNotFoundError) else None,
        )
    if len(data) > _MAX_BYTES:
        refuse(shown, f"is too large for a configuration (more than {_MAX_BYTES >> 20} MiB)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        refuse(shown, f"is not UTF-8 text: byte 0x{data[error.start]:02x} on line {line}", hint="save it as UTF-8")
    return (parse_json if path.suffix.lower() == ".json" else parse_yaml)(text, shown)


def similar(path: Path) -> str | None:
    """The hint `did you mean ...?` for a path that is not there: a name beside it that looks like it."""
    try:
        found = suggestion(path.name, (each.name for each in path.parent.iterdir() if each.name.isprintable()))
    except OSError:
        return None
    return found


def _reason(error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return reason[:1].lower() + reason[1:]


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
        line, line_start, seen = 1, 0, 0
        for match in self._TOKEN.finditer(self._text):
            newlines = self._text.count("\n", seen, match.start())
            if newlines:
                line += newlines
                line_start = self._text.rindex("\n", seen, match.start()) + 1
            seen = match.start()
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


# Aliases multiply: a few lines of YAML can spell more values than fit into memory.
_MAX_VALUES = 100_000


def parse_value(text: str, name: str) -> Document:
    """Read a value given on the command line or in the environment, as YAML: `4`, `true`, `1e-3`, `[1, 2]`, `text`."""
    return replace(parse_yaml(text, name), positions={})


def parse_yaml(text: str, name: str) -> Document:
    """Read one YAML document with the scalars of YAML 1.2's core schema, so `1e-3` is a number and `no` is text.

    Raises:
        ConfigError: with the place of the syntax error.
    """
    import yaml

    try:
        node = _compose(text)
        reader = _YamlReader(text, name)
        value = None if node is None else reader.value(node, (), ())
    except yaml.MarkedYAMLError as error:
        found = explain_syntax(error, text)
        message = f"is not YAML: {found.message}"
        refuse(name, message, line=found.line, column=found.column, text=text, hint=found.hint)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = printable(text[error.position : error.position + 1])
        refuse(name, f"has a character that text must not have: {character}", line=line, text=text)
    except RecursionError:
        refuse(name, f"is nested more than {MAX_DEPTH} levels deep")
    return Document(name, text, value, reader.positions, tuple(reader.problems))


# The core schema of YAML 1.2: tag, plain scalars that have it, and the characters those can start with.
_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)
_TAG = "tag:yaml.org,2002:"


def _compose(text: str) -> Any:
    """Parse into PyYAML's nodes only; we build the values ourselves, so a tag in the file cannot run a constructor."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # replaces the 1.1 schema of the base class

    for tag, pattern, first in _CORE_SCHEMA:
        Loader.add_implicit_resolver(_TAG + tag, re.compile(f"(?:{pattern})\\Z"), first)
    loader = Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


@dataclass
class _YamlReader:
    """Builds plain values from nodes, within limits that real configurations do not reach (aliases can multiply)."""

    text: str
    name: str
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    problems: list[LocatedProblem] = field(default_factory=list)
    count: int = 0

    def value(self, node: Any, path: KeyPath, around: tuple[Any, ...]) -> Any:
        """Build the value of a node; `around` are the nodes it stands in."""
        self._check_limits(node, around)
        self.positions.setdefault(path, _position(node))
        if node.id == "mapping":
            return self._mapping(node, path, (*around, node))
        if node.id == "sequence":
            inner = (*around, node)
            return [self.value(item, (*path, index), inner) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _check_limits(self, node: Any, around: tuple[Any, ...]) -> None:
        self.count += 1
        if self.count > _MAX_VALUES:
            self._refuse(node, f"has more than {_MAX_VALUES:,} values once its aliases are expanded")
        if any(node is outer for outer in around):
            self._refuse(node, "has an alias that refers to the value it stands in")
        if len(around) > MAX_DEPTH:
            self._refuse(node, f"is nested more than {MAX_DEPTH} levels deep")

    def _mapping(self, node: Any, path: KeyPath, around: tuple[Any, ...]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                for source in self._merge_sources(value_node):
                    merged = self._mapping(source, path, (*around, source)) | merged
                continue
            key, position = self._key(key_node), _position(key_node)
            here: KeyPath = (*path, key)
            if key in first_lines:
                self.problems.append(written_twice(here, first_lines[key], self.name, position, self.text))
            first_lines.setdefault(key, position.line)
            self.positions[here] = position
            own[key] = self.value(value_node, here, around)
        return merged | own

    def _merge_sources(self, node: Any) -> list[Any]:
        sources = node.value if node.id == "sequence" else [node]
        for source in sources:
            self.count += 1
            if source.id != "mapping":
                self._refuse(source, "has a `<<` that merges something else than mappings")
        return list(sources)

    def _key(self, node: Any) -> str:
        if node.id != "scalar":
            self._refuse(node, "has a mapping or list as a name")
        key = self._scalar(node)
        if not isinstance(key, str):
            self._refuse(node, f"has a name that is not text: {quoted(key)}", hint="put it in quotes")
        return key

    def _scalar(self, node: Any) -> Any:
        tag = node.tag.removeprefix(_TAG)
        try:
            value = _SCALARS[tag](node.value)
        except KeyError:
            self._refuse(node, "has a value of an unknown kind", hint="put it in quotes, or remove its `!`")
        except ValueError:
            self._refuse(node, f"has a value that is no {tag}")
        check_text(value, self.name)
        return value

    def _refuse(self, node: Any, message: str, hint: str | None = None) -> NoReturn:
        refuse(self.name, message, line=node.start_mark.line + 1, text=self.text, hint=hint)


def _position(node: Any) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _null(_: str) -> None:
    return None


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _int(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _float(text: str) -> float:
    return float(
        text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").lower().replace(".nan", "nan")
    )


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": _null,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "str": str,
    "merge": str,
}
