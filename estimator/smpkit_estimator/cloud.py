"""What smpkit does in the cloud: jobs, S3, logs and roles, each a method of `Cloud`. Throttled calls are tried again.

Everything that starts, follows or stops managed jobs goes through `Cloud`; what it raises is a `CloudError` that says
what to do. How a call is made and why it failed is in `sagemaker`.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, BinaryIO

from smpkit.config.fields import JOB_NAME
from smpkit.config.words import quoted
from smpkit.errors import CloudError, SmpkitError, UnreachableError, UsageError
from smpkit_estimator.backend import Clock, SystemClock
from smpkit_estimator.sagemaker import (
    CloudProblem,
    Session,
    call_once,
    code_of,
    explained,
    is_denied,
    is_in_doubt,
    is_throttling,
    open_client,
)

__all__ = ["LOG_GROUP", "Cloud", "DryCloud", "Identity", "S3Object", "split_uri"]

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

_TRIES = 8
_MAX_PAUSE_SECONDS = 20.0
_DOUBTFUL_TRIES = 3
"""How many attempts to start a job may end without a known result before we give up."""
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
    ("ResourceConfig", "InstanceGroups"),
)
"""Fields that tell a job of this request from another of the same name; the service returns them as they were sent."""

_PLACEHOLDER_REGION = "<region>"
_PLACEHOLDER_ACCOUNT = "000000000000"  # no account has this id, and the patterns of the service accept it


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

        A retry is safe because a name can be used for one job only. If the answer is lost (a broken connection, a
        timeout, an internal error of the service), the job is looked up by its name: it is ours if it has the fields
        of this request and is not older than the call.

        Raises:
            UnreachableError: it is not known whether the job was started; the hint says how to find out.
        """
        name, began = body["TrainingJobName"], self.clock.now()
        doing = f"cannot start job `{name}`"
        doubts = 0
        for attempt in range(_TRIES):
            try:
                # No retries by botocore: the second attempt would be refused with "this name exists already".
                client = self._client("sagemaker", retries=False)
                arn: str = call_once(client, "sagemaker", "create_training_job", body)["TrainingJobArn"]
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

        Without the permission `s3:ListBucket`, S3 answers that access is denied if the object is missing.
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

    def send(self, content: BinaryIO, uri: str, kms_key: str | None = None) -> None:
        """Put an object of any size, in parts if it is large; `content` may be closed afterwards."""
        bucket, key = split_uri(uri)
        options = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else None
        with _transfer(f"cannot upload to {uri}"):
            self._client("s3").upload_fileobj(content, bucket, key, ExtraArgs=options)

    def fetch(self, uri: str, into: Any) -> None:
        """Write an object of any size to `into`, which has `write`."""
        bucket, key = split_uri(uri)
        with _transfer(f"cannot read {uri}"):
            self._client("s3").download_fileobj(bucket, key, into)

    # ---- logs ------------------------------------------------------------------------------------------------------

    def log_streams(self, prefix: str, group: str = LOG_GROUP) -> list[str]:
        """Return the names of all log streams that begin with `prefix`; none if nothing was logged yet."""
        doing = "cannot list the job's log streams"
        try:
            arguments = {"logGroupName": group, "logStreamNamePrefix": prefix}
            pages = self._tried_pages("logs", "describe_log_streams", "logStreams", "nextToken", **arguments)
            return [stream["logStreamName"] for stream in pages]
        except CloudProblem as error:
            if code_of(error) == "ResourceNotFoundException":
                return []
            raise explained(error, doing, "logs") from None

    def log_events(self, stream: str, group: str = LOG_GROUP, **arguments: Any) -> dict[str, Any]:
        """Return one page of a log stream; `arguments` as of `GetLogEvents`. An empty page if it is not there yet."""
        try:
            arguments |= {"logGroupName": group, "logStreamName": stream}
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
        """Make any call that may be made twice."""
        return self._call(service, operation, doing, **arguments)

    def ask_once(self, service: str, operation: str, doing: str, **arguments: Any) -> dict[str, Any]:
        """Make a call that starts something: it is repeated only if the service said that it was too busy.

        Raises:
            UnreachableError: it is not known whether the call took effect.
        """
        for attempt in range(_TRIES):
            try:
                # No retries by botocore: whatever a lost answer was about would be started twice.
                return call_once(self._client(service, retries=False), service, operation, arguments)
            except CloudProblem as error:  # noqa: PERF203  a call over the network is slower
                if is_throttling(error) and not is_in_doubt(error) and attempt < _TRIES - 1:
                    self._pause(attempt)
                    continue
                found = explained(error, doing, service)
                raise UnreachableError(found.message) if is_in_doubt(error) else found from None
        raise AssertionError("the last attempt returns or raises")

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
                arguments["Body"].seek(0)  # a retry must send the body from its start
            try:
                return call_once(self._client(service), service, operation, arguments)
            except CloudProblem as error:
                if not is_throttling(error) or attempt == _TRIES - 1:
                    raise
                self._pause(attempt)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int) -> None:
        # Full jitter, so that followers that were throttled together do not retry together.
        self.clock.sleep(random.uniform(0.1, min(_MAX_PAUSE_SECONDS, 0.5 * 2**attempt)))  # noqa: S311

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
            client = open_client(self._session, service, self.region, retries=retries)
            self._clients[service, retries] = client
        return self._clients[service, retries]


