"""What a run is doing and how it ended: Slurm's commands, and what the run left."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from smpkit.config import scheduled as names
from smpkit.errors import CloudError, UnreachableError
from smpkit_estimator.scheduled import status_with_phases
from smpkit_estimator.slurm.folder import kept_job, read_json
from smpkit_estimator.status import FINAL, JobFailure, JobStatus, Machines, Phase, failure_of

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_STATES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(_WAITING, ("InProgress", "Pending")),
    "CONFIGURING": ("InProgress", "Starting"),
    **dict.fromkeys(("RUNNING", "SIGNALING", "RESIZING"), ("InProgress", "Training")),
    **dict.fromkeys(("SUSPENDED", "STOPPED"), ("InProgress", "Suspended")),
    "STAGE_OUT": ("InProgress", "Uploading"),
    "COMPLETING": ("InProgress", "Completing"),
    "COMPLETED": ("Completed", "Completed"),
    **dict.fromkeys(("CANCELLED", "REVOKED"), ("Stopped", "Stopped")),
    "TIMEOUT": ("Stopped", "MaxRuntimeExceeded"),
    "DEADLINE": ("Stopped", "MaxWaitTimeExceeded"),
    "PREEMPTED": ("Stopped", "Interrupted"),
}
"""Status and phase by Slurm's state; all others (`FAILED`, `NODE_FAIL`, `OUT_OF_MEMORY`, ...) have failed."""

_WORDS: Mapping[str, str] = {
    "NODE_FAIL": "a node of the job failed",
    "OUT_OF_MEMORY": "the job ran out of memory (Slurm: OUT_OF_MEMORY)",
    "BOOT_FAIL": "the job's nodes could not be started",
}
_LAST_LINES = 5


@dataclass(frozen=True)
class Record:
    """What is known about one job."""

    id: str
    state: str
    """`PENDING`, `RUNNING`, `COMPLETED`, ..."""
    reason: str = ""
    submitted: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    restarts: int = 0
    nodes: str = ""
    partition: str = ""
    node_count: int = 0


def record_of(run: Path, known: Mapping[str, Record] | None = None) -> Record:
    """Return what Slurm says of a run, or once it has forgotten it, what its batch script left.

    Args:
        known: all that the controller remembers, if it was asked for that.
    """
    sent = read_json(run / "slurm.json")
    number = str(sent["id"]) if "id" in sent else id_by_name(run.name)
    if number is None:  # `smpkit submit` ended before it could keep it
        number = "unknown"
        record = _left(run, number)
        if record is None and not (run / "logs" / "slurm.log").exists():
            raise CloudError(f"job `{run.name}` was not started", hint=f"`rm -r {shlex.quote(str(run))}` forgets it")
    elif known is None:
        record = records([number]).get(number) or accounted(number) or _left(run, number)
    else:  # of many runs, as few as possible are asked for one by one
        record = known.get(number) or _left(run, number) or accounted(number)
    if record is None:
        raise CloudError(f"Slurm no longer knows job `{run.name}` ({number}), and its batch script left no end")
    return record


def _left(run: Path, number: str) -> Record | None:
    """Return the end that a run's batch script has left; None if it was killed before it could."""
    try:
        code, restarts, began, ended = map(int, (run / "ended").read_text().split())
        started, over = (datetime.fromtimestamp(seconds, timezone.utc) for seconds in (began, ended))
    except (OSError, ValueError, OverflowError):
        return None
    state = {0: "COMPLETED", names.STOPPED: "CANCELLED"}.get(code, "FAILED")
    return Record(number, state, started=started, ended=over, restarts=restarts)


def listed_run(run: Path, known: Mapping[str, Record], now: datetime) -> JobStatus:
    try:
        return status_of(run, record_of(run, known), now)
    except UnreachableError:
        raise
    except CloudError:
        created = datetime.fromtimestamp(run.stat().st_ctime, timezone.utc)
        return JobStatus(run.name, "", "Unknown", "Unknown", created, now)


def status_of(run: Path, record: Record, now: datetime) -> JobStatus:
    status, phase = _STATES.get(record.state, ("Failed", "Failed"))
    kept, stopped = kept_job(run), (run / "stopped").exists()
    if stopped and status == "Completed":
        status, phase = "Stopped", "Stopped"
    elif stopped and status == "InProgress":
        status, phase = "Stopping", "Stopping"
    created = record.submitted or datetime.fromisoformat(kept["created"])
    started = record.started if record.state != "PENDING" else None
    ended = (record.ended or started or now) if status in FINAL else None
    if started is not None and ended is not None and started > ended:  # it never started
        started = None
    count = record.node_count or int(kept["job"].get("compute", {}).get("instance_count", 1))
    model = (run / "model").resolve()
    bare = JobStatus(
        name=run.name,
        arn=f"slurm:{kept.get('cluster', '')}/{record.id}",
        status=status,
        phase=phase,
        created=created,
        seen=now,
        ended=ended,
        message=record.state if ended else "",
        training_started=started,
        machines=(Machines("nodes", record.partition or "node", count),),
        failure=_failure(run, record) if status == "Failed" else None,
        model_data=str(model) if any(path.is_file() for path in model.rglob("*")) else None,
        checkpoints=str((run / "checkpoints").resolve()),
    )
    # Slurm keeps the times of the last attempt only, so the earlier ones have no length.
    attempts = (f"attempt {number + 1} was requeued" for number in range(record.restarts))
    interrupted = [Phase("Interrupted", words, created, created) for words in attempts]
    reason = record.reason if record.reason not in ("", "None") else "waiting for Slurm"
    return status_with_phases(bare, interrupted=interrupted, waiting=reason, working=f"on {record.nodes}")


