"""SageMaker as a back end: jobs are `CreateTrainingJob`, logs are CloudWatch's, files are in S3."""

from __future__ import annotations

import io
import itertools
import re
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from smpkit.config.job import JobConfig
from smpkit.config.wire import HOMOGENEOUS, MAX_UNPACKED_BYTES, TOKEN_NAME
from smpkit.errors import CloudError, ConfigError, JobError, Problem, UsageError
from smpkit.units import amount
from smpkit_estimator.aws import (
    Cloud,
    CloudProblem,
    Session,
    code_of,
    explained,
    is_in_doubt,
    open_session,
    split_uri,
)
from smpkit_estimator.backend import (
    Access,
    Clock,
    Finding,
    LogLine,
    Plan,
    Query,
    StandIns,
    base_name,
    check_name,
    in_doubt,
    preparing,
    refuse,
    run_below,
    tried,
    undone_if_refused,
    unique_name,
)
from smpkit_estimator.checkpoints import newest_checkpoint
from smpkit_estimator.log_reader import LogReader
from smpkit_estimator.request import (
    TrainingPlan,
    build_request,
    not_for_sagemaker,
    over_limits,
    resumed_request,
)
from smpkit_estimator.sources import SMALLER, job_sources, pack, packing_notes
from smpkit_estimator.status import FINAL, JobStatus, Machines, Phase, read_reason

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_MAX_PAGE = 100
_MAX_SKEW_SECONDS = 300
"""By how much this machine's clock and the service's may differ: AWS refuses calls of clocks that differ by more."""

# A dry run shows these where it cannot find out; the patterns of the service accept an account that nobody has.
_REGION, _ACCOUNT = "<region>", "000000000000"
_ROLE = f"arn:aws:iam::{_ACCOUNT}:role/stand-in"


