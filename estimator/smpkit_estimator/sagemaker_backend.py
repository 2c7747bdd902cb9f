"""SageMaker as a back end: jobs are `CreateTrainingJob`, logs are CloudWatch's, files are in S3."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.errors import JobError, UnsupportedError
from smpkit_estimator.backend import Access, JobSummary, Log, Pace, Query
from smpkit_estimator.cloud import Cloud, DryCloud
from smpkit_estimator.doctor import check_cloud, check_job
from smpkit_estimator.files import Bucket, Files
from smpkit_estimator.finding import Finding
from smpkit_estimator.log_reader import LogReader
from smpkit_estimator.request import TrainingRequest
from smpkit_estimator.resume import resumed_request
from smpkit_estimator.run_folder import run_below, unpack_run
from smpkit_estimator.sagemaker import Session, open_session
from smpkit_estimator.status import JobStatus
from smpkit_estimator.submission import Submission, checked, plan_submission, send

__all__ = ["SageMaker", "open_sagemaker"]

_MAX_PAGE = 100


class SageMaker:
    """Jobs of one account and region; `session` may be a fake, such as `smpkit.testing.FakeSageMaker`."""

    def __init__(self, session: Session | Cloud) -> None:
        self.cloud = session if isinstance(session, Cloud) else Cloud(session)
        self.clock = self.cloud.clock
        self.pace = Pace()

    @property
    def place(self) -> str:
        return self.cloud.region

    @property
    def title(self) -> str:
        return f"SageMaker in {self.place}"

    def plan(
        self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False, script_only: bool = False
    ) -> Submission:
        cloud = DryCloud(self.cloud) if dry else self.cloud
        return plan_submission(job, folder, cloud, job_name=name, script_only=script_only)

    def submit(self, plan: Submission | TrainingRequest) -> dict[str, Any]:
        if isinstance(plan, TrainingRequest):
            return {"name": plan.job_name, "arn": self.cloud.create_job(plan.body)}
        arn = send(plan, self.cloud)
        return {"name": plan.request.job_name, "arn": arn, "region": self.place, "source": plan.archive_uri}

    def describe(self, name: str) -> JobStatus:
        return JobStatus.read(self.details(name), self.clock.now())

    def details(self, name: str) -> dict[str, Any]:
        return self.cloud.describe_job(name)

    def logs(self, name: str, since: datetime | None = None) -> Log:
        return LogReader(self.cloud, name, since)

    def stop(self, name: str) -> None:
        self.cloud.stop_job(name)

    def list(self, query: Query) -> Iterator[JobSummary]:
        filters: dict[str, Any] = {"MaxResults": min(query.limit, _MAX_PAGE)}
        if query.status is not None:
            filters["StatusEquals"] = query.status
        if query.name is not None:
            filters["NameContains"] = query.name
        if query.since is not None:
            filters["CreationTimeAfter"] = self.clock.now() - query.since
        yield from map(_summary, itertools.islice(self.cloud.jobs(**filters), query.limit))

    def resumed(
        self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None
    ) -> TrainingRequest:
        description = self.details(name)
        tags = self.cloud.tags(description["TrainingJobArn"])
        return checked(resumed_request(description, tags, new_name, self.clock.now(), changes or {}))

    def files(self, place: str) -> Files:
        if not place.startswith("s3://"):
            raise UnsupportedError(f"{place} is no place in S3, where SageMaker keeps files")
        return Bucket(self.cloud, place)

    def run_folder(self, name: str, into: Path) -> Path:
        found = self.details(name)
        archive = f"{found['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/output/output.tar.gz"
        if not self.cloud.object_exists(archive):
            raise JobError(f"job `{name}` has left no results yet", hint="SageMaker uploads them when the job is over")
        with tempfile.TemporaryFile(prefix="smpkit-") as file:
            self.cloud.fetch(archive, file)
            file.seek(0)
            unpack_run(file, into, archive)
        return run_below(into, name)

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        reached = check_cloud(self.cloud, needed=job is not None)
        if job is None or any(finding.state != "ok" for finding in reached):
            return reached
        return reached + check_job(job, self.cloud, write=write)


def open_sagemaker(access: Access) -> SageMaker:
    """Open it with the user's own credentials."""
    return SageMaker(open_session(access.profile, access.region))


def _summary(item: Mapping[str, Any]) -> JobSummary:
    return JobSummary(
        name=item["TrainingJobName"],
        arn=item["TrainingJobArn"],
        status=item["TrainingJobStatus"],
        phase=item.get("SecondaryStatus"),
        created=item["CreationTime"],
        ended=item.get("TrainingEndTime"),
    )
