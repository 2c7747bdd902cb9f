"""A back end: where managed jobs run. Commands and `Job` know this protocol and nothing of a service behind it.

SageMaker (`sagemaker`), Slurm (`slurm`), Kubernetes (`kubernetes`) and AWS Batch (`batch`) are here.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from smpkit.config.documents import as_yaml
from smpkit.config.fields import JOB_NAME
from smpkit.config.job import JobConfig
from smpkit.config.section import KeyPath
from smpkit.config.words import quoted, suggestion
from smpkit.errors import CloudError, ConfigError, JobError, Problem, SmpkitError, UnreachableError, UsageError
from smpkit_estimator.status import JobStatus

OWN: Mapping[str, str] = {
    "sagemaker": "smpkit_estimator.sagemaker:open_sagemaker",
    "slurm": "smpkit_estimator.slurm.backend:SlurmCluster",
    "kubernetes": "smpkit_estimator.kubernetes.backend:KubernetesCluster",
    "batch": "smpkit_estimator.batch:open_batch",
}

_Answer = TypeVar("_Answer")


class Backend(Protocol):
    """Where jobs run.

    All methods raise CloudError in plain words, UnreachableError if trying again may help, UsageError if there is no
    such job, UnsupportedError by name for what this back end cannot do.
    """

    clock: Clock
    pace: float
    """Seconds between two looks at a job."""

    @property
    def title(self) -> str:
        """What it is called, with the place where jobs are: "SageMaker in eu-west-1"."""

    def plan(self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False) -> Plan:
        """Decide everything about a job; relative paths start at `folder`.

        Args:
            dry: it will only be shown, so placeholders may stand for what cannot be found out.

        Raises:
            ConfigError: the job cannot be sent as it is; lists all problems.
        """

    def submit(self, plan: Plan) -> Mapping[str, Any]:
        """Send what this back end planned, and start it; return what `submit --json` prints."""

    def describe(self, name: str) -> JobStatus:
        """Return what a job is doing now, or how it ended."""

    def log(self, name: str, *, since: datetime | None = None, tail: int | None = None) -> Iterator[list[LogLine]]:
        """Return an iterator without end over what is new in a job's log, sorted by time; `[]` is nothing new.

        After UnreachableError it goes on where it was.

        Args:
            since: leave out what was logged before.
            tail: begin with so many of the last lines of each host.
        """

    def stop(self, name: str) -> None:
        """Ask a job to stop, with time to save; one that is over is left alone."""

    def list(self, query: Query) -> Iterator[JobStatus]:
        """Yield jobs, newest first, with what can be told without asking for each."""

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Plan:
        """Plan a job that goes on from a job's checkpoints.

        Args:
            changes: `InstanceCount`, `InstanceType` and `MaxRuntimeInSeconds`, as far as they are to be different.
        """

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        """Look at the way to the back end, and at what a job names.

        Args:
            write: also write and delete something small where results will go.
        """

    def results(self, name: str, into: Path) -> Path:
        """Return the folder in which a job's ranks left what `smpkit report` shows: `run` among its other results.

        Args:
            into: an empty folder for a copy, where the files do not lie on a file system that this machine mounts.

        Raises:
            JobError: the job left none, or none yet.
            UnsupportedError: this machine cannot reach it.
        """

    def latest_checkpoint(self, place: str) -> str | None:
        """Return the newest whole checkpoint at the place that `JobStatus` names; None if there is none yet.

        Raises:
            UnsupportedError: this machine cannot look there.
        """


@dataclass(frozen=True)
class Access:
    """How to reach a back end, as far as the user says; each uses what means something to it."""

    profile: str | None = None
    """Of AWS; the context of a kubeconfig."""
    region: str | None = None
    """Of AWS; the namespace of Kubernetes."""


@dataclass(frozen=True)
class Query:
    """Which jobs are wanted."""

    status: str | None = None
    """A `JobStatus.status`."""
    name: str | None = None
    """A part of the name."""
    since: timedelta | None = None
    """Created so long ago at most."""
    limit: int = 20

    def of(self, jobs: Iterable[JobStatus], now: datetime) -> Iterator[JobStatus]:
        """Yield the wanted ones of `jobs`, which come newest first."""
        new = itertools.takewhile(lambda job: self.since is None or job.created >= now - self.since, jobs)
        named = (job for job in new if (self.name or "") in job.name)
        wanted = (job for job in named if self.status is None or job.status.lower() == self.status.lower())
        return itertools.islice(wanted, self.limit)


@dataclass(frozen=True)
class Plan:
    """All that will be sent, decided and checked; nothing was sent."""

    name: str
    machines: str
    """On what, in words."""
    shown: Mapping[str, Any]
    """What will be sent, without secrets, as JSON has it."""
    payload: Any = field(repr=False)
    """What will be sent, as the back end needs it."""
    max_seconds: int | None = None
    """How long the job may run; None where the back end decides."""
    notes: tuple[str, ...] = ()
    """What the user should know before it is sent."""
    script: str | None = None
    """What people read, where that is not `shown`."""

    def text(self) -> str:
        """What will be sent, for people, with a line end."""
        return as_yaml(dict(self.shown)) if self.script is None else self.script


@dataclass(frozen=True)
class LogLine:
    """One line of a job's log."""

    time: datetime
    host: str
    text: str

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, where the launcher, or mpirun, put it before the line."""
        prefix = re.match(r"\[rank (?P<ours>\d+)\]|\[\d+,(?:mpirank:)?(?P<mpi>\d+)", self.text)
        return int(prefix["ours"] or prefix["mpi"]) if prefix else None


def merged(lines: Iterable[LogLine]) -> list[LogLine]:
    """Sort lines of several streams by time; those of one stream keep their order."""
    return sorted(lines, key=lambda line: line.time)


@dataclass(frozen=True)
class Finding:
    """One thing that `smpkit doctor` looked at."""

    what: str
    state: Literal["ok", "problem", "info"]
    text: str
    hint: str | None = None


def refuse(problems: Iterable[Problem], where: str) -> None:
    """Raise if there are problems: the first one of each key.

    Raises:
        ConfigError: there are.
    """
    first: dict[KeyPath, Problem] = {}
    for problem in problems:
        first.setdefault(problem.path, problem)
    if first:
        raise ConfigError(list(first.values()), subject=f"job for {where}")


class NotStartedInterrupt(KeyboardInterrupt):
    """Ctrl-C came before the job was sent: it was not started."""


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Tell a Ctrl-C while sources are copied or uploaded, which may take minutes, from one while a job is sent."""
    try:
        yield
    except KeyboardInterrupt:
        raise NotStartedInterrupt from None


