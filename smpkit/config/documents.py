"""Read a configuration file: the plain values it says, and on which line each of them stands."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from smpkit.config.confidential import hide_in_text
from smpkit.config.section import KeyPath
from smpkit.config.words import printable, quoted, suggestion
from smpkit.errors import ConfigError, Problem

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 64
_MAX_VALUES = 100_000
"""Aliases multiply: a few lines of YAML can spell more values than fit into memory."""
_WIDTH = 100


@dataclass
class Document:
    """A configuration text and what it says."""

    name: str
    """What messages call it: the file as the user named it, or the option the text came from."""
    value: Any = None
    text: str = ""
    """For excerpts; empty for a text without lines worth showing."""
    positions: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    """Path of each value -> line and column, from 1, of its key, or of itself in a list."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong although the text could be read: keys that are written twice."""

    def located(self, problem: Problem, *, below: KeyPath = ()) -> Problem:
        """Add where a problem is: the place of its value, or of the closest value around it.

        Args:
            below: where this document was put, which is the beginning of the problem's path.
        """
        inner = problem.path[len(below) :]
        paths = (inner[:length] for length in range(len(inner), -1, -1))
        path = next((path for path in paths if path in self.positions), None)
        if path is None:
            return replace(problem, source=self.name)
        line, column = self.positions[path]
        located = replace(problem, source=self.name, line=line, column=column)
        # Something missing at the top has no line worth showing.
        is_shown = path or not inner
        return replace(located, excerpt=excerpt(self.text, line)) if is_shown else located

    def marked(self, problem: Problem) -> Problem:
        """Show the very character of a problem that has been located here."""
        assert problem.line is not None
        return replace(problem, exact=True, excerpt=excerpt(self.text, problem.line, problem.column))


def refuse(
    name: str,
    message: str,
    hint: str | None = None,
    *,
    text: str = "",
    line: int | None = None,
    column: int | None = None,
) -> NoReturn:
    """Raise ConfigError about a text that cannot be read; with a column, the very character is shown."""
    shown = excerpt(text, line, column) if line is not None else ""
    raise ConfigError([Problem((), message, hint, name, line, column, shown, exact=column is not None)])


