"""The job that `--backend fake` plays: what a model-parallel job of the asked size would log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smpkit_estimator.backends.fake.script import Line, Script

__all__ = ["demonstration_script"]

_STEPS = 20
_SECONDS_PER_STEP = 15.0


def demonstration_script(request: Mapping[str, Any]) -> Script:
    """Return a course for a job; a spot job is interrupted once, and one whose name has `fail` in it fails."""
    hosts = request["ResourceConfig"]["InstanceCount"]
    values = {name: json.loads(text) for name, text in request.get("HyperParameters", {}).items()}
    per_host = int(values.get("sagemaker_mpi_num_of_processes_per_host", 1))
    lines = [
        Line(1.0 + host / 10, f"[rank {host * per_host}] joined {hosts * per_host} ranks", host)
        for host in range(hosts)
    ]
    for step in range(1, _STEPS + 1):
        loss = 2.0 + 3.5 * 0.86**step
        lines.append(Line(step * _SECONDS_PER_STEP, f"[rank 0] step {step}/{_STEPS}  loss {loss:.3f}"))
    fails = "fail" in request["TrainingJobName"]
    reason = (
        "AlgorithmError: ValueError: hidden size 2050 is not divisible by tensor degree 4\n"
        f'rank {per_host // 2} on algo-1, exit 1\n  File "train.py", line 41, in build_model\n, exit code: 1'
    )
    return Script(
        training=(_STEPS // 2 if fails else _STEPS + 1) * _SECONDS_PER_STEP,
        lines=tuple(lines),
        failure=reason if fails else None,
        interruptions=(6 * _SECONDS_PER_STEP,) if request.get("EnableManagedSpotTraining") else (),
    )
