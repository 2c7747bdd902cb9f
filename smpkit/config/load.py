"""From a file to a checked configuration: defaults < file < environment variables < `--set`, `-p`, `-H`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import ValidationError

from smpkit.config.confidential import HIDDEN, is_confidential
from smpkit.config.distribution import Distribution
from smpkit.config.documents import Document, literal, parse_value, read_document, refuse, similar
from smpkit.config.explain import LocatedProblem, explain
from smpkit.config.job import JobConfig
from smpkit.config.migrate import HISTORIC, V2_KEYS
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.section import KeyPath, Section
from smpkit.config.words import printable, quoted
from smpkit.errors import ConfigError, Problem

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Kind",
    "Loaded",
    "LoadedJob",
    "Sources",
    "is_script",
    "load",
    "load_job",
    "load_script",
    "option",
]

Kind = Literal["job", "distribution", "modelparallel"]

_MODELS: Mapping[Kind, type[Section]] = {
    "job": JobConfig,
    "distribution": Distribution,
    "modelparallel": ModelParallelConfig,
}
_DISTRIBUTIONS: Mapping[Kind, KeyPath | None] = {"job": ("distribution",), "distribution": (), "modelparallel": None}
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
        overrides: `key=value` each, as of `--set`; values are read as YAML. One that begins with `-p ` is below the
            modelparallel parameters, one with `-H ` below the hyperparameters; `--ranks 2` is the number of ranks on a
            host.
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


def load_script(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Return the job that trains with a script and has no job file; arguments and errors as of `load_job`."""
    loaded = _load("job", path, Document(printable(str(path)), "", {"entry_point": path.name}, {}), overrides)
    assert isinstance(loaded, LoadedJob)
    return loaded


def is_script(path: Path | str) -> bool:
    """Tell whether a file is called as what a job runs is, not as a job file."""
    return PurePath(path).suffix in (".py", ".sh")


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
    if is_script(path):
        shown = printable(str(path))
        refuse(shown, "is a script", hint=f"`smpkit run {shown}` runs it; `smpkit init` writes its job file")
    document = read_document(path)
    return _load(_kind(document), path, document, overrides, environ)


def _load(
    kind: Kind, path: Path, document: Document, overrides: Sequence[str], environ: Mapping[str, str] | None = None
) -> Loaded:
    sources = Sources(path.parent, document.value, [((), document)], _DISTRIBUTIONS[kind], list(document.problems))
    sources.resolve_parameters()
    if kind == "job":
        for name, text in sorted((os.environ if environ is None else environ).items()):
            if name.startswith(ENVIRONMENT_PREFIX):
                sources.set_variable(name, text)
    for override in overrides:
        sources.set_override(override)
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
    return "modelparallel" if names & _parameter_names() else "job"


def _parameter_names() -> set[str]:
    """The names of parameters, today's and those of other versions."""
    return {*ModelParallelConfig.keys(), "partitions", *HISTORIC, *V2_KEYS}


def _checked(kind: Kind, path: Path, sources: Sources) -> Loaded:
    config: Section | None = None
    problems = list(sources.problems)
    try:
        config = _MODELS[kind].model_validate(sources.value)
    except ValidationError as error:
        problems += map(sources.locate, explain(error))
    if kind == "job":
        problems += map(sources.locate, _file_problems(sources.value, path.parent))
    if problems or config is None:
        what = "job of" if is_script(path) else _KIND_NAMES[kind]
        raise ConfigError(sources.in_order(problems), subject=f"{what} {printable(str(path))}")
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


def _file_problems(value: object, folder: Path) -> Iterable[Problem]:
    """Report missing sources beside all other problems; what is in a bucket is not known here."""
    try:
        named = {
            key: value[key] for key in ("entry_point", "source_dir") if isinstance(value, Mapping) and key in value
        }
        config = JobConfig.model_validate(named)
    except ValidationError:
        return  # their own problems have been reported
    if _is_uri(config.source_dir):
        return
    source_dir = folder / config.source_dir
    if not _is_there(source_dir.is_dir):
        yield Problem(("source_dir",), f"no such folder: {quoted(str(source_dir))}", similar(source_dir) or _RELATIVE)
    elif not _is_there((source_dir / config.entry_point).is_file):
        script = source_dir / config.entry_point
        where = "`source_dir`" if "source_dir" in named else "the folder of the job file, or to `source_dir`"
        hint = similar(script) or f"it is relative to {where}"
        yield Problem(("entry_point",), f"no such file: {quoted(str(script))}", hint)


_RELATIVE = "it is relative to the job file"


