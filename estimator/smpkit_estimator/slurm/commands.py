"""Slurm's own commands: run one, say in plain words why it failed, and read what it knows about jobs.

Jobs are read as JSON, which `squeue` prints since 21.08, in two forms: later versions wrap numbers and list states.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from smpkit.errors import CloudError, UnreachableError

__all__ = ["Record", "accounted", "ask", "controller_settings", "records"]

_SECONDS = 60.0
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Connection refused|Socket timed out|Zero Bytes were transmitted|Timed out"
    r"|Protocol authentication error|Transport endpoint|Resource temporarily unavailable",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(r"Invalid job id", re.IGNORECASE)


@dataclass(frozen=True)
class Record:
    """What Slurm knows about one job, or one task of an array."""

    id: str
    """As commands take it: `12`, or `12_3` for a task of an array."""
    state: str
    """`PENDING`, `RUNNING`, `COMPLETED`, ..."""
    reason: str
    submitted: datetime | None
    started: datetime | None
    ended: datetime | None
    restarts: int
    nodes: str
    partition: str
    node_count: int


def ask(*command: str, doing: str) -> str:
    """Run a command of Slurm and return what it prints.

    Raises:
        UnreachableError: the controller did not answer.
        CloudError: it is not installed here, or refused.
    """
    if shutil.which(command[0]) is None:
        hint = "run this where Slurm's commands are, such as a login node"
        raise CloudError(f"{doing}: `{command[0]}` was not found", hint=hint)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, stdin=subprocess.DEVNULL,
            check=False, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        message = f"{doing}: `{command[0]}` did not answer within {_SECONDS:.0f} s"
        raise UnreachableError(message, hint="`scontrol ping` shows whether the controller is up") from None
    if done.returncode == 0:
        return done.stdout
    said = " ".join(re.sub(rf"^{command[0]}: (?:error: )?", "", line) for line in done.stderr.strip().splitlines())
    words = said or f"exit code {done.returncode}"
    if _UNREACHABLE.search(words):
        raise UnreachableError(f"{doing}: {words}", hint="`scontrol ping` shows whether the controller is up")
    raise CloudError(f"{doing}: Slurm refused: {words}")


def records(ids: Iterable[str] = ()) -> dict[str, Record]:
    """Return what the controller knows of the jobs with these ids, or of all of this user's, by id."""
    wanted = list(ids)
    which = ["--jobs", ",".join(wanted)] if wanted else ["--me"]
    try:
        text = ask("squeue", "--json", "--states=all", *which, doing="cannot look up jobs")
    except CloudError as error:
        if _UNKNOWN.search(error.message):
            return {}
        raise
    try:
        found = [_record(item) for item in json.loads(text)["jobs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CloudError(f"cannot read what `squeue --json` printed: {type(error).__name__}: {error}") from None
    return {each.id: each for each in found}


def accounted(job_id: str) -> Record | None:
    """Return what the accounting database knows of a job; None where there is none or it has no such job."""
    fields = ("State", "Submit", "Start", "End", "NodeList", "Partition", "NNodes")
    command = ("sacct", "-X", "-n", "-P", "-j", job_id, "-o", ",".join(fields))
    try:
        text = ask(*command, doing="cannot look up the job in the accounting database")
    except UnreachableError:
        raise
    except CloudError:
        return None  # sacct fails where the cluster has no database
    lines = text.strip().splitlines()
    if not lines:
        return None
    state, submitted, started, ended, nodes, partition, count = lines[-1].split("|")
    return Record(
        job_id, state.split()[0], "", _local(submitted), _local(started), _local(ended), 0, nodes, partition, int(count)
    )


def controller_settings() -> Mapping[str, str]:
    """Return the cluster's configuration, as `scontrol show config` prints it."""
    text = ask("scontrol", "show", "config", doing="cannot read the cluster's configuration")
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _record(item: Mapping[str, Any]) -> Record:
    states = item["job_state"]
    names = [states] if isinstance(states, str) else list(states)
    task, array = _number(item.get("array_task_id")), _number(item.get("array_job_id"))
    return Record(
        id=str(item["job_id"]) if not array or task is None else f"{array}_{task}",
        state="COMPLETING" if "COMPLETING" in names else str(names[0]),
        reason=str(item.get("state_reason") or ""),
        submitted=_moment(item.get("submit_time")),
        started=_moment(item.get("start_time")),
        ended=_moment(item.get("end_time")),
        restarts=_number(item.get("restart_cnt")) or 0,
        nodes=str(item.get("nodes") or ""),
        partition=str(item.get("partition") or ""),
        node_count=_number(item.get("node_count")) or 0,
    )


def _number(value: Any) -> int | None:
    """Read a number in the form of any version: bare, or with whether it is set."""
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") else None
    return int(value) if value is not None and value != "" else None


def _moment(value: Any) -> datetime | None:
    seconds = _number(value)
    return datetime.fromtimestamp(seconds, timezone.utc) if seconds else None


def _local(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(timezone.utc)
    except ValueError:
        return None  # `Unknown` or `None`
