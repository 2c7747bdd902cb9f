"""From a file to a checked configuration: defaults < file < environment variables < `--set`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from smpkit.config.distribution import Distribution
from smpkit.config.documents import Document, literal, parse_value, read_document
from smpkit.config.explain import explain
from smpkit.config.job import JobConfig
from smpkit.config.locate import LocatedProblem
from smpkit.config.migrate import HISTORIC, V2_KEYS
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.section import KeyPath, Section
from smpkit.config.words import printable, quoted
from smpkit.errors import ConfigError, Problem

__all__ = ["ENVIRONMENT_PREFIX", "Kind", "Loaded", "LoadedJob", "load", "load_job"]

ENVIRONMENT_PREFIX = "SMPKIT_JOB__"
"""`SMPKIT_JOB__COMPUTE__INSTANCE_COUNT=2` sets `compute.instance_count`: a double underscore is a dot."""

Kind = Literal["job", "distribution", "modelparallel"]

_MODELS: Mapping[Kind, type[Section]] = {
    "job": JobConfig,
    "distribution": Distribution,
    "modelparallel": ModelParallelConfig,
}
_KIND_NAMES: Mapping[Kind, str] = {
    "job": "job file",
    "distribution": "distribution",
    "modelparallel": "modelparallel configuration",
}


@dataclass(frozen=True)
class Loaded:
    """A checked configuration and where it came from."""

    kind: Kind
    config: Section
    notices: tuple[LocatedProblem, ...]
    """Settings without effect."""

    origins: Mapping[KeyPath, str]
    """Path of each value -> `default`, `job.yaml:4`, a variable's name, or `--set compute.spot`."""

    path: Path
    """The file, as the user named it."""

    @property
    def kind_name(self) -> str:
        """The kind in words."""
        return _KIND_NAMES[self.kind]


@dataclass(frozen=True)
class LoadedJob(Loaded):
    """A checked job file; paths in it are relative to `folder`."""

    config: JobConfig

    @property
    def folder(self) -> Path:
        """The folder of the job file."""
        return self.path.parent

    def locate(self, location: str) -> Path | str:
        """Resolve a folder or S3 URI of the job file: a path, or the URI as it is."""
        return location if _is_uri(location) else self.folder / location


