"""Read why a job failed: the FailureReason, which holds what our launcher left, or the service's own words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["JobFailure", "read_reason"]

_PREFIX = re.compile(r"^(?:AlgorithmError|ClientError|InternalServerError|CapacityError)\s*:\s*")
_SUFFIX = re.compile(r",? exit code: (?P<code>\d+)\s*$")
_RANK = re.compile(r"^rank (?P<rank>\d+) on (?P<host>\S+), exit (?P<code>\d+)$", re.MULTILINE)
_HINT = re.compile(r"^hint: (?P<hint>.+)$", re.MULTILINE)

_HINTS: Mapping[str, str] = {
    r"capacity|CapacityError": "try later, in another region or with another `compute.instance_type`; spot may wait",
    r"\bECR\b|image.*(not found|does not exist)|Cannot find repository": "`smpkit doctor` checks the image",
    r"OutOfMemory|exit code: 137|killed by SIGKILL|out of memory": "`smpkit plan` shows the memory of each rank",
    r"No S3 objects found|S3 (key|prefix)": "look at `inputs` with `aws s3 ls`; end a folder's prefix with `/`",
    r"AccessDenied|not authorized|Access Denied": "the job's role needs this permission, not you",
    r"InternalServerError": "SageMaker's own error: submit again, or set `compute.retries`",
}


@dataclass(frozen=True)
class JobFailure:
    """Why a job failed."""

    reason: str
    """FailureReason as the service has it: at most 1,024 characters of what the container left."""
    headline: str
    """The exception, or the service's sentence."""
    rank: int | None
    """The first rank that failed, if our launcher named one."""
    host: str | None
    exit_code: int | None
    details: tuple[str, ...]
    """Where it happened, innermost first."""
    hint: str | None


def read_reason(reason: str) -> JobFailure:
    """Take a FailureReason apart."""
    text = _PREFIX.sub("", reason.strip())
    suffix = _SUFFIX.search(text)
    exit_code = int(suffix["code"]) if suffix else None
    body = text[: suffix.start()] if suffix else text
    place, told = _RANK.search(body), _HINT.search(body)
    lines = [line for line in body.splitlines() if not (_RANK.fullmatch(line) or _HINT.fullmatch(line))]
    # Our launcher writes the exception before the rank's place; what others write says it in the first line.
    if place:
        headline = body[: place.start()].strip()
    else:
        headline = body[: len(lines[0])].strip() if lines else ""
    rest = lines[len(headline.splitlines()) :]
    return JobFailure(
        reason=reason,
        headline=headline or reason.strip(),
        rank=int(place["rank"]) if place else None,
        host=place["host"] if place else None,
        exit_code=int(place["code"]) if place else exit_code,
        details=tuple(line for line in rest if line.strip()),
        hint=told["hint"] if told else _hint(reason),
    )


def _hint(reason: str) -> str | None:
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, reason, re.IGNORECASE)), None)