class SageMaker:
    """Jobs of one account and region."""

    def __init__(self, session: Session, clock: Clock | None = None) -> None:
        self.cloud = Cloud(session)
        self.clock = clock or Clock()
        self.pace = 5.0

    @property
    def title(self) -> str:
        return f"SageMaker in {self.cloud.region}"

    # ---- starting jobs ---------------------------------------------------------------------------------------------

    def plan(
        self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False, script_only: bool = False
    ) -> Plan:
        """Plan a job. Ask the cloud only for what it does not say: the account, which names the default bucket, and the
        ARN of a role that is given by name.
        """
        name = name or unique_name(job.name, self.clock.now())
        problems = list(not_for_sagemaker(job, dry=dry))
        sources = job_sources(job, folder, problems, script_only=script_only)
        # All that is wrong is told before anybody is asked for the role and the bucket.
        role = job.role if job.role and job.role.startswith("arn:") else _ROLE
        output = job.output or "s3://bucket/"
        assumed = build_request(job, name=name, region="", role=role, output=output, source="s3://bucket/key")
        problems += over_limits(assumed)
        refuse(problems, "SageMaker")
        packed = pack(sources) if sources is not None else None
        if packed is not None and packed.num_bytes > MAX_UNPACKED_BYTES:
            message = f"has {amount(packed.num_bytes)} of files, and a job takes at most {amount(MAX_UNPACKED_BYTES)}"
            refuse([Problem(("source_dir",), message, SMALLER)], "SageMaker")
        unknown = StandIns(dry)
        region, role, output = self._whereabouts(job, unknown)
        code = (job.code_location or f"s3://{split_uri(output)[0]}/smpkit/sources").rstrip("/")
        source = job.source_dir if packed is None else f"{code}/{packed.digest}/sourcedir.tar.gz"
        # Beside the sources, which the job's role may read; a new place each time, as names may be used again.
        token = f"{code}/tokens/{name}-{secrets.token_hex(4)}/{TOKEN_NAME}" if job.compute.instance_count > 1 else None
        body = build_request(job, name=name, region=region, role=role, output=output, source=source, token=token)
        refuse(over_limits(body), "SageMaker")
        notes = [*packing_notes(packed)] if packed is not None else []
        key = job.encryption.output_key
        return _plan(TrainingPlan(body, source, packed, key, token), (*notes, *unknown.notes))

    def _whereabouts(self, job: JobConfig, unknown: StandIns) -> tuple[str, str, str]:
        """Return region, ARN of the role, and output."""
        region = unknown.get(lambda: self.cloud.region, _REGION, f": `{_REGION}` stands for it")
        if job.role is None:
            unknown.notes.append(f"no role is set: `{_ROLE}` stands for it")
        role = job.role or _ROLE
        by_name = not role.startswith("arn:")
        account = ""
        if job.output is None or (by_name and unknown.dry):
            words = f": `{_ACCOUNT}` stands for the account"
            account = unknown.get(lambda: self.cloud.identity["Account"], _ACCOUNT, words)
        role = f"arn:aws:iam::{_ACCOUNT}:role/{role}" if by_name and account == _ACCOUNT else role
        return region, self.cloud.role_arn(role), job.output or f"s3://sagemaker-{region}-{account}/"

    def submit(self, plan: Plan) -> dict[str, Any]:
        sent: TrainingPlan = plan.payload
        with preparing():
            if sent.packed is not None:
                self.cloud.upload_sources(sent.packed, str(sent.source), sent.kms_key)
            if sent.token is not None:
                # Drawn here and never kept: not in the plan that is shown, nor on this machine.
                self.cloud.upload(io.BytesIO(secrets.token_hex(32).encode()), sent.token, sent.kms_key)
        with undone_if_refused(lambda: self.cloud.discard(*filter(None, [sent.token]))):
            arn = self._start(sent.body)
        return {"name": plan.name, "arn": arn, "region": self.cloud.region, "source": sent.source}

    def _start(self, body: Mapping[str, Any]) -> str:
        """Start a training job and return its ARN; it never starts twice.

        A name can be used for one job only, so botocore may try again. If an answer was lost, the job is looked up by
        its name, once: it is ours if it has the variables and hyperparameters of this request, and is not older.
        """
        name, began = body["TrainingJobName"], self.clock.now()
        try:
            arn: str = self.cloud.call("sagemaker", "create_training_job", **body)["TrainingJobArn"]
        except CloudProblem as error:
            refusal = explained(error, f"cannot start job `{name}`", "sagemaker")
            if not is_in_doubt(error) and not _tries_before(error):
                raise refusal from None
        else:
            return arn
        try:
            job = self.cloud.call("sagemaker", "describe_training_job", TrainingJobName=name)
        except CloudProblem as error:
            if _is_missing(error):
                raise refusal from None
            raise in_doubt(refusal, name) from None
        same = all((job.get(part) or {}) == (body.get(part) or {}) for part in ("HyperParameters", "Environment"))
        if not same or (began - job["CreationTime"]).total_seconds() > _MAX_SKEW_SECONDS:
            raise refusal
        return str(job["TrainingJobArn"])

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Plan:
        job = self.details(name)
        items = self.cloud.pages(
            "sagemaker", "list_tags", "Tags", "cannot read tags", ResourceArn=job["TrainingJobArn"]
        )
        tags = {tag["Key"]: tag["Value"] for tag in items}
        new_name = new_name or unique_name(base_name(name), self.clock.now())
        body = resumed_request(job, tags, new_name, changes or {})
        if problems := over_limits(body):
            raise ConfigError(problems, subject="request")
        return _plan(TrainingPlan(body))

    # ---- jobs that exist -------------------------------------------------------------------------------------------

    def describe(self, name: str) -> JobStatus:
        return status_of(self.details(name), self.clock.now())

    def details(self, name: str) -> dict[str, Any]:
        """Return what `DescribeTrainingJob` returns."""
        check_name(name)
        try:
            return self.cloud.call("sagemaker", "describe_training_job", TrainingJobName=name)
        except CloudProblem as error:
            if _is_missing(error):
                message = f"there is no job `{name}` in {self.cloud.region}"
                raise UsageError(message, hint="`smpkit jobs` lists them; `--region` looks elsewhere") from None
            raise explained(error, f"cannot look up job `{name}`", "sagemaker") from None

    def log(self, name: str, *, since: datetime | None = None, tail: int | None = None) -> Iterator[list[LogLine]]:
        return iter(LogReader(self.cloud, name, since, tail=tail, group=LOG_GROUP, host_of=_host_of).read, None)

    def stop(self, name: str) -> None:
        try:
            self.cloud.call("sagemaker", "stop_training_job", TrainingJobName=name)
        except CloudProblem as error:
            if not self.describe(name).over:  # says so if there is no such job
                raise explained(error, f"cannot stop job `{name}`", "sagemaker") from None

    def list(self, query: Query) -> Iterator[JobStatus]:
        filters: dict[str, Any] = {"SortBy": "CreationTime", "SortOrder": "Descending"}
        filters["MaxResults"] = min(query.limit, _MAX_PAGE)
        if query.status is not None:
            filters["StatusEquals"] = query.status
        if query.name is not None:
            filters["NameContains"] = query.name
        if query.since is not None:
            filters["CreationTimeAfter"] = self.clock.now() - query.since
        key = "TrainingJobSummaries"
        jobs = self.cloud.pages("sagemaker", "list_training_jobs", key, "cannot list jobs", **filters)
        yield from (status_of(job, self.clock.now()) for job in itertools.islice(jobs, query.limit))

    def latest_checkpoint(self, place: str) -> str | None:
        folder = f"{place.rstrip('/')}/"
        return newest_checkpoint(place, self.cloud.objects(folder), lambda name: self.cloud.read(folder + name))

    def results(self, name: str, into: Path) -> Path:
        output = self.details(name)["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        archive = f"{output}/{name}/output/output.tar.gz"
        if not self.cloud.object_exists(archive):
            raise JobError(f"job `{name}` has left no results yet", hint="SageMaker uploads them when the job is over")
        with tempfile.TemporaryFile(prefix="smpkit-") as file:
            self.cloud.fetch(archive, file)
            file.seek(0)
            _unpack_run(file, into, archive)
        return run_below(into, name)

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        reached = tried("credentials", self.cloud.credentials, needed=job is not None)
        if job is None or reached.state != "ok":
            return [reached]
        return [
            reached,
            tried("role", lambda: _role(job, self.cloud)),
            tried("output", lambda: _output(job, self.cloud, write=write)),
            tried("image", lambda: _image(job, self.cloud)),
        ]


def open_sagemaker(access: Access) -> SageMaker:
    return SageMaker(open_session(access.profile, access.region))


def _plan(sent: TrainingPlan, notes: tuple[str, ...] = ()) -> Plan:
    body = sent.body
    kinds = " + ".join(f"{group.instance_count} × {group.instance_type}" for group in _machines_of(body))
    return Plan(
        name=body["TrainingJobName"],
        machines=f"{kinds}, spot" if body.get("EnableManagedSpotTraining") else kinds,
        shown=sent.shown(),
        payload=sent,
        max_seconds=body.get("StoppingCondition", {}).get("MaxRuntimeInSeconds"),
        notes=notes,
    )


def _unpack_run(archive: BinaryIO, into: Path, place: str) -> None:
    """Unpack the folder `run` alone: its files, and no links. Errors name `place`, where the archive is from."""
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


def _host_of(stream: str) -> str:
    """Return the host that writes a log stream: `algo-1` writes `JOB/algo-1-1700000000`."""
    rest = stream.partition("/")[2]
    return re.sub(r"-\d+$", "", rest) if rest.count("-") > 1 else rest


def _is_missing(error: BaseException) -> bool:
    """Tell whether the service says that there is no such job."""
    code = code_of(error)
    return code == "ResourceNotFound" or (code == "ValidationException" and "not found" in str(error))


def _tries_before(error: Any) -> int:
    """Return how many times botocore had tried before the service refused."""
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)) if code_of(error) else 0