def load_job(path: Path | str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> LoadedJob:
    """Read and check a job file.

    Args:
        path: a YAML file, or strict JSON if it is called `.json`.
        overrides: `key=value` each, as of `--set`; values are read as YAML.
        environ: variables to look for `SMPKIT_JOB__...` in; the process's if None.

    Raises:
        ConfigError: with all problems, each a `LocatedProblem`.
    """
    loaded = load(path, overrides, environ)
    if isinstance(loaded, LoadedJob):
        return loaded
    message = f"is a {loaded.kind_name}, not a job file"
    hint = f"make a job file with an `entry_point` and put it under `{_HOMES[loaded.kind]}`"
    raise ConfigError([LocatedProblem((), message, hint, printable(str(path)))])


_HOMES: Mapping[Kind, str] = {
    "job": "",
    "distribution": "distribution",
    "modelparallel": "distribution.smdistributed.modelparallel.parameters",
}


def load(path: Path | str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """Read and check a file of any kind: a job, a distribution, or modelparallel parameters alone.

    Variables of the environment are for jobs only. Arguments and errors as of `load_job`.
    """
    path = Path(path)
    document = read_document(path)
    kind = _kind(document)
    sources = _Sources(path.parent, document.value, [((), document)], list(document.problems))
    if kind == "job":
        sources.resolve_parameters()
        for name, text in sorted((os.environ if environ is None else environ).items()):
            if name.startswith(ENVIRONMENT_PREFIX):
                sources.set_variable(name, text)
    for override in overrides:
        sources.set_override(override, free_form=kind == "job")
    return _checked(kind, path, sources)


def _kind(document: Document) -> Kind:
    """Recognise what a document is by its names; a job file unless it must be something else."""
    value = document.value
    if not isinstance(value, dict):
        message = "is empty" if value is None else f"must be a mapping of settings, got {quoted(value)}"
        hint = "`smpkit schema` shows what can be set"
        raise ConfigError([LocatedProblem((), message, hint, document.name)])
    names = set(value)
    if names & set(JobConfig.keys()):
        return "job"
    if names & {*Distribution.keys(), *Distribution.refused} or names >= {"enabled", "parameters"}:
        return "distribution"
    if names & {*ModelParallelConfig.keys(), "partitions", *HISTORIC, *V2_KEYS}:
        return "modelparallel"
    return "job"


def _checked(kind: Kind, path: Path, sources: _Sources) -> Loaded:
    config: Section | None = None
    problems = list(sources.problems)
    try:
        config = _MODELS[kind].model_validate(sources.value)
    except ValidationError as error:
        problems += map(sources.locate, explain(error))
    if isinstance(config, JobConfig):
        problems += map(sources.locate, _file_problems(config, path.parent))
    if problems or config is None:
        raise ConfigError(sources.in_order(problems), subject=f"{_KIND_NAMES[kind]} {printable(str(path))}")
    notices = sources.in_order(map(sources.locate, _notices(config, sources.value)))
    origins = {leaf: sources.origin(leaf) for leaf in _leaves(config.model_dump())}
    if isinstance(config, JobConfig):
        return LoadedJob(kind, config, notices, origins, path)
    return Loaded(kind, config, notices, origins, path)


def _notices(config: Section, raw: Mapping[str, Any]) -> list[Problem]:
    if isinstance(config, ModelParallelConfig):
        return config.notices(raw)
    assert isinstance(config, (JobConfig, Distribution))
    return config.notices()


def _is_uri(location: str) -> bool:
    return "://" in location


def _file_problems(config: JobConfig, folder: Path) -> Iterable[Problem]:
    """Say which sources are not there; what is in a bucket cannot be known here."""
    if _is_uri(config.source_dir):
        return
    source_dir = folder / config.source_dir
    if not source_dir.is_dir():
        yield Problem(("source_dir",), f"no such folder: {quoted(str(source_dir))}", "it is relative to the job file")
    elif not (source_dir / config.entry_point).is_file():
        yield Problem(("entry_point",), f"no such file: {quoted(str(source_dir / config.entry_point))}")


def _leaves(value: Any, path: KeyPath = ()) -> Iterable[KeyPath]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif path:
        yield path


# --- Layers ----------------------------------------------------------------------------------------------------------

# Names below these belong to the user: they keep their spelling, and dots in them are part of the name.
_FREE_FORM = frozenset({"hyperparameters", "environment"})

_PARAMETERS: tuple[tuple[str, ...], ...] = (
    ("distribution", "smdistributed", "modelparallel", "parameters"),
    ("distribution", "parameters"),
)


@dataclass
class _Sources:
    """The values so far, and which document each part of them came from; later documents lie over earlier ones."""

    folder: Path
    value: dict[str, Any]
    layers: list[tuple[KeyPath, Document]]
    problems: list[LocatedProblem] = field(default_factory=list)

    def resolve_parameters(self) -> None:
        """Replace a path given as `parameters` by what the file says."""
        for path in _PARAMETERS:
            name = _get(self.value, path)
            if isinstance(name, str):
                self._attempt(partial(self._read_parameters, path, name))

    def _read_parameters(self, path: KeyPath, name: str) -> None:
        document = read_document(self.folder / name)
        if not isinstance(document.value, dict):
            message = f"must be a mapping of parameters, got {quoted(document.value)}"
            raise ConfigError([LocatedProblem((), message, None, document.name)])
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

    def set_override(self, override: str, *, free_form: bool) -> None:
        """Apply one `key=value`."""
        key, separator, text = override.partition("=")
        source = f"--set {printable(key)}"
        parts = tuple(key.strip().split("."))
        if not separator or not all(parts):
            problem = LocatedProblem((), "must have the form `key=value`", "for example `compute.spot=true`", source)
            self.problems.append(problem)
            return
        if free_form and parts[0] in _FREE_FORM and len(parts) > 1:
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
        written = _written(self.value, leaf)
        if written is None:
            return "default"
        root, document = self._layer(written)
        position = document.position(written[len(root) :])
        return document.name if position is None else f"{document.name}:{position.line}"

    def in_order(self, problems: Iterable[LocatedProblem]) -> tuple[LocatedProblem, ...]:
        """Sort problems by document and line, the job file first."""
        names = {document.name: position for position, (_, document) in reversed(list(enumerate(self.layers)))}
        return tuple(sorted(problems, key=lambda problem: (names.get(problem.source, len(names)), problem.line or 0)))


def _get(value: Any, path: KeyPath) -> Any:
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _written(raw: Mapping[str, Any], leaf: KeyPath) -> KeyPath | None:
    """Find where the user wrote an effective value; None if nowhere. Short forms and aliases have other paths."""
    long, short = _PARAMETERS[0], _PARAMETERS[1]
    candidates = [leaf]
    for whole, bare in ((long[:-1], short[:-1]), (long[1:-1], ())):
        if leaf[: len(whole)] == whole:
            candidates.append((*bare, *leaf[len(whole) :]))
    if leaf[-1] == "pipeline_parallel_degree":
        candidates += [(*path[:-1], "partitions") for path in candidates]
    if leaf[-1] == "uri":
        candidates.append(leaf[:-1])
    for path in candidates:
        parent = _get(raw, path[:-1]) if len(path) > 1 else raw
        if isinstance(parent, dict) and path[-1] in parent:
            return path
    return None
