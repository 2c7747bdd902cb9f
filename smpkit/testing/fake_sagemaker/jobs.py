"""The fake's training jobs: the operations of SageMaker that smpkit uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from smpkit.testing.fake_sagemaker.client import Handler, client_error
from smpkit.testing.fake_sagemaker.lifecycle import History, Transition, history
from smpkit.testing.fake_sagemaker.script import Script
from smpkit_estimator.backend import Clock
from smpkit_estimator.limits import preflight
from smpkit_estimator.sagemaker import request_shape, response_shape
from smpkit_estimator.status import machines_of

__all__ = ["FakeJob", "FakeJobs"]

_FINAL = ("Completed", "Failed", "Stopped")


@dataclass
class FakeJob:
    """A job that was created, and what will become of it."""

    request: dict[str, Any]
    created: datetime
    script: Script
    arn: str
    stopped: datetime | None = None

    @property
    def name(self) -> str:
        """Its name."""
        name: str = self.request["TrainingJobName"]
        return name

    @property
    def history(self) -> History:
        """Its whole life, as things stand."""
        return history(self.script, self.request, self.created, self.stopped)

    def status(self, now: datetime) -> str:
        """SageMaker's primary status."""
        last = self.history.until(now)[-1]
        if last is self.history.transitions[-1] or last == self.history.transitions[-1]:
            return self.history.final
        return "Stopping" if self.stopped is not None and now >= self.stopped else "InProgress"


