"""AWS as smpkit uses it: calls with botocore's own retries and paginators, S3, and in plain words why a call failed.

Everything that is asked of AWS goes through `Cloud`; what it raises is a `CloudError` that says what to do.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache, cached_property
from typing import Any, BinaryIO

from boto3 import Session as Session  # noqa: PLC0414 - the seam hands it on
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004  botocore's own, not Python's
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)
from botocore.loaders import Loader
from botocore.model import ServiceModel, Shape
from botocore.parsers import ResponseParserError
from s3transfer.exceptions import RetriesExceededError

import smpkit
from smpkit.errors import CloudError, ConfigError, Problem, SmpkitError, UnreachableError, UsageError
from smpkit.units import amount
from smpkit_estimator.backend import Finding
from smpkit_estimator.sources import SMALLER, Packed, pack

CloudProblem = (ClientError, BotoCoreError, ResponseParserError, RetriesExceededError)
"""What boto3 raises."""

_MAX_OBJECT_BYTES = 5 * 2**30
"""What S3 takes in one call."""
_RETRIES = {"mode": "standard", "total_max_attempts": 8}
"""botocore's own: throttling, errors of the service and of the network, with pauses of up to 20 s."""


def open_session(profile: str | None = None, region: str | None = None) -> Session:
    """Return a boto3 session with the user's own profile and region.

    Like the AWS CLI, and unlike boto3, it heeds AWS_REGION, before AWS_DEFAULT_REGION.
    """
    chosen = region or os.environ.get("AWS_REGION") or None
    try:
        return Session(profile_name=profile, region_name=chosen)
    except CloudProblem as error:
        raise explained(error, "cannot use AWS", "sts") from None