def _is_there(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except OSError:  # as for a name that is too long
        return False


def _leaves(value: Any, path: KeyPath = ()) -> Iterable[KeyPath]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif path:
        yield path


ENVIRONMENT_PREFIX = "SMPKIT_JOB__"
"""`SMPKIT_JOB__COMPUTE__INSTANCE_COUNT=2` sets `compute.instance_count`: a double underscore is a dot."""

# Names below these belong to the user: they keep their spelling, and dots in them are part of the name.
_FREE_FORM = frozenset({"hyperparameters", "environment"})

_EXAMPLES: Mapping[str, str] = {
    "--set": "for example `compute.spot=true`",
    "-p": "for example `microbatches=8`",
    "-H": "for example `steps=100`",
}


def option(override: str) -> tuple[str, str]:
    """Return the option of the command line that an override is short for, and what it was given."""
    flag, _, value = override.partition(" ")
    return (flag, value) if flag in (*_EXAMPLES, "--ranks") else ("--set", override)


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
        elsewhere = not _is_inside(self.folder / name, self.folder)
        try:
            document = read_document(self.folder / name)
        except ConfigError as error:
            if elsewhere and any(isinstance(each, LocatedProblem) and each.line is not None for each in error.problems):
                raise _withheld(named_at) from None
            # Say where the file is named if it cannot even be opened, and its own line if it can.
            raise ConfigError([_at(named_at, problem) for problem in error.problems]) from None
        if elsewhere and (not isinstance(document.value, dict) or not document.value.keys() <= _parameter_names()):
            raise _withheld(named_at)
        if not isinstance(document.value, dict):
            message = f"{quoted(name)} must hold a mapping of parameters, got {quoted(document.value)}"
            raise ConfigError([replace(named_at, message=message)])
        if elsewhere:
            shown = tuple(replace(each, text="") for each in document.problems)
            document = replace(document, text="", problems=shown)
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
        """Apply one `key=value`, `-p key=value`, `-H key=value` or `--ranks 2`."""
        flag, given = option(override)
        if flag == "--ranks":
            self._set((*self._launcher_path(), "processes_per_host"), given, flag)
            return
        key, separator, text = given.partition("=")
        source = f"{flag} {printable(key)}"
        # Hyperparameters have any names, also with dots.
        parts = (key.strip(),) if flag == "-H" else tuple(key.strip().split("."))
        if not separator or not all(parts):
            problem = LocatedProblem((), "must have the form `key=value`", _EXAMPLES[flag], source)
            self.problems.append(problem)
            return
        if flag == "-H":
            parts = ("hyperparameters", *parts)
        elif flag == "-p":
            parts = (*map(str, self._parameters_path()), *parts)
        elif parts[0] in _FREE_FORM and len(parts) > 1:
            parts = (parts[0], ".".join(parts[1:]))
        self._set(parts, text, source)

    def _launcher_path(self) -> KeyPath:
        """Return where this file has its launcher: mpirun's where that is enabled, or torchrun's, switched on."""
        mpi, torchrun = ((*(self.distribution or ()), name) for name in ("mpi", "torch_distributed"))
        if _get(self.value, (*mpi, "enabled")) is True:
            return mpi
        if _get(self.value, (*torchrun, "enabled")) is None:
            self._set((*torchrun, "enabled"), "true", "--ranks")
        return torchrun

    def _parameters_path(self) -> KeyPath:
        """Return where this file has its modelparallel parameters, or where they belong; then it is switched on."""
        if self.distribution is None:
            return ()
        full, short = ((*self.distribution, *block) for block in _BLOCKS)
        for block in (full, short):
            if isinstance(_get(self.value, (*block, "parameters")), dict):
                return (*block, "parameters")
        if _get(self.value, full) is None and _get(self.value, (*short, "enabled")) is not None:
            return (*short, "parameters")
        if _get(self.value, (*full, "enabled")) is None:
            self._set((*full, "enabled"), "true", "-p")
        return (*full, "parameters")

    def _set(self, path: KeyPath, text: str, source: str) -> None:
        # Environment variables are always text, so `1` needs no quotes inside quotes here.
        read = literal if path[:1] == ("environment",) and len(path) == 2 else parse_value

        def put() -> None:
            self._put(path, read(text, source))
            self.resolve_parameters()

        self._attempt(put, path)

    def _attempt(self, action: Callable[[], None], path: KeyPath = ()) -> None:
        try:
            action()
        except ConfigError as error:
            found = [problem for problem in error.problems if isinstance(problem, LocatedProblem)]
            self.problems += [replace(problem, text="") for problem in found] if is_confidential(path) else found

    def _put(self, path: KeyPath, document: Document) -> None:
        target = self.value
        for depth, part in enumerate(path[:-1]):
            below = target.get(str(part))
            if below is None:
                below = target[str(part)] = {}
            if not isinstance(below, dict):
                shown = HIDDEN if is_confidential(path) else quoted(below)
                message = f"cannot be set inside {shown}, which is no mapping"
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


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a null byte, or a loop of links
        return False


def _withheld(place: LocatedProblem) -> ConfigError:
    """Refuse a file outside the job's folder, such as /etc/shadow, without a word of what it says.

    Who wrote the job file may be allowed to read less than who checks it.
    """
    message = "names a file that does not hold parameters alone"
    hint = "what is wrong in it is shown only if it is below the folder of this file"
    return ConfigError([replace(place, message=message, hint=hint)])


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
