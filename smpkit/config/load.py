"""From a file to a checked configuration: defaults < file < environment variables < `--set`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from smpkit.config.distribution import Distribution
from smpkit.config.document import Document
from smpkit.config.explain import explain
from smpkit.config.files import read_document, similar
from smpkit.config.job import JobConfig
from smpkit.config.locate import LocatedProblem
from smpkit.config.migrate import HISTORIC, V2_KEYS
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.config.section import KeyPath, Section
from smpkit.config.sources import ENVIRONMENT_PREFIX, Sources
from smpkit.config.words import printable, quoted
from smpkit.errors import ConfigError, Problem

__all__ = ["Kind", "Loaded", "LoadedJob", "load", "load_job"]

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
    if names & {*ModelParallelConfig.keys(), "partitions", *HISTORIC, *V2_KEYS}:
        return "modelparallel"
    return "job"


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


def _file_problems(value: object, folder: Path) -> Iterable[Problem]:
    """Say which sources are not there, whatever else is wrong; what is in a bucket cannot be known here."""
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
