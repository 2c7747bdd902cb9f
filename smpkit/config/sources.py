"""Lay the sources of a configuration over one another, and remember which of them each value came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from smpkit.config.document import Document, literal
from smpkit.config.files import read_document
from smpkit.config.locate import LocatedProblem
from smpkit.config.section import KeyPath
from smpkit.config.words import printable, quoted
from smpkit.config.yaml_text import parse_value
from smpkit.errors import ConfigError, Problem

__all__ = ["ENVIRONMENT_PREFIX", "Sources"]

ENVIRONMENT_PREFIX = "SMPKIT_JOB__"
"""`SMPKIT_JOB__COMPUTE__INSTANCE_COUNT=2` sets `compute.instance_count`: a double underscore is a dot."""

# Names below these belong to the user: they keep their spelling, and dots in them are part of the name.
_FREE_FORM = frozenset({"hyperparameters", "environment"})

# Where a distribution holds the library's block, in its full and in its short form.
_BLOCKS: tuple[KeyPath, ...] = (("smdistributed", "modelparallel"), ())


@dataclass
class Sources:
    """The values so far, and which document each part of them came from; later documents lie over earlier ones."""

    folder: Path
    """What a path of another file is relative to."""

    value: dict[str, Any]

    layers: list[tuple[KeyPath, Document]]
    """What was put where, in this order; the first is the file, at the root."""

    distribution: KeyPath | None
    """Where the distribution is in this kind of file; None if there is none."""

    problems: list[LocatedProblem] = field(default_factory=list)

    def resolve_parameters(self) -> None:
        """Replace a path given as `parameters` by what the file says."""
        for block in _BLOCKS if self.distribution is not None else ():
            path = (*(self.distribution or ()), *block, "parameters")
            name = _get(self.value, path)
            if isinstance(name, str):
                self._attempt(partial(self._read_parameters, path, name))

    def _read_parameters(self, path: KeyPath, name: str) -> None:
        named_at = self.locate(Problem(path, ""))
        # Whatever the file turns out to be, the path itself is not to be judged as parameters.
        self._put(path, Document(named_at.source, "", {}, {}))
        try:
            document = read_document(self.folder / name)
        except ConfigError as error:
            # Say where the file is named if it cannot even be opened, and its own line if it can.
            raise ConfigError([_at(named_at, problem) for problem in error.problems]) from None
        if not isinstance(document.value, dict):
            message = f"{quoted(name)} must hold a mapping of parameters, got {quoted(document.value)}"
            raise ConfigError([replace(named_at, message=message)])
        self.problems += document.problems
        self._put(path, document)

    def set_variable(self, name: str, text: str) -> None:
        """Apply one variable of the environment."""
        parts = name.removeprefix(ENVIRONMENT_PREFIX).split("__")
        head, rest = parts[0].lower(), parts[1:]
        if head in _FREE_FORM and rest:
            path: KeyPath = (head, "__".join(rest))
        elif head == "inputs" and rest:
            path = (head, rest[0], *(part.lower() for part in rest[1:]))
        else:
            path = (head, *(part.lower() for part in rest))
        self._set(path, text, printable(name))

    def set_override(self, override: str) -> None:
        """Apply one `key=value`."""
        key, separator, text = override.partition("=")
        source = f"--set {printable(key)}"
        parts = tuple(key.strip().split("."))
        if not separator or not all(parts):
            problem = LocatedProblem((), "must have the form `key=value`", "for example `compute.spot=true`", source)
            self.problems.append(problem)
            return
        if parts[0] in _FREE_FORM and len(parts) > 1:
            parts = (parts[0], ".".join(parts[1:]))
        self._set(parts, text, source)

    def _set(self, path: KeyPath, text: str, source: str) -> None:
        # What goes into the environment is text by nature, so `1` needs no quotes in quotes here.
        read = literal if path[:1] == ("environment",) and len(path) == 2 else parse_value

        def put() -> None:
            self._put(path, read(text, source))
            self.resolve_parameters()

        self._attempt(put)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ConfigError as error:
            self.problems += [problem for problem in error.problems if isinstance(problem, LocatedProblem)]

    def _put(self, path: KeyPath, document: Document) -> None:
        target = self.value
        for depth, part in enumerate(path[:-1]):
            below = target.get(str(part))
            if below is None:
                below = target[str(part)] = {}
            if not isinstance(below, dict):
                message = f"cannot be set inside {quoted(below)}, which is no mapping"
                raise ConfigError([LocatedProblem(path[: depth + 2], message, None, document.name)])
            target = below
        target[str(path[-1])] = document.value
        self.layers.append((path, document))

    def locate(self, problem: Problem) -> LocatedProblem:
        """Find the place of a problem: the uppermost document that covers its path."""
        root, document = self._layer(problem.path)
        inner = problem.path[len(root) :]
        position = document.position(inner)
        # Something missing at the top has no line worth showing.
        text = document.text if inner in document.positions or position != document.position(()) else ""
        line, column = position or (None, None)
        return LocatedProblem(problem.path, problem.message, problem.hint, document.name, line, column, text)

    def _layer(self, path: KeyPath) -> tuple[KeyPath, Document]:
        return next(layer for layer in reversed(self.layers) if path[: len(layer[0])] == layer[0])

    def origin(self, leaf: KeyPath) -> str:
        """Say where an effective value came from."""
        written = _written(self.value, leaf, self.distribution)
        if written is None:
            return "default"
        root, document = self._layer(written)
        position = document.position(written[len(root) :])
        return document.name if position is None else f"{document.name}:{position.line}"

    def in_order(self, problems: Iterable[LocatedProblem]) -> tuple[LocatedProblem, ...]:
        """Sort problems by document and line, the job file first."""
        names = {document.name: position for position, (_, document) in reversed(list(enumerate(self.layers)))}
        found = sorted(problems, key=lambda problem: (names.get(problem.source, len(names)), problem.line or 0))
        # Several on one line are told apart by a mark below it.
        shown = Counter((problem.source, problem.line) for problem in found if problem.text)
        return tuple(
            replace(each, exact=each.exact or bool(each.text and shown[each.source, each.line] > 1)) for each in found
        )


def _at(place: LocatedProblem, problem: Problem) -> Problem:
    if isinstance(problem, LocatedProblem) and problem.line is not None:
        return problem
    return replace(place, message=f"names a file that {problem.message}", hint=problem.hint)


def _get(value: Any, path: KeyPath) -> Any:
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _written(raw: Mapping[str, Any], leaf: KeyPath, distribution: KeyPath | None) -> KeyPath | None:
    """Find where the user wrote an effective value; None if nowhere. Short forms and aliases have other paths."""
    candidates = [leaf]
    if distribution is not None:
        full, short = ((*distribution, *block) for block in _BLOCKS)
        candidates += [(*short, *leaf[len(full) :])] if leaf[: len(full)] == full else []
    if leaf[-1] == "pipeline_parallel_degree":
        candidates += [(*path[:-1], "partitions") for path in candidates]
    if leaf[-1] == "uri":
        candidates.append(leaf[:-1])
    for path in candidates:
        parent = _get(raw, path[:-1]) if len(path) > 1 else raw
        if isinstance(parent, dict) and path[-1] in parent:
            return path
    return None
