"""From a file to a checked configuration: defaults < file < `--set`, `-p`, `-H`."""

from __future__ import annotations

import io
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from smpkit.config.backend import BackendChoice
from smpkit.config.confidential import HIDDEN, is_confidential, masked
from smpkit.config.distribution import BLOCK_PATH, Distribution
from smpkit.config.documents import Document, parse, read_document, refuse, similar
from smpkit.config.job import Channel, Checkpoints, JobConfig, Secret
from smpkit.config.modelparallel import HISTORIC, V2_KEYS, ModelParallelConfig
from smpkit.config.schema import MODELS
from smpkit.config.section import KeyPath, Section, explain
from smpkit.config.words import printable, quoted
from smpkit.errors import ConfigError, Problem, UsageError

Override = tuple[str, str]
"""A flag and what it was given: `("--set", "compute.spot=true")`, `("-p", "microbatches=8")`, `("-H", "lr=0.1")`,
`("--hosts", "2")`, `("--ranks", "4")` for the ranks on all hosts together, or `null` for any number. Values are read as
YAML."""

_KIND_NAMES: Mapping[str, str] = {
    "job": "job file",
    "distribution": "distribution",
    "modelparallel": "modelparallel configuration",
}
_DISTRIBUTIONS: Mapping[str, KeyPath | None] = {"job": ("distribution",), "distribution": (), "modelparallel": None}
_HOMES: Mapping[str, str] = {
    "distribution": "distribution",
    "modelparallel": "distribution.smdistributed.modelparallel.parameters",
}


@dataclass(frozen=True)
class Loaded:
    """A checked configuration and where it came from."""

    kind: str
    """`job`, `distribution` or `modelparallel`."""

    config: Section
    notices: tuple[Problem, ...]
    """Settings without effect."""

    origins: Mapping[KeyPath, str]
    """Path of each value -> `default`, `job.yaml:4` or `--set compute.spot`."""

    path: Path
    """The file, as the user named it."""

    @property
    def kind_name(self) -> str:
        """The kind in words."""
        return _KIND_NAMES[self.kind]

    def settings(self) -> Iterator[tuple[KeyPath, Any, str]]:
        """Yield each setting with its value, hidden if it is probably a secret, and its origin."""
        values = self.config.model_dump(mode="json")
        for path, origin in self.origins.items():
            yield path, masked(str(path[-1]), _get(values, path)), origin

    def located(self, problem: Problem) -> Problem:
        """Add where the value of a problem, or one around or inside it, was written."""
        path = problem.path
        origins = (
            self.origins[leaf] for leaf in self.origins if leaf[: len(path)] == path or path[: len(leaf)] == leaf
        )
        return replace(problem, source=next((origin for origin in origins if origin != "default"), ""))


@dataclass(frozen=True)
class LoadedJob(Loaded):
    """A checked job file; paths in it are relative to `folder`."""

    config: JobConfig

    def __repr__(self) -> str:  # without its values, some of which are secrets
        return f"LoadedJob({str(self.path)!r})"

    @property
    def folder(self) -> Path:
        """The folder of the job file."""
        return self.path.parent


def load_job(path: Path | str, overrides: Sequence[Override] = ()) -> LoadedJob:
    """Read and check a job file.

    Args:
        path: a YAML file, or strict JSON if it is called `.json`.
        overrides: options of the command line, which go before the file; later ones win.

    Raises:
        ConfigError: with all problems, each with its place.
    """
    loaded = load(path, overrides)
    if not isinstance(loaded, LoadedJob):
        hint = f"make a job file with an `entry_point` and put it under `{_HOMES[loaded.kind]}`"
        refuse(printable(str(path)), f"is a {loaded.kind_name}, not a job file", hint)
    return loaded


def load_script(path: Path, overrides: Sequence[Override] = ()) -> LoadedJob:
    """Return the job that trains with a script and has no job file."""
    loaded = _load("job", path, Document(printable(str(path)), {"entry_point": path.name}), overrides)
    assert isinstance(loaded, LoadedJob)
    return loaded


