"""SageMaker and its neighbours (S3, CloudWatch Logs, IAM) through boto3, with errors in plain words and patience.

The only module that imports boto3, and only when no session is given. Anything with boto3's `client(name)` can stand in
for a session: `backends.fake.FakeSageMaker` does.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, BinaryIO, Protocol

import smpkit
from smpkit.config.fields import JOB_NAME
from smpkit.config.words import quoted
from smpkit.errors import CloudError, SmpkitError, UsageError
from smpkit_estimator.backends.sagemaker_errors import (
    CloudProblem,
    ForeignAnswerError,
    UnreachableError,
    code_of,
    explained,
    is_denied,
    is_in_doubt,
    is_throttling,
)
from smpkit_estimator.backends.sagemaker_model import operation_name, response_shape
from smpkit_estimator.clock import Clock, SystemClock

__all__ = ["LOG_GROUP", "Cloud", "Identity", "S3Object", "Session", "open_session", "split_uri"]

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

_TRIES = 8
_MAX_PAUSE_SECONDS = 20.0
_DOUBTFUL_TRIES = 3
"""How often a job is asked for when it is not known whether the call took effect."""
_CLOCKS_APART = timedelta(minutes=5)
"""By how much this machine's clock and the service's may differ: AWS refuses calls of clocks that differ by more."""
_IDENTITY: tuple[tuple[str, ...], ...] = (
    ("HyperParameters",),
    ("Environment",),
    ("RoleArn",),
    ("AlgorithmSpecification", "TrainingImage"),
    ("OutputDataConfig", "S3OutputPath"),
    ("ResourceConfig", "InstanceType"),
    ("ResourceConfig", "InstanceCount"),
)
"""What tells a job of this very request from one of the same name; the service returns these as they were sent."""


class Session(Protocol):
    """What is used of `boto3.Session`."""

    @property
    def region_name(self) -> str | None:
        """The region, if one is set."""

    def client(self, service_name: str, /, **options: Any) -> Any:
        """Make a client of one service."""


@dataclass(frozen=True)
class Identity:
    """Who calls."""

    account: str
    arn: str


@dataclass(frozen=True)
class S3Object:
    """An object in a bucket."""

    key: str
    size: int
    modified: datetime


def open_session(profile: str | None = None, region: str | None = None) -> Session:
    """Return a boto3 session with the user's own profile and region.

    Like the AWS CLI, and unlike boto3, it heeds AWS_REGION, before AWS_DEFAULT_REGION.

    Raises:
        UsageError: there is no such profile.
    """
    import boto3

    try:
        chosen = region or os.environ.get("AWS_REGION") or None
        session: Session = boto3.Session(profile_name=profile, region_name=chosen)
    except CloudProblem as error:
        raise explained(error, "cannot use AWS", "sts") from None
    return session


def split_uri(uri: str) -> tuple[str, str]:
    """Return bucket and key of an S3 URI."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