class DryCloud(Cloud):
    """A `Cloud` that uses placeholders where it gets no answer; a request with placeholders cannot start a job."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud._session, cloud.clock)
        self.notes: list[str] = []
        """Which placeholders were used, and why."""

    @property
    def region(self) -> str:
        """The region of the session, or a placeholder."""
        known = self._session.region_name
        if not known:
            self._note(f"no AWS region is set: `{_PLACEHOLDER_REGION}` stands for it")
        return known or _PLACEHOLDER_REGION

    def identity(self) -> Identity:
        """Who calls, or a placeholder where that cannot be found out."""
        try:
            if not self._session.region_name:
                raise CloudError("without a region nobody was asked whose AWS credentials these are")
            return super().identity()
        except CloudError as error:
            self._note(f"{error.message}: `{_PLACEHOLDER_ACCOUNT}` stands for the account")
        return Identity(_PLACEHOLDER_ACCOUNT, "")

    def role_arn(self, role: str) -> str:
        """The ARN of a role, or a placeholder if it cannot be looked up."""
        if role.startswith("arn:") or self.identity().account != _PLACEHOLDER_ACCOUNT:
            return super().role_arn(role)
        return f"arn:aws:iam::{_PLACEHOLDER_ACCOUNT}:role/{role}"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@contextlib.contextmanager
def _transfer(doing: str) -> Iterator[None]:
    from s3transfer.exceptions import RetriesExceededError

    try:
        yield
    except CloudProblem as error:
        raise explained(error, doing, "s3") from None
    except RetriesExceededError as error:
        raise UnreachableError(f"{doing}: {error.last_exception}", hint="try again in a minute") from None


def _is_of(found: Mapping[str, Any], body: Mapping[str, Any], began: datetime) -> bool:
    """Tell whether a job is of this request, and was not there before."""
    same = all(_part(found, path) == _part(body, path) for path in _IDENTITY)
    return same and found["CreationTime"] >= began - _CLOCKS_APART


def _part(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = (value or {}).get(name)
    return value or None  # the service may leave out what is empty


def _not_started(error: SmpkitError, name: str, *, missing: bool) -> SmpkitError:
    """Add to the error that the job may be running: a user who starts another one would pay for both."""
    if missing or not isinstance(error, CloudError):
        return error
    hint = f"`smpkit status {name}` tells whether it was, `smpkit stop {name}` stops it; look before you start another"
    return UnreachableError(f"{error.message}; it may have been started all the same", hint=hint)


def _is_missing_job(error: BaseException) -> bool:
    code = code_of(error)
    return code == "ResourceNotFound" or (code == "ValidationException" and "not found" in str(error))
