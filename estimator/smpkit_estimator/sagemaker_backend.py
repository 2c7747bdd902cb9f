"""SageMaker as a back end: jobs are `CreateTrainingJob`, logs are CloudWatch's, files are in S3."""

from __future__ import annotations

import itertools
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from smpkit.config.job import JobConfig
from smpkit.errors import CloudError, JobError, UnsupportedError
from smpkit_estimator.backend import Access, Finding, LogLine, Plan, Query, run_below
from smpkit_estimator.cloud import Cloud, DryCloud
from smpkit_estimator.doctor import check_cloud, check_job
from smpkit_estimator.files import Bucket, Files
from smpkit_estimator.log_reader import LogReader
from smpkit_estimator.request import TrainingRequest
from smpkit_estimator.resume import resumed_request
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
        self.pace = 5.0

    @property
    def title(self) -> str:
        return f"SageMaker in {self.cloud.region}"

    def plan(
        self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False, script_only: bool = False
    ) -> Plan:
        cloud = DryCloud(self.cloud) if dry else self.cloud
        submission = plan_submission(job, folder, cloud, job_name=name, script_only=script_only)
        return _plan(submission.request, submission, submission.notes)

    def submit(self, plan: Plan) -> dict[str, Any]:
        sent: Submission | TrainingRequest = plan.payload
        if isinstance(sent, TrainingRequest):
            return {"name": plan.name, "arn": self.cloud.create_job(sent.body)}
        arn = send(sent, self.cloud)
        return {"name": plan.name, "arn": arn, "region": self.cloud.region, "source": sent.archive_uri}

    def describe(self, name: str) -> JobStatus:
        return JobStatus.read(self.cloud.describe_job(name), self.clock.now())

    def log(self, name: str, *, since: datetime | None = None, tail: int | None = None) -> Iterator[list[LogLine]]:
        return iter(LogReader(self.cloud, name, since, tail=tail).read, None)

    def stop(self, name: str) -> None:
        self.cloud.stop_job(name)

    def list(self, query: Query) -> Iterator[JobStatus]:
        filters: dict[str, Any] = {"MaxResults": min(query.limit, _MAX_PAGE)}
        if query.status is not None:
            filters["StatusEquals"] = query.status
        if query.name is not None:
            filters["NameContains"] = query.name
        if query.since is not None:
            filters["CreationTimeAfter"] = self.clock.now() - query.since
        for item in itertools.islice(self.cloud.jobs(**filters), query.limit):
            status = item["TrainingJobStatus"]
            yield JobStatus(
                name=item["TrainingJobName"],
                arn=item["TrainingJobArn"],
                status=status,
                phase=item.get("SecondaryStatus") or status,
                created=item["CreationTime"],
                ended=item.get("TrainingEndTime"),
                seen=self.clock.now(),
            )

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Plan:
        description = self.cloud.describe_job(name)
        tags = self.cloud.tags(description["TrainingJobArn"])
        request = checked(resumed_request(description, tags, new_name, self.clock.now(), changes or {}))
        return _plan(request, request)

    def files(self, place: str) -> Files:
        if not place.startswith("s3://"):
            raise UnsupportedError(f"{place} is no place in S3, where SageMaker keeps files")
        return Bucket(self.cloud, place)

    def results(self, name: str, into: Path) -> Path:
        found = self.cloud.describe_job(name)
        archive = f"{found['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/output/output.tar.gz"
        if not self.cloud.object_exists(archive):
            raise JobError(f"job `{name}` has left no results yet", hint="SageMaker uploads them when the job is over")
        with tempfile.TemporaryFile(prefix="smpkit-") as file:
            self.cloud.fetch(archive, file)
            file.seek(0)
            _unpack_run(file, into, archive)
        return run_below(into, name)

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        reached = check_cloud(self.cloud, needed=job is not None)
        if job is None or any(finding.state != "ok" for finding in reached):
            return reached
        return reached + check_job(job, self.cloud, write=write)


def open_sagemaker(access: Access) -> SageMaker:
    """Open it with the user's own credentials."""
    return SageMaker(open_session(access.profile, access.region))


def _plan(request: TrainingRequest, payload: Submission | TrainingRequest, notes: tuple[str, ...] = ()) -> Plan:
    return Plan(request.job_name, request.machines, request.shown(), payload, request.max_seconds, notes)


def _unpack_run(archive: BinaryIO, into: Path, place: str) -> None:
    """Unpack the folder `run` alone: its files, and no links.

    Args:
        place: where the archive is from, for errors.

    Raises:
        CloudError: it is damaged.
    """
    try:
        with tarfile.open(fileobj=archive, mode="r:gz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                content = tar.extractfile(member) if member.isreg() else None
                if parts[:1] != ("run",) or ".." in parts or content is None:
                    continue
                target = into.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CloudError(f"cannot unpack {place}: {error}") from None