def sizes_over_file(hosts: int | None, ranks: int | None) -> list[Override]:
    """Return what goes last over a file if these are known: ranks are divided over the hosts."""
    sizes = {"--hosts": hosts, "--ranks": ranks}
    return [(flag, str(number)) for flag, number in sizes.items() if number is not None]


def is_script(path: Path | str) -> bool:
    """Tell whether a file is called as what a job runs is, not as a job file."""
    return PurePath(path).suffix in (".py", ".sh")


def load(path: Path | str, overrides: Sequence[Override] = ()) -> Loaded:
    """Read and check a file of any kind: a job, a distribution, or modelparallel parameters alone."""
    path = Path(path)
    if is_script(path):
        shown = printable(str(path))
        refuse(shown, "is a script", f"`smpkit run {shlex.quote(shown)}` runs it; `smpkit init` writes its job file")
    document = read_document(path)
    return _load(_kind(document), path, document, overrides)


def _kind(document: Document) -> str:
    """Recognise what a document is by its names; a job file unless it must be something else."""
    value = document.value
    if not isinstance(value, dict):
        message = "is empty" if value is None else f"must be a mapping of settings, got {quoted(value)}"
        refuse(document.name, message, "`smpkit schema` shows what can be set")
    names = set(value)
    if names & set(JobConfig.keys()):
        return "job"
    if names & {*Distribution.keys(), *Distribution.foreign} or names >= {"enabled", "parameters"}:
        return "distribution"
    return "modelparallel" if names & {*ModelParallelConfig.keys(), "partitions", *HISTORIC, *V2_KEYS} else "job"


def _load(kind: str, path: Path, document: Document, overrides: Sequence[Override]) -> Loaded:
    sources = _Sources(path.parent, document.value, [((), document)], _DISTRIBUTIONS[kind], list(document.problems))
    sources.resolve_parameters()
    for flag, value in overrides:
        sources.set_override(flag, value)
    config: Section | None = None
    problems: list[Problem] = []
    try:
        config = MODELS[kind].model_validate(sources.value)
    except ValidationError as error:
        problems += explain(error)
    if kind == "job":
        problems += _file_problems(sources.value, path.parent)
    if problems or sources.problems or config is None:
        what = "job of" if is_script(path) else _KIND_NAMES[kind]
        raise ConfigError(sources.located(problems), subject=f"{what} {printable(str(path))}")
    assert isinstance(config, (JobConfig, Distribution, ModelParallelConfig))
    notices = config.notices(sources.value) if isinstance(config, ModelParallelConfig) else config.notices()
    origins = {leaf: sources.origin(leaf) for leaf in _leaves(config.model_dump())}
    result: type[Loaded] = LoadedJob if kind == "job" else Loaded
    return result(kind, config, sources.located(notices), origins, path)


def _file_problems(value: Mapping[str, Any], folder: Path) -> Iterable[Problem]:
    """Report missing sources beside all other problems; what is in a bucket is not known here."""
    try:
        names = ("entry_point", "source_dir", "dependencies")
        config = JobConfig.model_validate({name: value[name] for name in names if name in value})
    except ValidationError:
        return  # their own problems have been reported
    # os.path and not pathlib, which raises for names that are too long. Inputs may be made later, by another job.
    for index, name in enumerate(config.dependencies):
        if "://" not in name and not os.path.exists(folder / name):  # noqa: PTH110
            message = f"no such file or folder: {quoted(str(folder / name))}"
            yield Problem(("dependencies", index), message, similar(folder / name) or _RELATIVE)
    if "://" in config.source_dir:
        return
    source_dir = folder / config.source_dir
    script = source_dir / config.entry_point
    if not os.path.isdir(source_dir):  # noqa: PTH112
        yield Problem(("source_dir",), f"no such folder: {quoted(str(source_dir))}", similar(source_dir) or _RELATIVE)
    elif not os.path.isfile(script):  # noqa: PTH113
        where = "`source_dir`" if "source_dir" in value else "the folder of the job file, or to `source_dir`"
        hint = similar(script) or f"it is relative to {where}"
        yield Problem(("entry_point",), f"no such file: {quoted(str(script))}", hint)


_RELATIVE = "it is relative to the job file"


def _leaves(value: Any, path: KeyPath = ()) -> Iterable[KeyPath]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif path:
        yield path


