"""What a run on Slurm is doing and how it ended, in the words that all back ends have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit_estimator.reason import JobFailure, read_reason
from smpkit_estimator.slurm.commands import Record
from smpkit_estimator.status import JobStatus, Machines, Phase

__all__ = ["status_of"]

_STATES: Mapping[str, tuple[str, str]] = {
    "PENDING": ("InProgress", "Pending"),
    "CONFIGURING": ("InProgress", "Starting"),
    "RUNNING": ("InProgress", "Training"),
    "SUSPENDED": ("InProgress", "Suspended"),
    "STOPPED": ("InProgress", "Suspended"),
    "SIGNALING": ("InProgress", "Training"),
    "STAGE_OUT": ("InProgress", "Uploading"),
    "COMPLETING": ("InProgress", "Completing"),
    "REQUEUED": ("InProgress", "Pending"),
    "REQUEUE_FED": ("InProgress", "Pending"),
    "REQUEUE_HOLD": ("InProgress", "Pending"),
    "RESIZING": ("InProgress", "Training"),
    "RESV_DEL_HOLD": ("InProgress", "Pending"),
    "SPECIAL_EXIT": ("InProgress", "Pending"),
    "COMPLETED": ("Completed", "Completed"),
    "CANCELLED": ("Stopped", "Stopped"),
    "TIMEOUT": ("Stopped", "MaxRuntimeExceeded"),
    "DEADLINE": ("Stopped", "MaxWaitTimeExceeded"),
    "PREEMPTED": ("Stopped", "Interrupted"),
    "REVOKED": ("Stopped", "Stopped"),
}
"""Status and phase by Slurm's state; all others (`FAILED`, `NODE_FAIL`, `OUT_OF_MEMORY`, ...) have failed."""

_WORDS: Mapping[str, str] = {
    "NODE_FAIL": "a node of the job failed",
    "OUT_OF_MEMORY": "the job ran out of memory (Slurm: OUT_OF_MEMORY)",
    "BOOT_FAIL": "the job's nodes could not be started",
}
_RANKED = re.compile(r"^rank \d+ on ", re.MULTILINE)
_MAX_REASON_CHARACTERS = 1024
_LAST_LINES = 5


def status_of(name: str, run: Path, spec: Mapping[str, Any], record: Record, now: datetime) -> JobStatus:
    """Return the state of a run from what Slurm and the run's folder say."""
    status, phase = _STATES.get(record.state, ("Failed", "Failed"))
    asked = (run / "stopped").exists()
    if asked and status == "Completed":
        status, phase = "Stopped", "Stopped"
    elif asked and status == "InProgress":
        status, phase = "Stopping", "Stopping"
    created = record.submitted or datetime.fromisoformat(spec["created"])
    over = status in ("Completed", "Failed", "Stopped")
    started = record.started if record.state != "PENDING" else None
    ended = (record.ended or started or now) if over else None
    phases = tuple(_phases(record, phase, created, started, ended))
    seconds = round((ended - started).total_seconds()) if ended and started else 0
    return JobStatus(
        name=name,
        arn=f"slurm:{spec.get('cluster', '')}/{record.id}",
        status=status,
        phase=phase,
        message=phases[-1].message,
        phases=phases,
        created=created,
        training_started=started,
        ended=ended,
        seen=now,
        billable_seconds=max(0, seconds) if over else None,
        training_seconds=max(0, seconds) if over else None,
        machines=(Machines("nodes", record.partition or "node", record.node_count or int(spec["nodes"])),),
        spot=False,
        failure=_failure(run, record) if status == "Failed" else None,
        model_data=_written(Path(spec["places"]["model"])),
        checkpoints=spec["places"]["checkpoints"],
        metrics={},
    )


def _phases(
    record: Record, phase: str, created: datetime, started: datetime | None, ended: datetime | None
) -> Iterator[Phase]:
    # Slurm keeps the times of the last attempt only, so the earlier ones have no length.
    for number in range(record.restarts):
        yield Phase("Interrupted", f"attempt {number + 1} was requeued", created, created)
    if started is None or started > (ended or started):
        reason = record.reason if record.reason not in ("", "None") else "waiting for Slurm"
        yield Phase(phase if ended or phase == "Stopping" else "Pending", reason, created, ended)
        return
    yield Phase("Pending", "", created, started)
    yield Phase("Training" if ended else phase, f"on {record.nodes}", started, ended)
    if ended:
        yield Phase(phase, record.state, ended, ended)


def _failure(run: Path, record: Record) -> JobFailure:
    """Return why a run failed: what the host of the first failing rank left, else another, else Slurm's words."""
    texts = [path.read_text("utf-8", "replace") for path in sorted(run.glob("nodes/*/output/failure"))]
    texts.sort(key=lambda text: _RANKED.search(text) is None)
    if texts:
        return read_reason(texts[0][:_MAX_REASON_CHARACTERS])
    words = _WORDS.get(record.state, f"Slurm says {record.state}, {record.reason}")
    log = run / "logs" / "slurm.log"
    lines = log.read_text("utf-8", "replace").strip().splitlines()[-_LAST_LINES:] if log.is_file() else []
    return read_reason("\n".join([words, *lines])[:_MAX_REASON_CHARACTERS])


def _written(folder: Path) -> str | None:
    return str(folder) if folder.is_dir() and any(path.is_file() for path in folder.rglob("*")) else None
