"""The machines of a job: which kind, how many, for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from smpkit.config.section import KeyPath, Section
from smpkit.config.texts import Word
from smpkit.errors import Problem

__all__ = ["Compute"]


class Compute(Section):
    """The machines."""

    instance_type: Word = "local"
    """`local` for this machine, or a SageMaker instance type such as `ml.p4d.24xlarge`."""

    instance_count: int = Field(default=1, ge=1, le=100_000)
    """Number of hosts."""

    volume_gb: int = Field(default=30, ge=1)
    """Disk space of each host, in GB."""

    spot: bool = False
    """Use spare capacity: cheaper, may be interrupted, then starts again from the last checkpoint."""

    max_run_seconds: int = Field(default=86_400, ge=1)
    """The job is stopped after running this long, in seconds."""

    max_wait_seconds: int | None = Field(default=None, ge=1)
    """With `spot`: most time for waiting and running together, in seconds. Default: `max_run_seconds`."""

    keep_alive_seconds: int | None = Field(default=None, ge=0, le=21_600)
    """How long the machines stay reserved for a next job after this one, in seconds (a warm pool)."""

    retries: int | None = Field(default=None, ge=1, le=30)
    """How often SageMaker starts the job again after an error of its own."""

    training_plan: Word | None = None
    """ARN of a SageMaker training plan: machines reserved beforehand."""

    infra_check: bool | None = None
    """Let SageMaker check the machines before the job starts."""

    def cross_problems(self, _written: Mapping[str, Any], broken: frozenset[KeyPath], /) -> Iterable[Problem]:
        """Check `max_wait_seconds` against `spot` and `max_run_seconds`."""
        if self.max_wait_seconds is None:
            return
        path = ("max_wait_seconds",)
        if not self.spot and ("spot",) not in broken:
            yield Problem(path, "requires spot", "set `spot: true`, or remove it")
        if self.max_wait_seconds < self.max_run_seconds and ("max_run_seconds",) not in broken:
            message = f"must be at least max_run_seconds ({self.max_run_seconds}), got {self.max_wait_seconds}"
            yield Problem(path, message, "waiting includes running")
