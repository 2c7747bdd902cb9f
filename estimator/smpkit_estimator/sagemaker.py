"""All that knows boto3 and botocore: sessions and clients, one call, why it failed, the services' request models.

boto3 itself is imported only when no session is given: anything with its `client(name)` can stand in for a session,
such as `smpkit.testing.FakeSageMaker`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

from botocore import xform_name
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

import smpkit
from smpkit.errors import CloudError, SmpkitError, UnreachableError, UsageError

__all__ = [
    "CloudProblem",
    "ForeignAnswerError",
    "Session",
    "call_once",
    "code_of",
    "explained",
    "is_denied",
    "is_in_doubt",
    "is_throttling",
    "is_unreachable",
    "open_client",
    "open_session",
    "operation_name",
    "request_shape",
    "response_shape",
]

CloudProblem = (ClientError, BotoCoreError, ResponseParserError)
"""What boto3 raises."""

_THROTTLING = frozenset(
    {"Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException", "RequestLimitExceeded"}
    | {"SlowDown", "RequestThrottled", "ServiceUnavailable", "ServiceUnavailableException", "InternalFailure"}
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"})
_NOT_SIGNED = frozenset({"UnrecognizedClientException", "InvalidClientTokenId", "SignatureDoesNotMatch", "AuthFailure"})
_SKEWED = re.compile(r"Signature (?:expired|not yet current)|RequestTimeTooSkewed")
_NO_BUCKET = frozenset({"NoSuchBucket"})

_LOGIN = "renew them, for example with `aws sso login`; jobs that run are not touched"
_QUOTA = re.compile(
    r"service limit '(?P<name>[^']+)' is (?P<limit>[\d.,]+) Instances, with current utilization of (?P<used>[\d.,]+)"
    r" Instances and a request delta of (?P<asked>[\d.,]+)"
)
_OPERATIONS: Mapping[str, str] = {"HeadBucket": "ListBucket", "ListObjectsV2": "ListBucket"}
"""Calls whose permission has another name."""


class ForeignAnswerError(BotoCoreError):  # type: ignore[misc]  # botocore has no types
    """Something other than AWS answered, such as a proxy."""

    fmt = "what answered {operation} is not AWS"


# ---- sessions, clients, calls ----------------------------------------------------------------------------------------


class Session(Protocol):
    """What is used of `boto3.Session`."""

    @property
    def region_name(self) -> str | None:
        """The region, if one is set."""

    def client(self, service_name: str, /, **options: Any) -> Any:
        """Make a client of one service."""


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


def open_client(session: Session, service: str, region: str, *, retries: bool) -> Any:
    """Return a client of one service; without `retries`, botocore itself asks only once."""
    from botocore.config import Config

    config = Config(
        connect_timeout=10,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 3 if retries else 1},
        user_agent_extra=f"smpkit/{smpkit.__version__}",
    )
    try:
        return session.client(service, region_name=region, config=config)
    except CloudProblem as error:
        raise explained(error, "cannot use AWS", service) from None
    except ValueError as error:  # the endpoint is not a valid URL
        hint = "AWS_ENDPOINT_URL, or the profile's `endpoint_url`, must be like `https://host`"
        raise CloudError(f"cannot use AWS: {str(error).lower()}", hint=hint) from None


def call_once(client: Any, service: str, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call once, or as often as botocore does by itself.

    Raises:
        ForeignAnswerError: something else than the service answered.
    """
    call = getattr(client, operation)
    try:
        answer: dict[str, Any] = call(**arguments)
    except KeyError as error:
        if not _is_of_a_parser(error):
            raise
        raise ForeignAnswerError(operation=operation_name(service, operation)) from None
    if not _is_of_the_service(answer, service, operation):
        raise ForeignAnswerError(operation=operation_name(service, operation))
    return answer


def _is_of_the_service(answer: Mapping[str, Any], service: str, operation: str) -> bool:
    """Tell whether AWS gave this answer: a proxy or captive portal may answer 200 as well, with its own page."""
    meta = answer.get("ResponseMetadata")
    if meta is None:  # the session is not one of boto3
        return True
    headers = meta.get("HTTPHeaders", {})
    if meta.get("RequestId") or "x-amz-request-id" in headers or "x-amzn-requestid" in headers:
        return True
    shape = response_shape(service, operation_name(service, operation))
    complete = shape is None or all(name in answer for name in getattr(shape, "required_members", ()))
    return complete and "html" not in headers.get("content-type", "")


def _is_of_a_parser(error: KeyError) -> bool:
    """Tell whether botocore's parser raised this, as it does for an HTML page in place of a service's XML."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == "botocore.parsers"


# ---- why a call failed -----------------------------------------------------------------------------------------------


def code_of(error: BaseException) -> str:
    """Return the service's code of an error; empty if it has none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def is_throttling(error: BaseException) -> bool:
    """Tell whether the same call may succeed later."""
    return code_of(error) in _THROTTLING