# ---- what a job is doing and how it ended ----------------------------------------------------------------------------


def status_of(answer: Mapping[str, Any], now: datetime) -> JobStatus:
    """Return the state of a job that `DescribeTrainingJob` describes, or `ListTrainingJobs` sums up."""
    phases = tuple(
        Phase(item["Status"], item.get("StatusMessage", ""), item["StartTime"], item.get("EndTime"))
        for item in answer.get("SecondaryStatusTransitions", ())
    )
    status = answer["TrainingJobStatus"]
    reason = answer.get("FailureReason")
    # The service names no end of a job that never began to train.
    end_of_last_phase = (phases[-1].end or phases[-1].start) if phases and status in FINAL else None
    return JobStatus(
        name=answer["TrainingJobName"],
        arn=answer["TrainingJobArn"],
        status=status,
        phase=answer.get("SecondaryStatus", status),
        message=phases[-1].message if phases else "",
        phases=phases,
        created=answer["CreationTime"],
        training_started=answer.get("TrainingStartTime"),
        ended=answer.get("TrainingEndTime") or end_of_last_phase,
        seen=now,
        billable_seconds=answer.get("BillableTimeInSeconds"),
        training_seconds=answer.get("TrainingTimeInSeconds"),
        machines=_machines_of(answer),
        spot=answer.get("EnableManagedSpotTraining", False),
        failure=read_reason(reason) if reason else None,
        model_data=answer.get("ModelArtifacts", {}).get("S3ModelArtifacts"),
        checkpoints=answer.get("CheckpointConfig", {}).get("S3Uri"),
        metrics={item["MetricName"]: item["Value"] for item in answer.get("FinalMetricDataList", ())},
        raw=answer,
    )