@contextlib.contextmanager
def undone_if_refused(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if a job is refused, so that nothing of it is left."""
    try:
        yield
    except UnreachableError:
        raise  # it may have been started, and needs what was made for it
    except CloudError:
        undo()
        raise


@dataclass
class StandIns:
    """What a dry run shows in place of what it cannot find out, with a note about each; other runs fail there."""

    dry: bool
    notes: list[str] = field(default_factory=list)

    def get(self, ask: Callable[[], _Answer], stand_in: _Answer, words: str) -> _Answer:
        """Return what `ask` returns; else the stand-in, which `words` tell behind the error."""
        try:
            return ask()
        except CloudError as error:
            if not self.dry:
                raise
            self.notes.append(f"{error.message}{words}")
            return stand_in


def in_doubt(error: SmpkitError, name: str) -> UnreachableError:
    """Return the error of a job that may have been started, though nobody said so."""
    hint = f"`smpkit status {name}` tells whether it was, `smpkit stop {name}` stops it; look before you start another"
    return UnreachableError(f"{error.message}; it may have been started all the same", hint=hint)


def tried(what: str, check: Callable[[], Finding], *, needed: bool = True) -> Finding:
    """Return what `check` finds, or its error: a problem if it is `needed`."""
    try:
        return check()
    except SmpkitError as error:
        return Finding(what, "problem" if needed else "info", error.message, error.hint)


class Clock:
    """Tells the time and waits; tests have another one, on which hours pass in milliseconds."""

    def now(self) -> datetime:
        """The present, in UTC."""
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


def run_below(results: Path, job: str) -> Path:
    """Return the folder with the measurements of a job's ranks, among its other results.

    The launcher names it to the ranks by SMPKIT_RUN_DIR, below SM_OUTPUT_DATA_DIR.

    Raises:
        JobError: there is none.
    """
    folder = results / "run"
    if not folder.is_dir():
        hint = "ranks that call `smp.init` leave it; it is there when the first of them has ended"
        raise JobError(f"job `{job}` has left no measurements: there is no folder {folder}", hint=hint)
    return folder


_MAX_NAME_CHARACTERS = 63


def unique_name(base: str, now: datetime, longest: int = _MAX_NAME_CHARACTERS) -> str:
    """Return a job name as SDK v2 makes it: the base, cut to fit, and the time to the millisecond."""
    stamp = now.strftime("%Y-%m-%d-%H-%M-%S-") + f"{now.microsecond // 1000:03d}"
    return f"{base[: longest - len(stamp) - 1].rstrip('-')}-{stamp}"


def base_name(name: str) -> str:
    """Return a job's name without the time that `unique_name` has put behind it."""
    return re.sub(r"-\d{4}(-\d{2}){5}-\d{3}$", "", name)


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a job.

    Raises:
        UsageError: it cannot.
    """
    if re.fullmatch(JOB_NAME, name) is None:
        hint = "`smpkit submit` prints the name of a job, `smpkit jobs` lists them"
        raise UsageError(f"{quoted(name)} cannot be the name of a job", hint=hint)


def open_backend(name: str, access: Access | None = None) -> Backend:
    """Open a back end; nothing is asked of it yet.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in OWN:
        hint = suggestion(name, OWN) or f"those are {', '.join(OWN)}"
        raise UsageError(f"{quoted(name)} is no back end", hint=hint)
    module, _, function = OWN[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), function)(access or Access())
    return backend
