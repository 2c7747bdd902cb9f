"""A back end: where managed jobs run. Commands and `Job` know this protocol and nothing of a service behind it.

SageMaker (`sagemaker`), Slurm (`slurm`), Kubernetes (`kubernetes`) and AWS Batch (`batch`) are here. A package adds one
with an entry point of the group `smpkit.backends`: a function that takes `Access` and returns a `Backend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from smpkit.config.job import JobConfig
from smpkit.config.words import quoted, suggestion
from smpkit.errors import UsageError
from smpkit_estimator.clock import Clock
from smpkit_estimator.files import Files
from smpkit_estimator.finding import Finding
from smpkit_estimator.log_line import LogLine
from smpkit_estimator.status import JobStatus

__all__ = [
    "GROUP",
    "OWN",
    "Access",
    "Backend",
    "JobSummary",
    "Log",
    "Pace",
    "Plan",
    "Query",
    "known_backends",
    "open_backend",
]

GROUP = "smpkit.backends"
"""The group of entry points."""

OWN: Mapping[str, str] = {
    "sagemaker": "smpkit_estimator.sagemaker:open_sagemaker",
    "slurm": "smpkit_estimator.slurm.backend:open_slurm",
    "kubernetes": "smpkit_estimator.kubernetes.backend:open_kubernetes",
    "batch": "smpkit_estimator.batch.backend:open_batch",
}


@dataclass(frozen=True)
class Access:
    """What the user says about the way to a back end; each uses what it has a meaning for."""

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


@dataclass(frozen=True)
class JobSummary:
    """One job of a list."""

    name: str
    arn: str
    status: str
    phase: str | None
    created: datetime
    ended: datetime | None


class Plan(Protocol):
    """All that will be sent, decided and checked; nothing was sent."""

    @property
    def job_names(self) -> Sequence[str]:
        """The jobs that it starts: one, or those of an array."""

    @property
    def machines(self) -> str:
        """On what, in words."""

    @property
    def max_seconds(self) -> int | None:
        """How long a job may run; None where the back end decides."""

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know before it is sent."""

    def shown(self) -> Mapping[str, Any]:
        """What will be sent, without secrets, as JSON has it."""

    def text(self) -> str:
        """The same for people, with a line end."""


class Log(Protocol):
    """A job's log, read as far as it has come; `read` again for what came since."""

    incomplete: list[str]
    """Parts that were given up."""

    @property
    def hosts(self) -> set[str]:
        """The hosts that have logged anything."""

    @property
    def num_streams(self) -> int:
        """How many parts there are so far."""

    def read(self) -> list[LogLine]:
        """Return what is new, sorted by time."""

    def tail(self, count: int, keep: Callable[[LogLine], bool]) -> list[LogLine]:
        """Return the last `count` lines of those that `keep` wants; `read` then goes on behind them."""


@dataclass(frozen=True)
class Pace:
    """How fast a back end is asked and how late its log comes, in seconds."""

    poll: float = 5.0
    streams_per_second: float = 8.0
    """CloudWatch allows 25 reads a second in a whole account; a follower of many streams takes a third of that."""
    settle: float = 5.0
    """Between two reads after the job has ended."""
    wait: float = 10.0
    """Between two looks at a job that is waited for."""


class Backend(Protocol):
    """Where jobs run.

    All methods raise CloudError in plain words, UnreachableError if trying again may help, UsageError if there is no
    such job, UnsupportedError by name for what this back end cannot do.
    """

    clock: Clock
    pace: Pace

    @property
    def place(self) -> str:
        """Where jobs are, in words that follow "in": a region, a cluster."""

    @property
    def title(self) -> str:
        """What it is called, with the place: "SageMaker in eu-west-1"."""

    def plan(
        self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False, script_only: bool = False
    ) -> Plan:
        """Decide everything about a job; relative paths start at `folder`.

        Args:
            dry: it will only be shown, so placeholders may stand for what cannot be found out.
            script_only: pack the entry point and the dependencies alone.

        Raises:
            ConfigError: the job cannot be sent as it is; lists all problems.
        """

    def submit(self, plan: Any) -> Mapping[str, Any]:
        """Send what this back end planned, and start it; return what `submit --json` prints."""

    def describe(self, name: str) -> JobStatus:
        """Return what a job is doing now, or how it ended."""

    def details(self, name: str) -> dict[str, Any]:
        """Return all that the back end knows about a job, in its own words."""

    def logs(self, name: str, since: datetime | None = None) -> Log:
        """Return a job's log, without what was logged before `since`."""

    def stop(self, name: str) -> None:
        """Ask a job to stop, with time to save; one that is over is left alone."""

    def list(self, query: Query) -> Iterator[JobSummary]:
        """Yield jobs, newest first."""

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Plan:
        """Plan a job that goes on from a job's checkpoints.

        Args:
            changes: `InstanceCount`, `InstanceType` and `MaxRuntimeInSeconds`, as far as they are to be different.
        """

    def files(self, place: str) -> Files:
        """Return what is at a place that a job file or `JobStatus` names, such as its checkpoints.

        Raises:
            UnsupportedError: this machine cannot look there.
        """

    def run_folder(self, name: str, into: Path) -> Path:
        """Return the folder in which a job's ranks left what `smpkit report` shows: `run` among its other results.

        Args:
            into: an empty folder for a copy, where the files do not lie on a file system that this machine mounts.

        Raises:
            JobError: the job left none, or none yet.
            UnsupportedError: this machine cannot reach it.
        """

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        """Look at the way to the back end, and at what a job names.

        Args:
            write: also write and delete something small where results will go.
        """


def known_backends() -> list[str]:
    """Return the names of all back ends, those of other packages last."""
    return [*OWN, *(name for name in _others() if name not in OWN)]


def open_backend(name: str, access: Access | None = None) -> Backend:
    """Open a back end; nothing is asked of it yet.

    Raises:
        UsageError: there is none of this name.
    """
    others = {} if name in OWN else _others()
    if name not in OWN and name not in others:
        known = known_backends()
        hint = suggestion(name, known) or f"those are {', '.join(known)}"
        raise UsageError(f"{quoted(name)} is no back end", hint=hint)
    if name in others:
        opener = others[name].load()
    else:
        module, _, function = OWN[name].partition(":")
        opener = getattr(importlib.import_module(module), function)
    backend: Backend = opener(access or Access())
    return backend


def _others() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=GROUP)}