class Cloud:
    """What smpkit does in the cloud, each a method; all clients are of the caller's own session.

    Raises (all methods): CloudError, in plain words, with what to do. Throttling is waited out.
    """

    def __init__(self, session: Session, clock: Clock | None = None) -> None:
        self._session = session
        self.clock = clock or getattr(session, "clock", None) or SystemClock()
        self._clients: dict[tuple[str, bool], Any] = {}
        self._identity: Identity | None = None

    @property
    def region(self) -> str:
        """The region of the session."""
        region = self._session.region_name
        if not region:
            raise CloudError("no AWS region is set", hint="set AWS_REGION, use `--region`, or `aws configure`")
        return region

    def identity(self) -> Identity:
        """Ask who calls; once."""
        if self._identity is None:
            answer = self._call("sts", "get_caller_identity", "cannot tell whose AWS credentials these are")
            self._identity = Identity(answer["Account"], answer["Arn"])
        return self._identity

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def create_job(self, body: Mapping[str, Any]) -> str:
        """Start a training job and return its ARN.

        The name makes it safe to ask again: the service gives it to one job only. So when an answer is lost (a broken
        connection, a timeout, an error of the service's own), the job is looked up by its name, and is ours if it is
        of this request and not older.

        Raises:
            UnreachableError: it is not known whether the job was started; the hint says how to find out.
        """
        name, began = body["TrainingJobName"], self.clock.now()
        doing = f"cannot start job `{name}`"
        doubts = 0
        for attempt in range(_TRIES):
            try:
                # Never asked again by botocore itself: the second answer would be "this name exists already".
                arn: str = self._once("sagemaker", "create_training_job", body, retries=False)["TrainingJobArn"]
            except CloudProblem as error:  # noqa: PERF203  a call over the network is slower
                doubts += is_in_doubt(error)
                missing = doubts == 0
                if doubts:
                    found, missing = self._find_job(name)
                    if found is not None and _is_of(found, body, began):
                        return str(found["TrainingJobArn"])
                may_pass = doubts < _DOUBTFUL_TRIES if is_in_doubt(error) else is_throttling(error)
                if not may_pass or attempt == _TRIES - 1:
                    raise _not_started(explained(error, doing, "sagemaker"), name, missing=missing) from None
                self._pause(attempt)
            else:
                return arn
        raise AssertionError("the last attempt returns or raises")

    def describe_job(self, name: str) -> dict[str, Any]:
        """Return what the service knows about a job.

        Raises:
            UsageError: there is no such job, or none can have this name.
        """
        if re.fullmatch(JOB_NAME, name) is None:
            hint = "`smpkit submit` prints the name of a job, `smpkit jobs` lists them"
            raise UsageError(f"{quoted(name)} cannot be the name of a job", hint=hint)
        try:
            answer: dict[str, Any] = self._tried("sagemaker", "describe_training_job", TrainingJobName=name)
        except CloudProblem as error:
            if _is_missing_job(error):
                message = f"there is no job `{name}` in {self.region}"
                raise UsageError(message, hint="`smpkit jobs` lists them; `--region` looks elsewhere") from None
            raise explained(error, f"cannot look up job `{name}`", "sagemaker") from None
        return answer

    def _find_job(self, name: str) -> tuple[dict[str, Any] | None, bool]:
        """Return a job, or None; and whether there is certainly none."""
        try:
            answer: dict[str, Any] = self._tried("sagemaker", "describe_training_job", TrainingJobName=name)
        except CloudProblem as error:
            return None, _is_missing_job(error)
        return answer, False

    def jobs(self, **filters: Any) -> Iterator[dict[str, Any]]:
        """Yield summaries of jobs, newest first; `filters` as of `ListTrainingJobs`."""
        yield from self._pages(
            "sagemaker",
            "list_training_jobs",
            "TrainingJobSummaries",
            "cannot list jobs",
            SortBy="CreationTime",
            SortOrder="Descending",
            **filters,
        )

    def stop_job(self, name: str) -> None:
        """Ask a job to stop; one that is over already is left alone."""
        try:
            self._tried("sagemaker", "stop_training_job", TrainingJobName=name)
        except CloudProblem as error:
            status = self.describe_job(name)["TrainingJobStatus"]  # says so if there is no such job
            if status in ("InProgress", "Stopping"):
                raise explained(error, f"cannot stop job `{name}`", "sagemaker") from None

    def tags(self, arn: str) -> dict[str, str]:
        """Return the tags of a job."""
        found = self._pages("sagemaker", "list_tags", "Tags", "cannot read the job's tags", ResourceArn=arn)
        return {tag["Key"]: tag["Value"] for tag in found}

    # ---- S3 --------------------------------------------------------------------------------------------------------

    def object_exists(self, uri: str) -> bool:
        """Tell whether there is an object that this identity may see.

        To who may not list the bucket (`s3:ListBucket`), S3 says of a missing object that access is denied.
        """
        bucket, key = split_uri(uri)
        try:
            self._tried("s3", "head_object", Bucket=bucket, Key=key)
        except CloudProblem as error:
            if code_of(error) in ("404", "NoSuchKey", "NotFound") or is_denied(error):
                return False
            raise explained(error, f"cannot look for {uri}", "s3") from None
        return True

    def upload(self, content: BinaryIO, uri: str, kms_key: str | None = None) -> None:
        """Put an object, encrypted with `kms_key` or as the bucket has it."""
        bucket, key = split_uri(uri)
        options = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
        self._call("s3", "put_object", f"cannot upload to {uri}", Bucket=bucket, Key=key, Body=content, **options)

    def delete(self, uri: str) -> None:
        """Remove an object."""
        bucket, key = split_uri(uri)
        self._call("s3", "delete_object", f"cannot delete {uri}", Bucket=bucket, Key=key)

    def objects(self, uri: str) -> Iterator[S3Object]:
        """Yield the objects whose names begin with `uri`."""
        bucket, prefix = split_uri(uri)
        arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        while True:
            page = self._call("s3", "list_objects_v2", f"cannot list {uri}", **arguments)
            for item in page.get("Contents", ()):
                yield S3Object(item["Key"], item["Size"], item["LastModified"])
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def read(self, uri: str) -> bytes:
        """Return the content of a (small) object."""
        bucket, key = split_uri(uri)
        content: bytes = self._call("s3", "get_object", f"cannot read {uri}", Bucket=bucket, Key=key)["Body"].read()
        return content

    # ---- logs ------------------------------------------------------------------------------------------------------

    def log_streams(self, prefix: str) -> list[str]:
        """Return the names of all log streams that begin with `prefix`; none if nothing was logged yet."""
        doing = "cannot list the job's log streams"
        try:
            arguments = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": prefix}
            pages = self._tried_pages("logs", "describe_log_streams", "logStreams", "nextToken", **arguments)
            return [stream["logStreamName"] for stream in pages]
        except CloudProblem as error:
            if code_of(error) == "ResourceNotFoundException":
                return []
            raise explained(error, doing, "logs") from None

    def log_events(self, stream: str, **arguments: Any) -> dict[str, Any]:
        """Return one page of a log stream; `arguments` as of `GetLogEvents`. An empty page if it is not there yet."""
        try:
            arguments |= {"logGroupName": LOG_GROUP, "logStreamName": stream}
            page: dict[str, Any] = self._tried("logs", "get_log_events", **arguments)
        except CloudProblem as error:
            if code_of(error) == "ResourceNotFoundException":
                return {"events": []}
            raise explained(error, "cannot read the job's log", "logs") from None
        return page

    # ---- the rest --------------------------------------------------------------------------------------------------

    def role_arn(self, role: str) -> str:
        """Return the ARN of a role that is named by ARN or by name; a name is looked up."""
        if role.startswith("arn:"):
            return role
        arn: str = self._call("iam", "get_role", f"cannot find role `{role}`", RoleName=role)["Role"]["Arn"]
        return arn

    def ask(self, service: str, operation: str, doing: str, **arguments: Any) -> dict[str, Any]:
        """Make any call that only reads."""
        return self._call(service, operation, doing, **arguments)

    # ---- calling ---------------------------------------------------------------------------------------------------

    def _call(self, service: str, operation: str, doing: str, **arguments: Any) -> dict[str, Any]:
        try:
            return self._tried(service, operation, **arguments)
        except CloudProblem as error:
            raise explained(error, doing, service) from None

    def _tried(self, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Call, and call again a little later while the service is too busy."""
        for attempt in range(_TRIES):
            if "Body" in arguments:
                arguments["Body"].seek(0)  # else a second try would send what the first one left
            try:
                return self._once(service, operation, arguments)
            except CloudProblem as error:
                if not is_throttling(error) or attempt == _TRIES - 1:
                    raise
                self._pause(attempt)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int) -> None:
        # Full jitter: many followers that were refused together must not come back together.
        self.clock.sleep(random.uniform(0.1, min(_MAX_PAUSE_SECONDS, 0.5 * 2**attempt)))  # noqa: S311

    def _once(
        self, service: str, operation: str, arguments: Mapping[str, Any], *, retries: bool = True
    ) -> dict[str, Any]:
        """Call once, or as often as botocore does by itself.

        Raises:
            ForeignAnswerError: something else than the service answered.
        """
        call = getattr(self._client(service, retries=retries), operation)
        try:
            answer: dict[str, Any] = call(**arguments)
        except KeyError as error:
            if not _is_of_a_parser(error):
                raise
            raise ForeignAnswerError(operation=operation_name(service, operation)) from None
        if not _is_of_the_service(answer, service, operation):
            raise ForeignAnswerError(operation=operation_name(service, operation))
        return answer

    def _pages(self, service: str, operation: str, key: str, doing: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from self._tried_pages(service, operation, key, "NextToken", **arguments)
        except CloudProblem as error:
            raise explained(error, doing, service) from None

    def _tried_pages(
        self, service: str, operation: str, key: str, token: str, **arguments: Any
    ) -> Iterator[dict[str, Any]]:
        while True:
            page = self._tried(service, operation, **arguments)
            yield from page.get(key, ())
            if not page.get(token):
                return
            arguments[token] = page[token]

    def _client(self, service: str, *, retries: bool = True) -> Any:
        if (service, retries) not in self._clients:
            from botocore.config import Config

            config = Config(
                connect_timeout=10,
                read_timeout=60,
                retries={"mode": "standard", "total_max_attempts": 3 if retries else 1},
                user_agent_extra=f"smpkit/{smpkit.__version__}",
            )
            try:
                client = self._session.client(service, region_name=self.region, config=config)
                self._clients[service, retries] = client
            except CloudProblem as error:
                raise explained(error, "cannot use AWS", service) from None
            except ValueError as error:  # of an endpoint that is no address
                hint = "AWS_ENDPOINT_URL, or the profile's `endpoint_url`, must be like `https://host`"
                raise CloudError(f"cannot use AWS: {str(error).lower()}", hint=hint) from None
        return self._clients[service, retries]


def _is_of(found: Mapping[str, Any], body: Mapping[str, Any], began: datetime) -> bool:
    """Tell whether a job is of this request, and was not there before."""
    same = all(_part(found, path) == _part(body, path) for path in _IDENTITY)
    return same and found["CreationTime"] >= began - _CLOCKS_APART


def _part(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = (value or {}).get(name)
    return value or None  # the service may leave out what is empty


def _not_started(error: SmpkitError, name: str, *, missing: bool) -> SmpkitError:
    """Say of a job that could not be looked up that it may run: whoever starts another would pay for two."""
    if missing or not isinstance(error, CloudError):
        return error
    hint = f"`smpkit status {name}` tells whether it was, `smpkit stop {name}` stops it; look before you start another"
    return UnreachableError(f"{error.message}; it may have been started all the same", hint=hint)


def _is_of_the_service(answer: Mapping[str, Any], service: str, operation: str) -> bool:
    """Tell whether AWS gave this answer: a proxy or captive portal answers 200 as well, with a page of its own."""
    meta = answer.get("ResponseMetadata")
    if meta is None:  # of a session that is no boto3 session
        return True
    headers = meta.get("HTTPHeaders", {})
    if meta.get("RequestId") or "x-amz-request-id" in headers or "x-amzn-requestid" in headers:
        return True
    shape = response_shape(service, operation_name(service, operation))
    complete = shape is None or all(name in answer for name in getattr(shape, "required_members", ()))
    return complete and "html" not in headers.get("content-type", "")


def _is_of_a_parser(error: KeyError) -> bool:
    """Tell whether botocore raised this itself, as it does where a page stands in place of a service's XML."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == "botocore.parsers"


def _is_missing_job(error: BaseException) -> bool:
    code = code_of(error)
    return code == "ResourceNotFound" or (code == "ValidationException" and "not found" in str(error))