def split_uri(uri: str) -> tuple[str, str]:
    """Return bucket and key of an S3 URI."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


class Cloud:
    """AWS, as the caller's own session reaches it.

    Raises (all methods): CloudError, in plain words, with what to do. Throttling is waited out.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._clients: dict[tuple[str, bool], Any] = {}

    @property
    def region(self) -> str:
        region: str | None = self._session.region_name
        if not region:
            hint = "set AWS_REGION, use `--region`, or `aws configure`; runs of this machine: `smpkit runs`"
            raise CloudError("no AWS region is set", hint=hint)
        return region

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """The `Account` and `Arn` of whoever calls, asked once."""
        return self.ask("sts", "get_caller_identity", "cannot tell whose AWS credentials these are")

    def credentials(self) -> Finding:
        return Finding("credentials", "ok", f"credentials: {self.identity['Arn']}, {self.region}")

    def role_arn(self, role: str) -> str:
        """Return the ARN of a role that is named by ARN or by name; a name is looked up."""
        if role.startswith("arn:"):
            return role
        arn: str = self.ask("iam", "get_role", f"cannot find role `{role}`", RoleName=role)["Role"]["Arn"]
        return arn

    # ---- calls -----------------------------------------------------------------------------------------------------

    def ask(self, service: str, operation: str, doing: str, **arguments: Any) -> dict[str, Any]:
        """Make a call that may be made twice; its error begins with `doing`, such as `cannot list jobs`."""
        try:
            return self.call(service, operation, **arguments)
        except CloudProblem as error:
            raise explained(error, doing, service) from None

    def ask_once(self, service: str, operation: str, doing: str, **arguments: Any) -> dict[str, Any]:
        """Make a call that starts something, and is never made twice.

        Raises:
            UnreachableError: the call may have taken effect or not.
        """
        try:
            return self.call(service, operation, retries=False, **arguments)
        except CloudProblem as error:
            problem = explained(error, doing, service)
            raise UnreachableError(problem.message) if is_in_doubt(error) else problem from None

    def pages(self, service: str, operation: str, key: str, doing: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        try:
            for page in self.client(service).get_paginator(operation).paginate(**arguments):
                yield from page.get(key, ())
        except CloudProblem as error:
            raise explained(error, doing, service) from None

    def call(self, service: str, operation: str, *, retries: bool = True, **arguments: Any) -> dict[str, Any]:
        """Make a call, and raise what boto3 raises."""
        answer: dict[str, Any] = getattr(self.client(service, retries=retries), operation)(**arguments)
        return answer

    def client(self, service: str, *, retries: bool = True) -> Any:
        if (service, retries) not in self._clients:
            config = Config(
                connect_timeout=10,
                read_timeout=60,
                retries=_RETRIES if retries else {"mode": "standard", "total_max_attempts": 1},
                user_agent_extra=f"smpkit/{smpkit.__version__}",
            )
            try:
                client = self._session.client(service, region_name=self.region, config=config)
            except CloudProblem as error:
                raise explained(error, "cannot use AWS", service) from None
            except ValueError as error:  # the endpoint is not a valid URL
                hint = "AWS_ENDPOINT_URL, or the profile's `endpoint_url`, must be like `https://host`"
                raise CloudError(f"cannot use AWS: {str(error).lower()}", hint=hint) from None
            self._clients[service, retries] = client
        return self._clients[service, retries]

    # ---- S3 --------------------------------------------------------------------------------------------------------

    def object_exists(self, uri: str) -> bool:
        """Tell whether there is an object that this identity may see.

        Without the permission `s3:ListBucket`, S3 answers that access is denied if the object is missing.
        """
        bucket, key = split_uri(uri)
        try:
            self.call("s3", "head_object", Bucket=bucket, Key=key)
        except CloudProblem as error:
            if code_of(error) in {"404", "NoSuchKey", "NotFound", *_DENIED}:
                return False
            raise explained(error, f"cannot look for {uri}", "s3") from None
        return True

    def upload(self, content: BinaryIO, uri: str, kms_key: str | None = None) -> None:
        """Put an object, encrypted with `kms_key` or as the bucket has it."""
        bucket, key = split_uri(uri)
        content.seek(0)
        options = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
        self.ask("s3", "put_object", f"cannot upload to {uri}", Bucket=bucket, Key=key, Body=content, **options)

    def upload_sources(self, packed: Packed, uri: str, kms_key: str | None = None) -> None:
        """Upload the sources of a job, unless the same ones are there; refuse those that have changed since."""
        if self.object_exists(uri):
            return
        with tempfile.TemporaryFile(prefix="smpkit-") as file:
            if pack(packed.sources, file) != packed:
                message = "changed while the job was submitted"
                raise ConfigError([Problem(("source_dir",), message, "submit again")], subject="sources")
            size = file.tell()
            if size > _MAX_OBJECT_BYTES:
                message = f"is packed into {amount(size)}, and S3 takes at most {amount(_MAX_OBJECT_BYTES)} at once"
                raise ConfigError([Problem(("source_dir",), message, SMALLER)], subject="sources")
            self.upload(file, uri, kms_key)

    def delete(self, uri: str) -> None:
        bucket, key = split_uri(uri)
        self.ask("s3", "delete_object", f"cannot delete {uri}", Bucket=bucket, Key=key)

    def discard(self, *uris: str) -> None:
        """Delete objects of a job that was refused; those that may not be deleted stay."""
        for uri in uris:
            with contextlib.suppress(CloudError):
                self.delete(uri)

    def objects(self, folder: str) -> dict[str, datetime]:
        """Return the objects below an S3 URI that ends with a slash, and when each was written."""
        bucket, prefix = split_uri(folder)
        doing = f"cannot list {folder}"
        items = self.pages("s3", "list_objects_v2", "Contents", doing, Bucket=bucket, Prefix=prefix)
        return {item["Key"].removeprefix(prefix): item["LastModified"] for item in items}

    def read(self, uri: str) -> bytes:
        """Return the content of a (small) object."""
        bucket, key = split_uri(uri)
        try:  # the body comes after the answer
            content: bytes = self.call("s3", "get_object", Bucket=bucket, Key=key)["Body"].read()
        except CloudProblem as error:
            raise explained(error, f"cannot read {uri}", "s3") from None
        return content

    def fetch(self, uri: str, into: BinaryIO) -> None:
        """Write an object of any size to a file."""
        bucket, key = split_uri(uri)
        try:
            self.client("s3").download_fileobj(bucket, key, into)
        except CloudProblem as error:
            raise explained(error, f"cannot read {uri}", "s3") from None


# ---- why a call failed -----------------------------------------------------------------------------------------------

_THROTTLING = frozenset(
    {"Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException", "RequestLimitExceeded"}
    | {"SlowDown", "RequestThrottled", "ServiceUnavailable", "ServiceUnavailableException", "InternalFailure"}
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"})
_UNKNOWN_KEYS = frozenset(
    {"UnrecognizedClientException", "InvalidClientTokenId", "SignatureDoesNotMatch", "AuthFailure"}
)
_SKEWED = re.compile(r"Signature (?:expired|not yet current)|RequestTimeTooSkewed")
_QUOTA = re.compile(
    r"service limit '(?P<name>[^']+)' is (?P<limit>[\d.,]+) Instances, with current utilization of (?P<used>[\d.,]+)"
    r" Instances and a request delta of (?P<asked>[\d.,]+)"
)
_PERMISSIONS: Mapping[str, str] = {"HeadBucket": "ListBucket", "ListObjectsV2": "ListBucket"}
"""Calls whose permission has another name."""

_REFUSALS: Mapping[frozenset[str], tuple[str, str]] = {
    _EXPIRED: (
        "the AWS credentials have expired",
        "renew them, for example with `aws sso login`; jobs that run are not touched",
    ),
    _UNKNOWN_KEYS: ("AWS does not know these credentials ({code})", "`smpkit doctor` checks them"),
    _DENIED: ("{message}", "allow `{service}:{permission}` for this identity"),
    _THROTTLING: ("AWS still answers {code} after several tries", "try again in a minute"),
    frozenset({"NoSuchBucket"}): ("the bucket does not exist", "make it with `aws s3 mb`, or set `output`"),
    frozenset({"ResourceInUse"}): ("{message}", "a job's name can be used only once; choose another `name`"),
    frozenset({"ResourceLimitExceeded"}): (
        "{message}",
        "ask for more under Service Quotas in the AWS console, or change `compute`",
    ),
}
"""A service's codes -> what to say, and the hint."""

_BEFORE_THE_CALL: tuple[tuple[Any, type[SmpkitError], str], ...] = (
    (
        (NoCredentialsError, PartialCredentialsError, TokenRetrievalError),
        CloudError,
        "`aws configure` or `aws sso login` makes some; `--profile` chooses; `smpkit doctor` checks",
    ),
    (NoRegionError, CloudError, "set AWS_REGION, or use `--region`"),
    (ProfileNotFound, UsageError, "`aws configure list-profiles` shows them"),
)
"""botocore's errors -> ours, and the hint."""


def code_of(error: BaseException) -> str:
    """Return the service's code of an error; empty if it has none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def is_in_doubt(error: BaseException) -> bool:
    """Tell whether the call may have taken effect despite the error: no answer came, or an internal error (5xx)."""
    if isinstance(error, ClientError):
        return bool(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500)
    return isinstance(error, (ConnectionError, HTTPClientError, ResponseParserError, RetriesExceededError))


def explained(error: BaseException, doing: str, service: str) -> SmpkitError:
    """Return the error to raise in place of one of boto3's; it begins with `doing`, such as `cannot start the job`."""
    if isinstance(error, ClientError):
        return _refusal(error, doing, service)
    text = " ".join(str(getattr(error, "last_exception", error)).split()).rstrip(".")
    if not text[1:2].isupper():  # `STS ...` stays
        text = text[:1].lower() + text[1:]
    for kinds, ours, hint in _BEFORE_THE_CALL:
        if isinstance(error, kinds):
            return ours(f"{doing}: {text}", hint=hint)
    if is_in_doubt(error):
        return UnreachableError(f"{doing}: {text}", hint="check the network, the proxy and the region")
    return CloudError(f"{doing}: {text}")


def _refusal(error: ClientError, doing: str, service: str) -> SmpkitError:
    code, message = code_of(error), str(error.response.get("Error", {}).get("Message", "")).strip().rstrip(".")
    if _SKEWED.search(f"{code} {message}"):
        hint = "set this machine's clock, for example with `timedatectl set-ntp true`"
        return CloudError(f"{doing}: this machine's clock differs from AWS's by more than 5 minutes", hint=hint)
    quota = _QUOTA.search(message)
    if quota is not None:
        message = "your quota `{name}` is {limit}, {used} in use and {asked} more asked for".format(**quota.groupdict())
    text, hint = next((words for codes, words in _REFUSALS.items() if code in codes), ("{code}: {message}", ""))
    facts = {
        "code": code,
        "message": message or "access denied",
        "service": service,
        "permission": _PERMISSIONS.get(error.operation_name, error.operation_name),
    }
    return CloudError(f"{doing}: {text.format(**facts)}", hint=hint.format(**facts) or None)


@cache
def request_shape(service: str, operation: str) -> Shape:
    """Return botocore's own description of a request, such as `("sagemaker", "CreateTrainingJob")`."""
    model = ServiceModel(Loader().load_service_model(service, "service-2"), service)
    return model.operation_model(operation).input_shape
