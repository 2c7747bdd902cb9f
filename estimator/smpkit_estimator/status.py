"""What a managed job is doing and how it ended: the service's description, read once, as plain facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from smpkit.config.job import HOMOGENEOUS
from smpkit_estimator.reason import JobFailure, read_reason

__all__ = ["FINAL", "JobStatus", "Machines", "Phase", "machines_of"]

FINAL = frozenset({"Completed", "Failed", "Stopped", "Deleting"})
"""Primary statuses in which nothing happens any more."""


@dataclass(frozen=True)
class Phase:
    """One of the service's secondary statuses, and when it was."""

    name: str
    message: str
    start: datetime
    end: datetime | None

    def seconds(self, now: datetime) -> float:
        """Its length, up to now if it goes on."""
        return ((self.end or now) - self.start).total_seconds()


@dataclass(frozen=True)
class Machines:
    """Some of a job's hosts, all of one kind."""

    group: str
    """Name of the instance group; `homogeneousCluster` where a job has no groups."""
    instance_type: str
    instance_count: int


def machines_of(job: Mapping[str, Any]) -> tuple[Machines, ...]:
    """Return the hosts of a job by kind.

    Args:
        job: its request or its description.
    """
    resources = job.get("ResourceConfig", {})
    groups = resources.get("InstanceGroups") or [resources]
    return tuple(
        Machines(
            group.get("InstanceGroupName", HOMOGENEOUS), group.get("InstanceType", ""), group.get("InstanceCount", 0)
        )
        for group in groups
    )


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment."""

    name: str
    arn: str
    status: str
    """`InProgress`, `Completed`, `Failed`, `Stopping`, `Stopped` or `Deleting`."""
    phase: str
    """The service's secondary status: `Starting`, `Downloading`, `Training`, `Interrupted`, ..."""
    message: str
    """What the service says about the phase."""
    phases: tuple[Phase, ...]
    created: datetime
    training_started: datetime | None
    ended: datetime | None
    seen: datetime
    """When this was asked for."""
    billable_seconds: int | None
    """For each instance; None until the job has ended."""
    training_seconds: int | None
    machines: tuple[Machines, ...]
    """The hosts by kind; several entries where the job has instance groups."""
    spot: bool
    failure: JobFailure | None
    model_data: str | None
    """S3 URI of the model; the service names it before it is known whether the script wrote one."""
    checkpoints: str | None
    metrics: Mapping[str, float]

    @classmethod
    def read(cls, answer: Mapping[str, Any], now: datetime) -> JobStatus:
        """Read the service's description of a job."""
        phases = tuple(
            Phase(item["Status"], item.get("StatusMessage", ""), item["StartTime"], item.get("EndTime"))
            for item in answer.get("SecondaryStatusTransitions", ())
        )
        status = answer["TrainingJobStatus"]
        reason = answer.get("FailureReason")
        return cls(
            name=answer["TrainingJobName"],
            arn=answer["TrainingJobArn"],
            status=status,
            phase=answer.get("SecondaryStatus", status),
            message=phases[-1].message if phases else "",
            phases=phases,
            created=answer["CreationTime"],
            training_started=answer.get("TrainingStartTime"),
            ended=answer.get("TrainingEndTime") or _end(phases, status),
            seen=now,
            billable_seconds=answer.get("BillableTimeInSeconds"),
            training_seconds=answer.get("TrainingTimeInSeconds"),
            machines=machines_of(answer),
            spot=answer.get("EnableManagedSpotTraining", False),
            failure=read_reason(reason) if reason else None,
            model_data=answer.get("ModelArtifacts", {}).get("S3ModelArtifacts"),
            checkpoints=answer.get("CheckpointConfig", {}).get("S3Uri"),
            metrics={item["MetricName"]: item["Value"] for item in answer.get("FinalMetricDataList", ())},
        )

    @property
    def instance_count(self) -> int:
        """Number of hosts, of all groups together."""
        return sum(each.instance_count for each in self.machines)

    @property
    def over(self) -> bool:
        """Whether the job has ended, one way or another."""
        return self.status in FINAL

    @property
    def succeeded(self) -> bool:
        """Whether the script succeeded."""
        return self.status == "Completed"

    @property
    def seconds(self) -> float:
        """Time since the job was created, to its end if it has ended."""
        return max(0.0, ((self.ended or self.seen) - self.created).total_seconds())

    @property
    def billable_so_far(self) -> float:
        """Seconds that are billed, for each instance; while the job runs, those since the machines began to work."""
        if self.billable_seconds is not None:
            return self.billable_seconds
        idle = ("Pending", "Starting", "LaunchingMLInstances", "PreparingTrainingStack", "Interrupted")
        working = [phase for phase in self.phases if phase.name not in idle and phase.name not in FINAL]
        return max(0.0, sum(phase.seconds(self.seen) for phase in working))

    @property
    def interruptions(self) -> int:
        """How often spot capacity was taken away."""
        return sum(phase.name in ("Interrupted", "Restarting") for phase in self.phases)


def _end(phases: tuple[Phase, ...], status: str) -> datetime | None:
    """Return when a job ended that never started to train."""
    return (phases[-1].end or phases[-1].start) if phases and status in FINAL else None
