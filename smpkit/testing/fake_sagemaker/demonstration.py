"""The job that `--backend fake` plays: what a model-parallel job of the asked size would log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smpkit.testing.fake_sagemaker.script import Line, Script
from smpkit_estimator.status import machines_of

__all__ = ["demonstration_script"]

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
