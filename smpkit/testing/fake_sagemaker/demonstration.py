"""The back end `fake`: it plays a job of the asked size, and keeps its jobs between commands."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smpkit.config.words import printable, quoted
from smpkit.errors import UsageError
from smpkit.testing.fake_sagemaker.clock import FastClock
from smpkit.testing.fake_sagemaker.script import Line, Script
from smpkit.testing.fake_sagemaker.session import FakeSageMaker
from smpkit_estimator.backend import Access
from smpkit_estimator.sagemaker_backend import SageMaker
from smpkit_estimator.status import machines_of

__all__ = ["demonstration_script", "open_fake"]

_FASTEST = 1e6

_STEPS = 20
_SECONDS_PER_STEP = 15.0
_INTERRUPTED_AT = 6
_FAILS_AT = 10
_ERROR = "ValueError: hidden size 2050 is not divisible by tensor degree 4"


def demonstration_script(request: Mapping[str, Any]) -> Script:
    """Return a course for a job; a spot job is interrupted once, and one whose name has `fail` in it fails."""
    values = {name: json.loads(text) for name, text in request.get("HyperParameters", {}).items()}
    named = values.get("sagemaker_distribution_instance_groups")
    kinds = [machines.group for machines in machines_of(request) for _ in range(machines.instance_count)]
    hosts = [host for host, group in enumerate(kinds) if not named or group in named]
    per_host = int(values.get("sagemaker_mpi_num_of_processes_per_host", 1))
    fails, spot = "fail" in request["TrainingJobName"], bool(request.get("EnableManagedSpotTraining"))
    done = _INTERRUPTED_AT if spot else 0
    last = _FAILS_AT if fails else _STEPS
    end = (last - done + (not fails)) * _SECONDS_PER_STEP
    joined = [
        Line(1.0 + node / 10, f"[rank {node * per_host}] joined {len(hosts) * per_host} ranks", host)
        for node, host in enumerate(hosts)
    ]
    rank = per_host // 2
    frame = '  File "train.py", line 41, in build_model'
    raised = [Line(end, f"[rank {rank}] {text}") for text in (frame, _ERROR)] if fails else []
    resumed = [Line(2.0, f"[rank 0] resumed at step {done}"), *_steps(done, last), *raised]
    saved = Line(done * _SECONDS_PER_STEP, f"[rank 0] asked to stop: saved step {done}")
    return Script(
        training=end,
        lines=(*joined, *_steps(0, done), saved) if spot else (*joined, *_steps(0, last), *raised),
        resumed_lines=(*joined, *resumed) if spot else None,
        failure=f"AlgorithmError: {_ERROR}\nrank {rank} on algo-1, exit 1\n{frame}\n, exit code: 1" if fails else None,
        interruptions=(done * _SECONDS_PER_STEP,) if spot else (),
    )


def _steps(done: int, last: int) -> list[Line]:
    """Return what an attempt logs that begins after the step `done`."""
    return [
        Line((step - done) * _SECONDS_PER_STEP, f"[rank 0] step {step}/{_STEPS}  loss {2.0 + 3.5 * 0.86**step:.3f}")
        for step in range(done + 1, last + 1)
    ]


# ---- between commands ------------------------------------------------------------------------------------------------


def open_fake(access: Access) -> SageMaker:  # noqa: ARG001 - there is one place, and anybody may use it
    """Open a fake that keeps its jobs between commands; in a second about a minute of its time passes."""
    speed, folder = _speed(), _demonstration_folder()
    try:
        clock = FastClock(speed, _origin(folder))
        return SageMaker(FakeSageMaker(demonstration_script, clock=clock, file=folder / "jobs.json"))
    except ValueError:
        raise UsageError(
            f"the jobs of the fake in {folder} are damaged", hint=f"`rm -r {folder}` forgets them"
        ) from None


def _speed() -> float:
    text = os.environ.get("SMPKIT_FAKE_SPEED", "60")
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= _FASTEST:
        raise UsageError(f"SMPKIT_FAKE_SPEED is {quoted(text)}, and must be a number from above 0 to {_FASTEST:,.0f}")
    return speed


def _demonstration_folder() -> Path:
    chosen = os.environ.get("SMPKIT_FAKE_DIR")
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"smpkit-fake-{os.getuid()}"
    hint = "set SMPKIT_FAKE_DIR to a folder of yours"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{printable(str(folder))} cannot be made: {reason}", hint=hint) from None
    if folder.stat().st_uid != os.getuid():
        raise UsageError(f"{printable(str(folder))} belongs to somebody else", hint=hint)
    return folder


def _origin(folder: Path) -> datetime:
    """Return when the demonstration began: all its processes count from there."""
    file = folder / "began"
    if not file.exists():
        file.write_text(datetime.now(timezone.utc).isoformat(), encoding="utf-8")
    return datetime.fromisoformat(file.read_text(encoding="utf-8"))