def _failure(run: Path, record: Record) -> JobFailure:
    reasons = (
        (datetime.fromtimestamp(path.stat().st_mtime, timezone.utc), path.read_text("utf-8", "replace"))
        for path in run.glob("nodes/*/output/failure")
    )
    log = run / "logs" / "slurm.log"
    lines = log.read_text("utf-8", "replace").strip().splitlines()[-_LAST_LINES:] if log.is_file() else []
    words = _WORDS.get(record.state, f"Slurm says {', '.join(filter(None, (record.state, record.reason)))}")
    return failure_of(reasons, "\n".join([words, *lines]))


# ---- Slurm's own commands --------------------------------------------------------------------------------------------

_SECONDS = 60.0
_OF_A_JOB, _OF_A_CLUSTER = ("SLURM_", "SLURMD_", "SRUN_"), ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Connection refused|Socket timed out|Zero Bytes were transmitted|Timed out"
    r"|Protocol authentication error|Transport endpoint|Resource temporarily unavailable",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(r"Invalid job id", re.IGNORECASE)
_QUEUE = ("JobID", "State", "SubmitTime", "StartTime", "EndTime", "NodeList", "Partition", "NumNodes")
_DATABASE = ("JobID", "State", "Submit", "Start", "End", "NodeList", "Partition", "NNodes")
"""The same columns of `squeue` and `sacct`, in the order of `_record`."""
_WIDTH = 255
"""Characters of a column of `squeue`, which are 20 if it is not told."""


def ask(*command: str, doing: str) -> str:
    """Run a command of Slurm and return what it prints; raise UnreachableError if the controller did not answer."""
    if shutil.which(command[0]) is None:
        hint = "run this where Slurm's commands are, such as a login node"
        raise CloudError(f"{doing}: `{command[0]}` was not found", hint=hint)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, stdin=subprocess.DEVNULL,
            check=False, env=_environ(command[0]),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        message = f"{doing}: `{command[0]}` did not answer within {_SECONDS:.0f} s"
        raise UnreachableError(message, hint="`scontrol ping` shows whether the controller is up") from None
    if done.returncode == 0:
        return done.stdout
    lines = [re.sub(rf"^{command[0]}: (?:error: )?", "", line) for line in done.stderr.strip().splitlines()]
    words = " ".join(lines) or f"exit code {done.returncode}"
    if _UNREACHABLE.search(words):
        raise UnreachableError(f"{doing}: {words}", hint="`scontrol ping` shows whether the controller is up")
    raise CloudError(f"{doing}: Slurm refused: {words}")


def _environ(program: str) -> dict[str, str]:
    """Return the variables of a command; the job inherits those of `sbatch`, so they are the user's own.

    Inside another job, what Slurm tells that job's steps is left out: `srun` would take it for options of the new job.
    """
    if program != "sbatch":
        return {**os.environ, "LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
    told = _OF_A_JOB if "SLURM_JOB_ID" in os.environ else ()
    return {name: value for name, value in os.environ.items() if not name.startswith(told) or name in _OF_A_CLUSTER}


def records(ids: Iterable[str] = ()) -> dict[str, Record]:
    """Return what the controller knows of the jobs with these ids, or of all of this user's, by id."""
    wanted = list(ids)
    which = ["--jobs", ",".join(wanted)] if wanted else ["--me"]
    columns = ",".join(f"{name}:{_WIDTH}|" for name in (*_QUEUE, "Reason", "RestartCnt"))
    try:
        text = ask("squeue", "--noheader", "--states=all", *which, "--Format", columns, doing="cannot look up jobs")
    except CloudError as error:
        if _UNKNOWN.search(error.message):
            return {}
        raise
    jobs = [_record(line) for line in text.splitlines()]
    return {job.id: job for job in jobs}


def accounted(job_id: str) -> Record | None:
    """Return what the accounting database knows of a job; None where there is none or it has no such job."""
    command = ("sacct", "-X", "-n", "-P", "-j", job_id, "-o", ",".join(_DATABASE))
    try:
        lines = ask(*command, doing="cannot look up the job in the accounting database").splitlines()
    except UnreachableError:
        raise
    except CloudError:
        return None  # sacct fails where the cluster has no database
    return _record(lines[-1]) if lines else None


def _record(row: str) -> Record:
    """Read a row of `squeue` or `sacct`."""
    number, state, submitted, started, ended, nodes, partition, count, *more = (cell.strip() for cell in row.split("|"))
    reason, restarts, *_ = more or ("", "0")
    return Record(
        id=number,
        state=state.split(maxsplit=1)[0],  # `CANCELLED by 0`
        reason=reason,
        submitted=_moment(submitted),
        started=_moment(started),
        ended=_moment(ended),
        restarts=int(restarts),
        nodes=nodes,
        partition=partition,
        node_count=int(count),
    )


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    except ValueError:
        return None  # `N/A`, `Unknown`


def controller_settings() -> Mapping[str, str]:
    """Return the cluster's configuration, as `scontrol show config` prints it."""
    text = ask("scontrol", "show", "config", doing="cannot read the cluster's configuration")
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def id_by_name(name: str) -> str | None:
    text = ask("squeue", "--noheader", "--me", f"--name={name}", "--format=%A", doing=f"cannot look for job `{name}`")
    return text.split()[0] if text.split() else None