def is_denied(error: BaseException) -> bool:
    """Tell whether the identity may not make this call."""
    return code_of(error) in _DENIED


def is_unreachable(error: BaseException) -> bool:
    """Tell whether no answer came from AWS."""
    return isinstance(error, (ConnectionError, HTTPClientError, ForeignAnswerError, ResponseParserError))


def is_in_doubt(error: BaseException) -> bool:
    """Tell whether the call may have taken effect despite the error: no answer came, or an internal error (5xx)."""
    if isinstance(error, ClientError):
        return bool(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500)
    return is_unreachable(error)


def explained(error: BaseException, doing: str, service: str) -> SmpkitError:
    """Return the error to raise in place of one of boto3's.

    Args:
        doing: what was tried, such as `cannot start the job`.
        service: boto3's name of the service, for the permission's name.
    """
    if isinstance(error, ClientError):
        return _refusal(error, doing, service)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError, TokenRetrievalError)):
        hint = "`aws configure` or `aws sso login` makes some; `--profile` chooses; `smpkit doctor` checks"
        return CloudError(f"{doing}: {_sentence(error)}", hint=hint)
    if isinstance(error, NoRegionError):
        return CloudError(f"{doing}: no region is set", hint="set AWS_REGION, or use `--region`")
    if isinstance(error, ProfileNotFound):
        return UsageError(f"{doing}: {_sentence(error)}", hint="`aws configure list-profiles` shows them")
    if isinstance(error, (ForeignAnswerError, ResponseParserError)):
        what = _sentence(error) if isinstance(error, ForeignAnswerError) else "what answered is not AWS"
        hint = "a proxy or the log-in page of a network: open any page in a browser, or check HTTPS_PROXY"
        return UnreachableError(f"{doing}: {what}", hint=hint)
    if is_unreachable(error):
        return UnreachableError(f"{doing}: {_sentence(error)}", hint="check the network, the proxy and the region")
    return CloudError(f"{doing}: {_sentence(error)}")


def _refusal(error: ClientError, doing: str, service: str) -> SmpkitError:
    code, message = code_of(error), str(error.response.get("Error", {}).get("Message", "")).strip().rstrip(".")
    if _SKEWED.search(f"{code} {message}"):
        hint = "set this machine's clock, for example with `timedatectl set-ntp true`"
        return CloudError(f"{doing}: this machine's clock differs from AWS's by more than 5 minutes", hint=hint)
    if code in _EXPIRED:
        return CloudError(f"{doing}: the AWS credentials have expired", hint=_LOGIN)
    if code in _NOT_SIGNED:
        return CloudError(f"{doing}: AWS does not know these credentials ({code})", hint="`smpkit doctor` checks them")
    if code in _DENIED:
        operation = _OPERATIONS.get(error.operation_name, error.operation_name)
        return CloudError(
            f"{doing}: {message or 'access denied'}", hint=f"allow `{service}:{operation}` for this identity"
        )
    if code in _NO_BUCKET:
        return CloudError(f"{doing}: the bucket does not exist", hint="make it with `aws s3 mb`, or set `output`")
    if code == "ResourceLimitExceeded":
        return _quota(message, doing)
    if code == "ResourceInUse":
        return CloudError(f"{doing}: {message}", hint="a job's name can be used only once; choose another `name`")
    if code in _THROTTLING:
        return CloudError(f"{doing}: AWS still answers {code} after several tries", hint="try again in a minute")
    return CloudError(f"{doing}: {code}: {message}")


def _quota(message: str, doing: str) -> CloudError:
    hint = "ask for more under Service Quotas in the AWS console, or change `compute`"
    found = _QUOTA.search(message)
    if found is None:
        return CloudError(f"{doing}: {message}", hint=hint)
    text = (
        f"your quota `{found['name']}` is {found['limit']}, {found['used']} in use and {found['asked']} more asked for"
    )
    return CloudError(f"{doing}: {text}", hint=hint)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]  # `STS ...` stays


# ---- the services' own description of their requests, as botocore ships it -------------------------------------------


@cache
def _service(name: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(name, "service-2"), name)


def request_shape(service: str, operation: str) -> Shape:
    """Return the shape of a request, such as `("sagemaker", "CreateTrainingJob")`."""
    return _service(service).operation_model(operation).input_shape


def response_shape(service: str, operation: str) -> Shape | None:
    """Return the shape of a response; None if it has no body."""
    return _service(service).operation_model(operation).output_shape


@cache
def operation_name(service: str, method: str) -> str:
    """Return the operation behind a boto3 client's method: `create_training_job` -> `CreateTrainingJob`.

    Raises:
        AttributeError: the service has no such operation.
    """
    for name in _service(service).operation_names:
        if xform_name(name) == method:
            return str(name)
    raise AttributeError(f"{service} has no operation {method!r}")
