"""What a managed job is doing, how it ended and why, in the words that all back ends have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

FINAL = frozenset({"Completed", "Failed", "Stopped", "Deleting"})
"""Primary statuses in which nothing happens any more."""

_MAX_REASON_CHARACTERS = 1024


@dataclass(frozen=True)
class Phase:
    """One of the service's secondary statuses, and when it was."""

    name: str
    message: str
    start: datetime
    end: datetime | None

    def seconds(self, now: datetime) -> float:
        """Its length, up to now if it goes on."""
        return ((self.end or now) - self.start).total_seconds()


@dataclass(frozen=True)
class Machines:
    """Some of a job's hosts, all of one kind."""

    group: str
    """Name of the instance group; `homogeneousCluster` where a job has no groups."""
    instance_type: str
    instance_count: int


@dataclass(frozen=True)
class JobFailure:
    """Why a job failed."""

    reason: str
    """FailureReason as the service has it: at most 1,024 characters of what the container left."""
    headline: str
    """The exception, or the service's sentence."""
    rank: int | None
    """The first rank that failed, if our launcher named one."""
    host: str | None
    exit_code: int | None
    details: tuple[str, ...]
    """Where it happened, innermost first."""
    hint: str | None


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment."""

    name: str
    arn: str
    status: str
    """`InProgress`, `Completed`, `Failed`, `Stopping`, `Stopped` or `Deleting`."""
    phase: str
    """The service's secondary status: `Starting`, `Downloading`, `Training`, `Interrupted`, ..."""
    created: datetime
    seen: datetime
    """When this was asked for."""
    ended: datetime | None = None
    # Lists of jobs leave out what follows.
    message: str = ""
    """What the service says about the phase."""
    phases: tuple[Phase, ...] = ()
    training_started: datetime | None = None
    billable_seconds: int | None = None
    """For each instance; None until the job has ended."""
    training_seconds: int | None = None
    machines: tuple[Machines, ...] = ()
    """The hosts by kind; several entries where the job has instance groups."""
    spot: bool = False
    failure: JobFailure | None = None
    model_data: str | None = None
    """S3 URI of the model; the service names it before it is known whether the script wrote one."""
    checkpoints: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the service says, in its own words; empty where a scheduler says it in several places."""

    @property
    def instance_count(self) -> int:
        """Number of hosts, of all groups together."""
        return sum(group.instance_count for group in self.machines)

    @property
    def over(self) -> bool:
        """Whether the job has ended, one way or another."""
        return self.status in FINAL

    @property
    def succeeded(self) -> bool:
        """Whether the script succeeded."""
        return self.status == "Completed"

    @property
    def seconds(self) -> float:
        """Time since the job was created, to its end if it has ended."""
        return max(0.0, ((self.ended or self.seen) - self.created).total_seconds())

    @property
    def billable_so_far(self) -> float:
        """Seconds that are billed, for each instance; while the job runs, those since the machines began to work."""
        if self.billable_seconds is not None:
            return self.billable_seconds
        idle = ("Pending", "Starting", "LaunchingMLInstances", "PreparingTrainingStack", "Interrupted")
        working = [phase for phase in self.phases if phase.name not in idle and phase.name not in FINAL]
        return max(0.0, sum(phase.seconds(self.seen) for phase in working))

    @property
    def interruptions(self) -> int:
        """How often spot capacity was taken away."""
        return sum(phase.name in ("Interrupted", "Restarting") for phase in self.phases)


# ---- why it failed ---------------------------------------------------------------------------------------------------

_PREFIX = re.compile(r"^(?:AlgorithmError|ClientError|InternalServerError|CapacityError)\s*:\s*")
_SUFFIX = re.compile(r",? exit code: (?P<code>\d+)\s*$")
_RANK = re.compile(r"^rank (?P<rank>\d+) on (?P<host>\S+), exit (?P<code>\d+)$", re.MULTILINE)
_ELSEWHERE = re.compile(r"^rank (?P<rank>\d+): (?P<headline>.*)\non (?P<host>\S+); \S+ ended because of it$", re.DOTALL)
"""What a host leaves that ended because of another one; SageMaker shows the reason of one host."""
_HINT = re.compile(r"^hint: (?P<hint>.+)$", re.MULTILINE)

_HINTS: Mapping[str, str] = {
    r"capacity|CapacityError": "try later, in another region or with another `compute.instance_type`; spot may wait",
    r"\bECR\b|image.*(not found|does not exist)|Cannot find repository": "`smpkit doctor` checks the image",
    r"OutOfMemory|exit code: 137|killed by SIGKILL|out of memory": "`smpkit plan` shows the memory of each rank",
    r"No S3 objects found|S3 (key|prefix)": "look at `inputs` with `aws s3 ls`; end a folder's prefix with `/`",
    r"AccessDenied|not authorized|Access Denied": "the job's role needs this permission, not you",
    r"InternalServerError": "SageMaker's own error: submit again, or set `compute.retries`",
}


def read_reason(reason: str) -> JobFailure:
    """Take a FailureReason apart."""
    text = _PREFIX.sub("", reason.strip())
    suffix = _SUFFIX.search(text)
    exit_code = int(suffix["code"]) if suffix else None
    body = text[: suffix.start()] if suffix else text
    elsewhere, hint = _ELSEWHERE.search(body), _HINT.search(body)
    if elsewhere:
        body = f"{elsewhere['headline']}\nrank {elsewhere['rank']} on {elsewhere['host']}, exit {exit_code or 1}"
    place = _RANK.search(body)
    lines = [line for line in body.splitlines() if not (_RANK.fullmatch(line) or _HINT.fullmatch(line))]
    # Our launcher writes the exception before the rank's place; what others write says it in the first line.
    if place:
        headline = body[: place.start()].strip()
    else:
        headline = body[: len(lines[0])].strip() if lines else ""
    rest = lines[len(headline.splitlines()) :]
    return JobFailure(
        reason=reason,
        headline=headline or reason.strip(),
        rank=int(place["rank"]) if place else None,
        host=place["host"] if place else None,
        exit_code=int(place["code"]) if place else exit_code,
        details=tuple(line for line in rest if line.strip()),
        hint=hint["hint"] if hint else _hint(reason),
    )


def _hint(reason: str) -> str | None:
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, reason, re.IGNORECASE)), None)


def failure_of(reasons: Iterable[tuple[datetime, str]], platform_words: str) -> JobFailure:
    """Return why a job failed: the reason that one of its hosts left, or else what the platform says.

    The earliest reason that names a rank goes before all others: hosts that ended because of another one name none.

    Args:
        reasons: with the time of each.
    """
    default = (None, platform_words)
    told = (reason for reason in reasons if reason[1].strip())  # on a full disk a host leaves an empty file
    _, words = min(told, key=lambda reason: (_RANK.search(reason[1]) is None, reason[0]), default=default)
    return read_reason(words[:_MAX_REASON_CHARACTERS])
