"""The life of a job as a pure function of its script and times: every transition, every attempt, every line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from smpkit.testing.fake_sagemaker.script import Script

__all__ = ["Attempt", "History", "Transition", "history"]

_MESSAGES: Mapping[str, str] = {
    "Pending": "Waiting for capacity",
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading the training image",
    "Training": "Training image download completed. Training in progress.",
    "Interrupted": "Insufficient capacity: the spot instances were reclaimed",
    "Stopping": "Stopping the training job",
    "Uploading": "Uploading generated training model",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job exceeded MaxWaitTimeInSeconds provided",
}
_WAITING = ("Pending", "Starting", "Interrupted")


@dataclass(frozen=True)
class Transition:
    """A phase of a job, with SageMaker's secondary status as its name."""

    status: str
    start: datetime
    end: datetime

    @property
    def message(self) -> str:
        """What the service says about it."""
        return _MESSAGES[self.status]


@dataclass(frozen=True)
class Attempt:
    """One run of the script, on machines of its own."""

    start: datetime
    end: datetime


@dataclass(frozen=True)
class History:
    """The whole life of a job; the last transition is its final state and has no length."""

    transitions: tuple[Transition, ...]
    attempts: tuple[Attempt, ...]
    final: str
    """`Completed`, `Failed` or `Stopped`."""

    def until(self, now: datetime) -> list[Transition]:
        """Return what has begun."""
        return [part for part in self.transitions if part.start <= now] or [self.transitions[0]]

    def working_seconds(self, now: datetime) -> float:
        """Return for how long there have been machines at work."""
        parts = [part for part in self.until(now) if part.status not in _WAITING]
        return sum((min(part.end, now) - part.start).total_seconds() for part in parts)


def history(script: Script, request: Mapping[str, Any], created: datetime, stopped: datetime | None) -> History:
    """Return the life of a job: as `script` has it, unless it is stopped or runs into a limit of its request."""
    limits = request.get("StoppingCondition", {})
    longest = limits.get("MaxRuntimeInSeconds", 86_400)
    ends: list[tuple[datetime, str]] = []
    if stopped is not None:
        ends.append((stopped, "Stopped"))
    if "MaxWaitTimeInSeconds" in limits:
        ends.append((created + timedelta(seconds=limits["MaxWaitTimeInSeconds"]), "MaxWaitTimeExceeded"))
    parts: list[Transition] = []
    now, trained = created, 0.0
    for status, seconds in _phases(script):
        part = Transition(status, now, now + timedelta(seconds=seconds))
        limit = [(now + timedelta(seconds=longest - trained), "MaxRuntimeExceeded")] if status == "Training" else []
        cut, reason = min(ends + limit, default=(part.end, ""))
        if cut < part.end and status not in ("Uploading", "Completed", "Failed"):
            parts.append(replace(part, end=max(cut, now)))
            return _stopped(script, parts, reason)
        parts.append(part)
        now = part.end
        trained += seconds if status == "Training" else 0.0
    return History(tuple(parts), _attempts(parts), parts[-1].status)


def _phases(script: Script) -> Iterator[tuple[str, float]]:
    for interruption in script.interruptions:
        yield from (("Starting", script.starting), ("Downloading", script.downloading))
        yield from (("Training", interruption), ("Interrupted", script.waiting))
    yield from (("Starting", script.starting), ("Downloading", script.downloading))
    yield from (("Training", script.training), ("Uploading", script.uploading))
    yield ("Completed" if script.failure is None else "Failed"), 0.0


def _stopped(script: Script, parts: list[Transition], reason: str) -> History:
    running = parts[-1].status == "Training"
    saved = parts[-1].end + timedelta(seconds=script.saving if running else 1.0)
    parts = [*parts, Transition("Stopping", parts[-1].end, saved)]
    attempts = _attempts(parts)
    if attempts:
        parts.append(Transition("Uploading", saved, saved + timedelta(seconds=script.uploading)))
    end = parts[-1].end
    return History((*parts, Transition(reason, end, end)), attempts, "Stopped")


def _attempts(parts: list[Transition]) -> tuple[Attempt, ...]:
    return tuple(Attempt(part.start, part.end) for part in parts if part.status == "Training")
