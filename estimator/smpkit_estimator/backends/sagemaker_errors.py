"""Say in a sentence why the cloud refused or could not be reached, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping

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

from smpkit.errors import CloudError, SmpkitError, UsageError

__all__ = ["CloudProblem", "UnreachableError", "code_of", "explained", "is_throttling", "is_unreachable"]

CloudProblem = (ClientError, BotoCoreError)
"""What boto3 raises."""

_THROTTLING = frozenset(
    {"Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException", "RequestLimitExceeded"}
    | {"SlowDown", "RequestThrottled", "ServiceUnavailable", "ServiceUnavailableException", "InternalFailure"}
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"})
_NOT_SIGNED = frozenset({"UnrecognizedClientException", "InvalidClientTokenId", "SignatureDoesNotMatch", "AuthFailure"})
_NO_BUCKET = frozenset({"NoSuchBucket"})

_LOGIN = "renew them, for example with `aws sso login`; jobs that run are not touched"
_QUOTA = re.compile(
    r"service limit '(?P<name>[^']+)' is (?P<limit>[\d.,]+) Instances, with current utilization of (?P<used>[\d.,]+)"
    r" Instances and a request delta of (?P<asked>[\d.,]+)"
)
_OPERATIONS: Mapping[str, str] = {"HeadObject": "GetObject", "HeadBucket": "ListBucket", "ListObjectsV2": "ListBucket"}
"""Calls whose permission has another name."""


class UnreachableError(CloudError):
    """No answer came from the cloud; trying again may help."""


def code_of(error: BaseException) -> str:
    """Return the service's code of an error; empty if it has none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def is_throttling(error: BaseException) -> bool:
    """Tell whether the same call may succeed later."""
    return code_of(error) in _THROTTLING


def is_unreachable(error: BaseException) -> bool:
    """Tell whether no answer came, so that it is not known whether the call took effect."""
    return isinstance(error, (ConnectionError, HTTPClientError))


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
    if is_unreachable(error):
        return UnreachableError(f"{doing}: {_sentence(error)}", hint="check the network, the proxy and the region")
    return CloudError(f"{doing}: {_sentence(error)}")


def _refusal(error: ClientError, doing: str, service: str) -> SmpkitError:
    code, message = code_of(error), str(error.response.get("Error", {}).get("Message", "")).strip().rstrip(".")
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
