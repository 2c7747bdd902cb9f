"""Keep the fake's jobs in a file between processes: a job is its request, its script and two times, and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit.testing.fake_sagemaker.jobs import FakeJob
from smpkit.testing.fake_sagemaker.script import Line, Script

__all__ = ["load_jobs", "save_jobs"]


def save_jobs(file: Path, jobs: Iterable[FakeJob]) -> None:
    """Write all jobs, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps([_plain(job) for job in jobs]), encoding="utf-8")
    temporary.replace(file)


def load_jobs(file: Path) -> list[FakeJob]:
    """Read all jobs; none if there is no such file."""
    if not file.is_file():
        return []
    return [_job(item) for item in json.loads(file.read_text(encoding="utf-8"))]


def _plain(job: FakeJob) -> dict[str, Any]:
    return {
        "request": job.request,
        "created": job.created.isoformat(),
        "stopped": job.stopped.isoformat() if job.stopped else None,
        "arn": job.arn,
        "script": {**asdict(job.script), "silent_hosts": sorted(job.script.silent_hosts)},
    }


def _job(item: dict[str, Any]) -> FakeJob:
    script = item["script"] | {
        "lines": _lines(item["script"]["lines"]),
        "resumed_lines": _lines(item["script"].get("resumed_lines")),
        "interruptions": tuple(item["script"]["interruptions"]),
        "silent_hosts": frozenset(item["script"]["silent_hosts"]),
    }
    stopped = datetime.fromisoformat(item["stopped"]) if item["stopped"] else None
    return FakeJob(item["request"], datetime.fromisoformat(item["created"]), Script(**script), item["arn"], stopped)


def _lines(items: list[dict[str, Any]] | None) -> tuple[Line, ...] | None:
    return None if items is None else tuple(Line(**item) for item in items)
