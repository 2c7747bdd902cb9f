"""What a job on AWS Batch is doing and how it ended, in the words that all back ends have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from smpkit_estimator.reason import JobFailure, read_reason
from smpkit_estimator.status import JobStatus, Machines, Phase

__all__ = ["state_of", "status_of"]

Object = Mapping[str, Any]

_PHASES = {
    "SUBMITTED": "Pending",
    "PENDING": "Pending",
    "RUNNABLE": "Pending",
    "STARTING": "Starting",
    "RUNNING": "Training",
}
_RANKED = re.compile(r"^rank \d+ on ", re.MULTILINE)
_LIMIT = re.compile(r"attempt duration exceeded timeout", re.IGNORECASE)


def state_of(job: Object) -> tuple[str, str]:
    """Return status and phase of a job, as `DescribeJobs` or `ListJobs` has it."""
    ended = bool(job.get("isTerminated") or job.get("isCancelled"))
    state = job["status"]
    if state == "SUCCEEDED":
        return "Completed", "Completed"
    if state == "FAILED":
        if _LIMIT.search(job.get("statusReason", "")):
            return "Stopped", "MaxRuntimeExceeded"
        return ("Stopped", "Stopped") if ended else ("Failed", "Failed")
    return ("Stopping", "Stopping") if ended else ("InProgress", _PHASES.get(state, state.capitalize()))


def status_of(name: str, job: Object, spec: Mapping[str, Any], failures: Sequence[str], now: datetime) -> JobStatus:
    """Return the state of a job.

    Args:
        spec: what its hosts read.
        failures: what the launchers of its hosts left.
    """
    status, phase = state_of(job)
    created = _time(job.get("createdAt")) or datetime.fromisoformat(spec["created"])
    over = status in ("Completed", "Failed", "Stopped")
    # A job that waits for its next attempt has the time at which the last one began.
    started = _time(job.get("startedAt")) if over or phase in ("Training", "Stopping") else None
    ended = (_time(job.get("stoppedAt")) or started or created) if over else None
    message = job.get("statusReason", "")
    seconds = round((ended - started).total_seconds()) if ended and started else 0
    attempts = list(_attempts(job, current=started if over else None))
    phases = tuple(_phases(attempts, phase, message, created, started, ended))
    places = spec["places"]
    return JobStatus(
        name=name,
        arn=job["jobArn"],
        status=status,
        phase=phase,
        message=phases[-1].message,
        phases=phases,
        created=created,
        training_started=started,
        ended=ended,
        seen=now,
        billable_seconds=max(0, seconds) + round(sum(each.seconds(now) for each in attempts)) if over else None,
        training_seconds=max(0, seconds) if over else None,
        machines=(Machines("nodes", spec["instance_type"], int(spec["nodes"])),),
        spot=False,
        failure=_failure(job, failures) if status == "Failed" else None,
        model_data=places.get("model"),
        checkpoints=places.get("checkpoints"),
        metrics={},
    )


def _time(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc) if milliseconds else None


def _attempts(job: Object, current: datetime | None) -> Iterator[Phase]:
    """Yield the attempts that another one followed."""
    for number, each in enumerate(job.get("attempts") or (), 1):
        start, end = _time(each.get("startedAt")), _time(each.get("stoppedAt"))
        if start and end and start != current:
            yield Phase("Interrupted", f"attempt {number}: {each.get('statusReason', '')}", start, end)


def _phases(
    attempts: Sequence[Phase],
    phase: str,
    message: str,
    created: datetime,
    started: datetime | None,
    ended: datetime | None,
) -> Iterator[Phase]:
    yield from attempts
    if started is None:
        yield Phase(phase, message or "waiting for machines", created, ended)
        return
    yield Phase("Pending", "", created, started)
    yield Phase("Training" if ended else phase, message if not ended else "", started, ended)
    if ended:
        yield Phase(phase, message, ended, ended)


def _failure(job: Object, failures: Sequence[str]) -> JobFailure:
    """Return why a job failed: what the host of the first failing rank left, else another, else Batch's words."""
    if failures:
        return read_reason(min(failures, key=lambda text: _RANKED.search(text) is None))
    container = job.get("container", {})
    code = f", exit code: {container['exitCode']}" if "exitCode" in container else ""
    words = container.get("reason") or job.get("statusReason") or "Batch does not say why"
    return read_reason(f"{words}{code}")
