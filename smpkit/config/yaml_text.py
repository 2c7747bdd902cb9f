"""Read YAML with the scalars of YAML 1.2, and find on which line each value stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from smpkit.config.document import MAX_DEPTH, Document, Position, check_text, refuse, written_twice
from smpkit.config.locate import LocatedProblem
from smpkit.config.section import KeyPath
from smpkit.config.words import printable, quoted
from smpkit.config.yaml_errors import explain_syntax

__all__ = ["parse_value", "parse_yaml"]

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
    """Parse into PyYAML's nodes; building the values is ours, so no constructor can be asked to do anything."""
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
    """Builds plain values from nodes, within limits that no honest configuration reaches (aliases can multiply)."""

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
            self._refuse(node, f"has a value of an unknown kind: {printable(node.tag)}", hint="remove the tag")
        except ValueError:
            self._refuse(node, f"has a value that is no {tag}: {quoted(node.value)}")
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