def excerpt(text: str, line: int, column: int | None = None) -> str:
    """Show one line of `text` behind its number, with a mark under `column`; empty if there is nothing to show.

    What is probably a secret is shown as stars.

    ::

            3 | {"microbatches": four}
              |                  ^
    """
    lines = hide_in_text(text)
    whole = lines[line - 1] if 1 <= line <= len(lines) else ""
    if not whole.strip():
        return ""
    # Long lines (a whole JSON document on one) are cut to the part around the column.
    start = max(0, (column or 1) - _WIDTH // 2) if len(whole) > _WIDTH else 0
    shown = whole[start : start + _WIDTH]
    gutter = f"    {line} | "
    result = gutter + printable(shown).rstrip()
    if column is not None:
        before = printable(shown[: column - 1 - start])
        result += "\n" + " " * (len(gutter) - 2) + "| " + " " * len(before) + "^"
    return result


# ---- files -----------------------------------------------------------------------------------------------------------


def read_document(path: Path) -> Document:
    """Read a file: strict JSON if it is called `.json`, YAML 1.2 otherwise; raise ConfigError if it is neither."""
    shown = printable(str(path))
    try:
        data = read_regular(path, _MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = similar(path) if isinstance(error, FileNotFoundError) else None
        refuse(shown, f"cannot be read: {reason[:1].lower()}{reason[1:]}", hint)
    if len(data) > _MAX_BYTES:
        refuse(shown, f"is too large for a configuration (more than {_MAX_BYTES >> 20} MiB)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        refuse(shown, f"is not UTF-8 text: byte 0x{data[error.start]:02x} on line {line}", "save it as UTF-8")
    return parse(text, shown, is_json=path.suffix.lower() == ".json")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file that somebody else has named, at most `max_bytes` + 1 bytes of it.

    Raises:
        OSError: there is no such file, it cannot be read, or it is a folder, a pipe or a device.
        ValueError: the path has a null byte.
    """
    # Without O_NONBLOCK, opening a pipe that nobody writes to waits for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(path))
        return file.read(max_bytes + 1)


def similar(path: Path) -> str | None:
    """The hint `did you mean ...?` for a path that is not there: a name beside it that looks like it."""
    try:
        return suggestion(path.name, (other.name for other in path.parent.iterdir() if other.name.isprintable()))
    except OSError:
        return None


# ---- texts -----------------------------------------------------------------------------------------------------------


def parse(text: str, name: str, *, is_json: bool = False) -> Document:
    """Read one document: strict JSON, or YAML 1.2, where `1e-3` is a number and `no` is text."""
    value = strict_json(text, name, is_file=True) if is_json else None
    # JSON is YAML, which knows lines; only tabs it has not.
    document = _read_yaml(text.replace("\t", " ") if is_json else text, name)
    if is_json:
        document.value, document.text = value, text
    return document


def strict_json(text: str, name: str, *, is_file: bool = False) -> Any:
    """Read strict JSON: no comments, no NaN, and no name that is written twice, which a file's reader tells by line."""

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs) and not is_file:
            names = [key for key, _ in pairs]
            raise ValueError(f"{quoted(next(key for key in names if names.count(key) > 1))} is written twice")
        return content

    def no_constant(constant: str) -> NoReturn:
        raise ValueError(f"`{constant}` is not a number that JSON knows")

    try:
        value = json.loads(text, object_pairs_hook=mapping, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        message = f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        refuse(name, message, text=text, line=error.lineno, column=error.colno)
    except RecursionError:
        refuse(name, f"is nested more than {_MAX_DEPTH} levels deep")
    except ValueError as error:  # a name that is written twice, NaN, or a number of more digits than Python reads
        refuse(name, f"is not JSON: {str(error).split(';')[0]}")
    return value


def _read_yaml(text: str, name: str) -> Document:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    parser = YAML(typ="safe", pure=True)
    parser.composer.warn_double_anchors = False  # YAML allows them, and a warning would be Python's own
    reader = _Reader(Document(name, text=text), parser.constructor)
    try:
        node = parser.compose(text)
        reader.document.value = None if node is None else reader.value(node, (), ())
    except MarkedYAMLError as error:
        message, hint, mark = _explained(error)
        refuse(name, f"is not YAML: {message}", hint, text=text, line=mark.line + 1, column=mark.column + 1)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = printable(text[error.position : error.position + 1])
        refuse(name, f"has a character that text must not have: {character}", text=text, line=line)
    except YAMLError as error:
        refuse(name, f"is not YAML: {printable(str(error))}")
    except RecursionError:
        refuse(name, f"is nested more than {_MAX_DEPTH} levels deep")
    return reader.document


def _explained(error: Any) -> tuple[str, str | None, Any]:
    """Say what is wrong with YAML, what to do, and where, if the parser's own words do not tell."""
    problem, context = error.problem or "", error.context or ""
    began, mark = error.context_mark, error.problem_mark or error.context_mark
    if "'\\t'" in problem:
        return "a tab used for indentation", "indent with spaces", mark
    if "<stream end>" in problem and "flow node" in context:
        return "the text ends where a value should stand", None, mark
    if "flow sequence" in context or "flow mapping" in context:
        opening, closing = "[]" if "sequence" in context else "{}"
        return f"the `{opening}` here is not closed by `{closing}`, or a `,` is missing after it", None, began
    if "quoted scalar" in context:
        return "the quotation mark here is never closed", None, began
    if "could not find expected ':'" in problem:
        return "this line is neither `name: value` nor an item of a list", "put a `:` after the name", began
    if "undefined alias" in problem:  # its name may be a password
        message = "undefined alias: `*` refers to a value marked with `&` further up"
        return message, "put it in quotes if it is text", mark
    if "single document" in context:
        return "a second document begins here", "keep one of them: a job file has no `---` in it", mark
    if "mapping values are not allowed" in problem:
        hint = "put the value in quotes if it is text; else see whether the line above lacks its `:` or is indented so"
        return "a `:` is not allowed here", hint, mark
    if "expected <block end>" in problem:
        return "this line does not belong to the block above it", "indent the lines of a block alike", mark
    if (character := re.match("found character '(.)' that cannot start", problem)) is not None:
        return f"a value cannot start with `{printable(character[1])}`", "put the value in quotes", mark
    return printable(" ".join(part for part in (context, problem) if part)), None, mark


_TEXT_IN_1_2 = re.compile(r"(?i:y|yes|n|no|on|off)|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
"""What YAML 1.1, which other programs may read our files as, does not take for text."""


def as_yaml(*values: Any) -> str:
    """Write plain values as YAML documents, in their order, such that a reader of YAML 1.1 understands them alike."""
    from ruamel.yaml import YAML

    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    writer.width = 120

    def text(representer: Any, value: str) -> Any:
        style = "'" if _TEXT_IN_1_2.fullmatch(value) else None
        return representer.represent_scalar(_TAG + "str", value, style=style)

    class Representer(writer.Representer):  # type: ignore[misc, name-defined]  # its own table of types
        pass

    Representer.add_representer(str, text)
    writer.Representer = Representer
    stream = io.StringIO()
    writer.dump_all(values, stream)
    return stream.getvalue()


@dataclass
class _Reader:
    """Builds plain values from the parser's nodes, within limits that real configurations do not reach."""

    document: Document
    constructor: Any
    count: int = 0

    def value(self, node: Any, path: KeyPath, around: tuple[Any, ...]) -> Any:
        """Build the value of a node; `around` are the nodes it stands in."""
        self.count += 1
        if self.count > _MAX_VALUES:
            self._refuse(node, f"has more than {_MAX_VALUES:,} values once its aliases are expanded")
        if any(node is outer for outer in around):
            self._refuse(node, "has an alias that refers to the value it stands in")
        if len(around) > _MAX_DEPTH:
            self._refuse(node, f"is nested more than {_MAX_DEPTH} levels deep")
        self.document.positions.setdefault(path, _position(node))
        if node.id == "scalar":
            return self._scalar(node)
        if str(node.tag) not in (_TAG + "map", _TAG + "seq"):
            self._refuse_kind(node)
        if node.id == "mapping":
            return self._mapping(node, path, (*around, node))
        return [self.value(item, (*path, index), (*around, node)) for index, item in enumerate(node.value)]

    def _mapping(self, node: Any, path: KeyPath, around: tuple[Any, ...]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if str(key_node.tag) == _TAG + "merge":
                for source in value_node.value if value_node.id == "sequence" else [value_node]:
                    if source.id != "mapping":
                        self._refuse(source, "has a `<<` that merges something else than mappings")
                    merged = self.value(source, path, around) | merged
                continue
            key, position = self._key(key_node), _position(key_node)
            here = (*path, key)
            self.document.positions[here] = position
            first_line = first_lines.setdefault(key, position[0])
            if key in own:
                problem = Problem(here, f"is written twice, first on line {first_line}", "remove one")
                self.document.problems.append(self.document.located(problem))
            own[key] = self.value(value_node, here, around)
        return merged | own

    def _key(self, node: Any) -> str:
        if node.id != "scalar":
            hint = "put it in quotes: `{` and `[` begin a mapping or a list"
            self._refuse(node, "has a mapping or list as a name", hint)
        key = self._scalar(node)
        if not isinstance(key, str):
            self._refuse(node, f"has a name that is not text: {quoted(key)}", "put it in quotes")
        return key

    def _scalar(self, node: Any) -> Any:
        kind = str(node.tag).removeprefix(_TAG)
        if kind in ("str", "timestamp", "value", "merge"):  # as values, dates, `=` and `<<` are text
            return str(node.value)
        if kind not in ("null", "bool", "int", "float"):
            self._refuse_kind(node)
        try:
            return self.constructor.construct_object(node)
        except (ValueError, KeyError):
            self._refuse(node, f"has a value that is no {kind}")

    def _refuse_kind(self, node: Any) -> NoReturn:
        self._refuse(node, "has a value of an unknown kind", "put it in quotes, or remove its `!`")

    def _refuse(self, node: Any, message: str, hint: str | None = None) -> NoReturn:
        refuse(self.document.name, message, hint, text=self.document.text, line=node.start_mark.line + 1)


_TAG = "tag:yaml.org,2002:"


def _position(node: Any) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