class FakeJobs:
    """All jobs of one account and region."""

    def __init__(
        self,
        clock: Clock,
        arn_prefix: str,
        script_for: Callable[[Mapping[str, Any]], Script],
        quotas: Mapping[str, int],
        changed: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._arn_prefix = arn_prefix
        self._script_for = script_for
        self._quotas = quotas
        self._changed = changed
        self.jobs: dict[str, FakeJob] = {}

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Method of the client -> what answers it."""
        return {
            "create_training_job": self.create,
            "describe_training_job": self.describe,
            "list_training_jobs": self.list,
            "stop_training_job": self.stop,
            "list_tags": self.list_tags,
        }

    def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job, if name, limits and quota allow it."""
        name = request["TrainingJobName"]
        for problem in preflight(request, request_shape("sagemaker", "CreateTrainingJob")):
            message = f"1 validation error detected: Value at '{problem.where}' failed to satisfy constraint"
            raise client_error("ValidationException", f"{message}: {problem.message}", "CreateTrainingJob")
        if name in self.jobs:
            message = "Job name must be unique within an AWS account and region, and a training job with this name"
            arn = self.jobs[name].arn
            raise client_error("ResourceInUse", f"{message} already exists ({arn})", "CreateTrainingJob")
        _check_machines(request["ResourceConfig"])
        self._check_quotas(request)
        job = FakeJob(dict(request), self._clock.now(), self._script_for(request), self._arn_prefix + name)
        self.jobs[name] = job
        self._changed()
        return {"TrainingJobArn": job.arn}

    def _check_quotas(self, request: Mapping[str, Any]) -> None:
        for kind in dict.fromkeys(each.instance_type for each in machines_of(request)):
            if kind in self._quotas:
                self._check_quota(kind, _instances(request, kind))

    def _check_quota(self, kind: str, asked: int) -> None:
        now = self._clock.now()
        busy = [job for job in self.jobs.values() if job.status(now) not in _FINAL]
        used = sum(_instances(job.request, kind) for job in busy)
        if used + asked > self._quotas[kind]:
            message = (
                f"The account-level service limit '{kind} for training job usage' is {self._quotas[kind]} Instances, "
                f"with current utilization of {used} Instances and a request delta of {asked} Instances. Please use "
                "AWS Service Quotas to request an increase for this quota."
            )
            raise client_error("ResourceLimitExceeded", message, "CreateTrainingJob")

    def _job(self, name: str, operation: str) -> FakeJob:
        if name not in self.jobs:
            raise client_error("ValidationException", "Requested resource not found.", operation)
        return self.jobs[name]

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Describe a job as it is now."""
        job = self._job(request["TrainingJobName"], "DescribeTrainingJob")
        now = self._clock.now()
        begun = job.history.until(now)
        over = job.status(now) in _FINAL
        known = response_shape("sagemaker", "DescribeTrainingJob")
        assert known is not None
        return {
            **{name: value for name, value in job.request.items() if name in known.members},
            "TrainingJobArn": job.arn,
            "TrainingJobStatus": job.status(now),
            "SecondaryStatus": begun[-1].status,
            "SecondaryStatusTransitions": [_transition(part, now) for part in begun],
            "CreationTime": job.created,
            "LastModifiedTime": min(now, begun[-1].start),
            **self._times(job, now),
            **({"FailureReason": job.script.failure} if over and job.history.final == "Failed" else {}),
            "ModelArtifacts": {"S3ModelArtifacts": _artifacts(job)},
            **({"FinalMetricDataList": _metrics(job)} if over and job.script.metrics else {}),
        }

    def _times(self, job: FakeJob, now: datetime) -> dict[str, Any]:
        attempts = [attempt for attempt in job.history.attempts if attempt.start <= now]
        if not attempts:
            return {}
        seconds = round(job.history.working_seconds(now))
        times: dict[str, Any] = {"TrainingStartTime": attempts[0].start}
        if job.status(now) in _FINAL:
            spot = job.request.get("EnableManagedSpotTraining", False)
            times["TrainingEndTime"] = job.history.transitions[-1].start
            times["TrainingTimeInSeconds"] = seconds
            times["BillableTimeInSeconds"] = max(1, round(seconds * 0.3)) if spot else seconds
        return times

    def list(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """List jobs, a page at a time."""
        now = self._clock.now()
        found = sorted(self.jobs.values(), key=lambda job: (job.created, job.name))
        if request.get("SortOrder", "Descending") == "Descending":
            found.reverse()
        chosen = [job for job in found if _is_asked_for(job, request, now)]
        start, size = int(request.get("NextToken", "0")), request.get("MaxResults", 10)
        page = chosen[start : start + size]
        rest = {"NextToken": str(start + size)} if len(chosen) > start + size else {}
        return {"TrainingJobSummaries": [_summary(job, now) for job in page], **rest}

    def stop(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask a job to stop."""
        job = self._job(request["TrainingJobName"], "StopTrainingJob")
        status = job.status(self._clock.now())
        if status in _FINAL:
            message = f"The request was rejected because the training job is in status {status}."
            raise client_error("ValidationException", message, "StopTrainingJob")
        if job.stopped is None:
            job.stopped = self._clock.now()
            self._changed()
        return {}

    def list_tags(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """List the tags of a job."""
        found = [job for job in self.jobs.values() if job.arn == request["ResourceArn"]]
        return {"Tags": found[0].request.get("Tags", []) if found else []}


def _transition(part: Transition, now: datetime) -> dict[str, Any]:
    end = {"EndTime": part.end} if part.end <= now else {}
    return {"Status": part.status, "StartTime": part.start, "StatusMessage": part.message, **end}


def _artifacts(job: FakeJob) -> str:
    output: dict[str, str] = job.request["OutputDataConfig"]
    name = "model" if output.get("CompressionType") == "NONE" else "model.tar.gz"
    return f"{output['S3OutputPath'].rstrip('/')}/{job.name}/output/{name}"


def _metrics(job: FakeJob) -> list[dict[str, Any]]:
    end = job.history.transitions[-1].start
    return [{"MetricName": name, "Value": value, "Timestamp": end} for name, value in job.script.metrics.items()]


def _is_asked_for(job: FakeJob, request: Mapping[str, Any], now: datetime) -> bool:
    return (
        request.get("StatusEquals") in (None, job.status(now))
        and request.get("NameContains", "") in job.name
        and job.created >= request.get("CreationTimeAfter", job.created)
        and job.created <= request.get("CreationTimeBefore", job.created)
    )


def _summary(job: FakeJob, now: datetime) -> dict[str, Any]:
    status = job.status(now)
    begun = job.history.until(now)
    return {
        "TrainingJobName": job.name,
        "TrainingJobArn": job.arn,
        "CreationTime": job.created,
        "LastModifiedTime": begun[-1].start,
        "TrainingJobStatus": status,
        "SecondaryStatus": begun[-1].status,
        **({"TrainingEndTime": begun[-1].start} if status in _FINAL else {}),
    }


def _instances(request: Mapping[str, Any], kind: str) -> int:
    return sum(each.instance_count for each in machines_of(request) if each.instance_type == kind)


def _check_machines(resources: Mapping[str, Any]) -> None:
    """Refuse what the service refuses: groups beside a type and a number of instances, or none of both."""
    groups, alone = resources.get("InstanceGroups"), resources.keys() & {"InstanceType", "InstanceCount"}
    names = [group["InstanceGroupName"] for group in groups or ()]
    if bool(groups) == bool(alone):
        message = "specify either InstanceGroups or InstanceType and InstanceCount"
    elif groups and resources.get("KeepAlivePeriodInSeconds"):
        message = "KeepAlivePeriodInSeconds is not supported with InstanceGroups"
    elif len(set(names)) < len(names):
        message = "the names of InstanceGroups must be unique"
    else:
        return
    raise client_error("ValidationException", f"Invalid ResourceConfig: {message}", "CreateTrainingJob")