def _machines_of(job: Mapping[str, Any]) -> tuple[Machines, ...]:
    """Return the hosts of a job by kind, from its request or its description."""
    resources = job.get("ResourceConfig", {})
    groups = resources.get("InstanceGroups") or [resources]
    return tuple(
        Machines(
            group.get("InstanceGroupName", HOMOGENEOUS), group.get("InstanceType", ""), group.get("InstanceCount", 0)
        )
        for group in groups
    )


# ---- smpkit doctor ---------------------------------------------------------------------------------------------------

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/(?P<name>[^:@]+)"
    r"(:(?P<tag>[^@]+))?(@(?P<digest>sha256:[0-9a-f]+))?"
)
_PROBE = "smpkit/doctor"


def _role(job: JobConfig, cloud: Cloud) -> Finding:
    if job.role is None:
        return Finding("role", "problem", "the job names no role", "set `role` to an IAM role that SageMaker may take")
    name = job.role.rpartition("/")[2]
    role = cloud.ask("iam", "get_role", f"cannot look at role `{name}`", RoleName=name)["Role"]
    if "sagemaker.amazonaws.com" not in str(role.get("AssumeRolePolicyDocument", "sagemaker.amazonaws.com")):
        hint = "add `sagemaker.amazonaws.com` to the role's trust policy, for `sts:AssumeRole`"
        return Finding("role", "problem", f"role `{name}` does not trust SageMaker", hint)
    return Finding("role", "ok", f"role: {role['Arn']}")


def _output(job: JobConfig, cloud: Cloud, *, write: bool) -> Finding:
    uri = job.output or f"s3://sagemaker-{cloud.region}-{cloud.identity['Account']}/"
    if "://" not in uri:
        return Finding("output", "problem", f"output is a folder of this machine, `{uri}`", "set `output` to an S3 URI")
    bucket = split_uri(uri)[0]
    cloud.ask("s3", "head_bucket", f"cannot reach bucket s3://{bucket}", Bucket=bucket)
    if not write:
        return Finding("output", "ok", f"bucket s3://{bucket} is there (`--write` tries to write to it)")
    probe = f"{uri.rstrip('/')}/{_PROBE}"
    cloud.upload(io.BytesIO(b"written by smpkit doctor\n"), probe, job.encryption.output_key)
    cloud.delete(probe)
    return Finding("output", "ok", f"wrote to and deleted from {uri}")


def _image(job: JobConfig, cloud: Cloud) -> Finding:
    if job.image is None:
        hint = "push an image with smpkit to ECR, and set `image`"
        return Finding("image", "problem", "the job names no image", hint)
    place = _ECR.fullmatch(job.image)
    if place is None:
        return Finding("image", "info", f"image {job.image} is not in ECR, so it was not looked for")
    if place["region"] != cloud.region:
        text = f"image {job.image} is in {place['region']}, the job in {cloud.region}"
        return Finding("image", "problem", text, "push it to a repository of this region")
    wanted = {"imageDigest": place["digest"]} if place["digest"] else {"imageTag": place["tag"] or "latest"}
    repository = {"registryId": place["account"], "repositoryName": place["name"]}
    cloud.ask("ecr", "describe_images", f"cannot find image {job.image}", **repository, imageIds=[wanted])
    return Finding("image", "ok", f"image: {job.image}")