# ---- sources of values -----------------------------------------------------------------------------------------------

# Names below these belong to the user: dots in them are part of the name.
_FREE_FORM = frozenset({"hyperparameters", "environment"})

_EXAMPLES: Mapping[str, str] = {
    "--set": "for example `compute.spot=true`",
    "-p": "for example `microbatches=8`",
    "-H": "for example `steps=100`",
}


@dataclass
class _Sources:
    """The values so far, and which document each part of them came from; later documents lie over earlier ones."""

    folder: Path
    """What a path of another file is relative to."""

    value: dict[str, Any]

    layers: list[tuple[KeyPath, Document]]
    """What was put where, in this order; the first is the file, at the root."""

    distribution: KeyPath | None
    """Where the distribution is in this kind of file; None if there is none."""

    problems: list[Problem] = field(default_factory=list)
    """What is wrong with a source itself, with its place."""

    def resolve_parameters(self) -> None:
        """Replace a path given as `parameters` by what the file says."""
        path = _parameters_path(self.value, self.distribution)
        name = _get(self.value, path)
        if not isinstance(name, str):
            return
        below, document = self.layer(path)
        named_at = document.located(Problem(path, ""), below=below)
        # Whatever the file turns out to be, the path itself is not to be judged as parameters.
        self._put(path, Document(named_at.source, {}))
        message, hint = f"names a file outside the job's folder: {quoted(name)}", "put it beside the job file"
        if _is_inside(self.folder / name, self.folder):
            try:
                document = read_document(self.folder / name)
            except ConfigError as error:
                (problem,) = error.problems
                if problem.line is not None:
                    self.problems.append(problem)
                    return
                message, hint = f"names a file that {problem.message}", problem.hint or ""
            else:
                if isinstance(document.value, dict):
                    self._put(path, document)
                    return
                message = f"{quoted(name)} must hold a mapping of parameters, got {quoted(document.value)}"
                hint = ""
        self.problems.append(replace(named_at, message=message, hint=hint or None))

    def set_override(self, flag: str, argument: str) -> None:
        """Apply what an option was given."""
        if flag in ("--hosts", "--ranks"):
            self._set_size(flag, argument)
            return
        key, separator, text = argument.partition("=")
        source = f"{flag} {printable(key)}"
        # Hyperparameters have any names, also with dots.
        path: KeyPath = (key.strip(),) if flag == "-H" else tuple(key.strip().split("."))
        if not separator or not all(path):
            self.problems.append(Problem((), "must have the form `key=value`", _EXAMPLES[flag], source))
            return
        if flag == "-H":
            path = ("hyperparameters", *path)
        elif flag == "-p":
            path = (*self._switched_on(), *path)
        elif path[0] in _FREE_FORM and len(path) > 1:
            path = (path[0], ".".join(map(str, path[1:])))
        self._set(path, text, source)

    def _set_size(self, flag: str, argument: str) -> None:
        """Apply a number of hosts, which only a job has, or of ranks, which parameters alone do not have either."""
        if flag == "--hosts" and self.distribution:
            self._set(("compute", "instance_count"), argument, flag)
        elif flag == "--ranks" and self.distribution is not None:
            script = _get(self.value, ("entry_point",))
            if isinstance(script, str) and script.endswith(".sh"):
                message = "starts ranks, and a shell script has none: it runs once on each host"
                self.problems.append(Problem((), message, f"remove `{flag}`", flag))
                return
            hosts = _get(self.value, ("compute", "instance_count"))
            hosts = hosts if isinstance(hosts, int) and hosts > 0 else 1
            if argument != "null" and int(argument) % hosts:
                message = f"{argument} ranks cannot be spread evenly over {hosts} hosts"
                self.problems.append(Problem((), message, f"use a multiple of {hosts}", flag))
                return
            per_host = argument if argument == "null" else str(int(argument) // hosts)
            self._set((*self._launcher_path(), "processes_per_host"), per_host, flag)

    def _launcher_path(self) -> KeyPath:
        """Return where this file has its launcher: mpirun's where that is enabled, or torchrun's, switched on."""
        mpi, torchrun = ((*(self.distribution or ()), name) for name in ("mpi", "torch_distributed"))
        if _get(self.value, (*mpi, "enabled")) is True:
            return mpi
        if _get(self.value, (*torchrun, "enabled")) is None:
            self._set((*torchrun, "enabled"), "true", "--ranks")
        return torchrun

    def _switched_on(self) -> KeyPath:
        """Return where the modelparallel parameters are, in a block that is enabled if it does not say."""
        path = _parameters_path(self.value, self.distribution)
        if path and _get(self.value, (*path[:-1], "enabled")) is None:
            self._set((*path[:-1], "enabled"), "true", "-p")
        return path

    def _set(self, path: KeyPath, text: str, source: str) -> None:
        # Variables are always text, so `1` needs no quotes inside quotes here.
        is_text = path[:1] == ("environment",) and len(path) == 2
        try:
            document = Document(source, text) if is_text else parse(text, source)
            self._put(path, Document(source, document.value, problems=document.problems))
        except ConfigError as error:
            hide = is_confidential(path)
            self.problems += [replace(problem, excerpt="") if hide else problem for problem in error.problems]
        else:
            self.resolve_parameters()

    def _put(self, path: KeyPath, document: Document) -> None:
        target = self.value
        for depth, part in enumerate(path[:-1]):
            below = target.get(str(part))
            if below is None:
                below = target[str(part)] = {}
            if isinstance(below, str) and (field := _text_alone(path[: depth + 1], self.distribution)):
                below = target[str(part)] = {field: below}
            if not isinstance(below, dict):
                shown = HIDDEN if is_confidential(path) else quoted(below)
                message = f"cannot be set inside {shown}, which is no mapping"
                raise ConfigError([Problem(path[: depth + 2], message, None, document.name)])
            target = below
        target[str(path[-1])] = document.value
        self.layers.append((path, document))
        self.problems += document.problems

    def layer(self, path: KeyPath) -> tuple[KeyPath, Document]:
        """Find the uppermost document that covers a path, and where it was put."""
        return next(layer for layer in reversed(self.layers) if path[: len(layer[0])] == layer[0])

    def origin(self, leaf: KeyPath) -> str:
        """Say where an effective value came from."""
        path = _written(self.value, leaf, self.distribution)
        if path is None:
            return "default"
        below, document = self.layer(path)
        return replace(document.located(Problem(path, ""), below=below), exact=False).place

    def located(self, problems: Iterable[Problem]) -> tuple[Problem, ...]:
        """Add places to problems, and sort them, with those of the sources, by document and line."""
        documents = {document.name: document for _, document in self.layers}
        order = {name: position for position, name in enumerate(documents)}
        located = [
            document.located(problem, below=below)
            for problem in problems
            for below, document in [self.layer(problem.path)]
        ]
        located = sorted(
            [*self.problems, *located],
            key=lambda problem: (order.get(problem.source, len(order)), problem.line or 0, not problem.excerpt),
        )
        # Several on one line are told apart by a mark below it.
        shown = Counter((problem.source, problem.line) for problem in located if problem.excerpt)
        return tuple(
            documents[problem.source].marked(problem)
            if problem.source in documents and not problem.exact and shown[problem.source, problem.line] > 1
            else problem
            for problem in located
        )


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a null byte, or a loop of links
        return False


def _get(value: Any, path: KeyPath) -> Any:
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _parameters_path(value: Mapping[str, Any], distribution: KeyPath | None) -> KeyPath:
    """Return where a file has its modelparallel parameters, or where they belong.

    Args:
        distribution: where it has its distribution; None if it holds parameters alone.
    """
    if distribution is None:
        return ()
    full, short = (*distribution, *BLOCK_PATH), distribution
    for block in (full, short):
        if _get(value, (*block, "parameters")) is not None:
            return (*block, "parameters")
    is_short = _get(value, full) is None and _get(value, (*short, "enabled")) is not None
    return (*(short if is_short else full), "parameters")


def _written(raw: Mapping[str, Any], leaf: KeyPath, distribution: KeyPath | None) -> KeyPath | None:
    """Find where the user wrote an effective value; None if nowhere. Short forms and aliases have other paths."""
    candidates = [leaf]
    if distribution is not None:
        full = (*distribution, *BLOCK_PATH)
        candidates += [(*distribution, *leaf[len(full) :])] if leaf[: len(full)] == full else []
    if leaf[-1] == "pipeline_parallel_degree":
        candidates += [(*path[:-1], "partitions") for path in candidates]
    for path in candidates:
        parent = _get(raw, path[:-1])
        if isinstance(parent, dict) and path[-1] in parent:
            return path
    short = leaf[:-1]
    return short if isinstance(_get(raw, short), str) and leaf[-1] == _text_alone(short, distribution) else None


_TEXTS: Mapping[str, tuple[int, type[Section]]] = {
    "backend": (1, BackendChoice),
    "checkpoints": (1, Checkpoints),
    "inputs": (2, Channel),
    "secrets": (2, Secret),
}
"""The sections of a job file for which text alone may be written, and how deep they are."""


def _text_alone(path: KeyPath, distribution: KeyPath | None) -> str:
    """Return the field that text alone at this path stands for; empty where it stands for none."""
    depth, section = _TEXTS.get(str(path[0]), (0, Section)) if distribution else (0, Section)
    return section.short_form if len(path) == depth else ""


# ---- changes ---------------------------------------------------------------------------------------------------------


def file_of_parameters(file: Path) -> tuple[Path, KeyPath]:
    """Return the file that holds the modelparallel parameters of a job, a distribution or parameters, and where."""
    document = read_document(file)
    path = _parameters_path(document.value, _DISTRIBUTIONS[_kind(document)])
    name = _get(document.value, path)
    return (file.parent / name, ()) if isinstance(name, str) else (file, path)


def edited(text: str, name: str, path: KeyPath, values: Mapping[str, Any], remove: frozenset[str] = frozenset()) -> str:
    """Return the text in which the mapping at `path` has `values`, and none of the keys in `remove`.

    Everything else, comments too, stays as it is.

    Args:
        text: a configuration that was loaded, so that it has mappings where they belong.
        name: what messages call the text; it is JSON if this ends with `.json`.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    is_json = name.lower().endswith(".json")
    document = parse(text, name, is_json=is_json)
    lines = text.splitlines(keepends=True)
    for key in remove if not is_json else ():
        line, _ = document.positions.get((*path, key), (0, 0))
        if line and lines[line - 1].partition(":")[0].strip() == key:  # with its own comment, but not those around it
            lines[line - 1] = ""
    editor, stream = YAML(), io.StringIO()
    _, indent, offset = load_yaml_guess_indent(text := "".join(lines))
    editor.preserve_quotes, editor.width = True, 4096
    editor.indent(mapping=(indent or 2) - (offset or 0), sequence=indent or 2, offset=offset or 0)
    whole = document.value if is_json else editor.load(text)
    mapping = _mapping_at(whole, path, name)
    for key in remove:
        mapping.pop(key, None)
    for key, value in values.items():
        if key in mapping or is_json:
            mapping[key] = value
        else:
            mapping.insert(_end_of(mapping), key, value)
    if is_json:
        indent = len(lines[1]) - len(lines[1].lstrip(" ")) if len(lines) > 1 else None
        return json.dumps(whole, indent=indent, ensure_ascii=False) + "\n" * text.endswith("\n")
    editor.dump(whole, stream)
    return stream.getvalue()


def _mapping_at(whole: Any, path: KeyPath, name: str) -> Any:
    """Return the mapping at a path, where there is none a new one."""
    mapping = whole
    for depth, part in enumerate(path):
        if mapping.get(part) is None:
            mapping[part] = type(whole)()
        mapping = mapping[part]
        if hasattr(mapping, "anchor") and mapping.anchor.value is not None:
            where = ".".join(map(str, path[: depth + 1]))
            raise UsageError(f"`{name}` repeats another value at `{where}`", hint="write it out, then try again")
    return mapping


def _end_of(mapping: Any) -> int:
    """Return the last position in one of ruamel's mappings before which no lines of comments stand."""
    keys: list[str] = list(mapping)
    for position in range(len(keys), 0, -1):
        comment = (mapping.ca.items.get(keys[position - 1]) or [None] * 3)[2]
        if comment is None or not comment.value.partition("\n")[2]:
            return position
    return 0
