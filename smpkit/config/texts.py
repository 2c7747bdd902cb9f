"""The kinds of text in a job file, each with its own plain refusal: names, scripts, places, container paths."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from smpkit.config.explain import validation_error
from smpkit.config.words import quoted
from smpkit.errors import Problem

__all__ = ["JOB_NAME", "BucketUri", "ContainerPath", "JobName", "Location", "Pattern", "Script", "Word", "name_from"]


JOB_NAME = r"(?=.{1,63}$)[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
"""What a whole name of a job matches; the service's own pattern allows hyphens beyond its 63 characters."""


def _refuse(message: str, hint: str | None = None) -> Exception:
    return validation_error("value", [Problem((), message, hint)])


def _job_name(value: str) -> str:
    if re.fullmatch(JOB_NAME, value) is None:
        message = "must have 1 to 63 letters, digits and hyphens, the first and last no hyphen"
        example = name_from(value)
        hint = f"for example `{example}`" if len(value) <= 63 else "shorten it"
        raise _refuse(f"{message}, got {quoted(value)}", hint)
    return value


def name_from(text: str) -> str:
    """Make a job name of any text."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", text)[:63].strip("-") or "job"


def _script(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        message = f"must be a path inside source_dir, got {quoted(value)}"
        raise _refuse(message, "set `source_dir` to the script's folder")
    if path.suffix != ".py" or not value.isprintable():
        raise _refuse(f"must be a Python script (`.py`), got {quoted(value)}")
    return value


_MAX_NAME_BYTES = 255
"""The longest name of a file or folder on the usual file systems; asking for a longer one is an error of its own."""


def _location(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise _refuse(f"must be a folder or an S3 URI, got {quoted(value)}")
    if "://" not in value and any(len(part.encode()) > _MAX_NAME_BYTES for part in value.split("/")):
        raise _refuse(
            f"must be a folder or an S3 URI, and a name has at most {_MAX_NAME_BYTES} bytes, got {quoted(value)}"
        )
    if "://" in value and not value.startswith("s3://"):
        raise _refuse(f"must be a folder or an S3 URI, got {quoted(value)}", "for example `s3://bucket/folder`")
    bucket = value.removeprefix("s3://").partition("/")[0]
    if value.startswith("s3://") and re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket) is None:
        what = (
            f"must name a bucket, which has 3 to 63 lower-case letters, digits, dots and hyphens, got {quoted(value)}"
        )
        raise _refuse(what, "for example `s3://bucket/folder`")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or not value.isprintable():
        raise _refuse(f"must be an absolute path inside the container, got {quoted(value)}")
    return value


def _word(value: str) -> str:
    if re.fullmatch(r"\S{1,255}", value) is None or not value.isprintable():
        raise _refuse(f"must have 1 to 255 characters and no blanks, got {quoted(value)}")
    return value


def _bucket_uri(value: str) -> str:
    if "://" not in _location(value):
        raise _refuse(f"must be an S3 URI, got {quoted(value)}", "for example `s3://bucket/folder`")
    return value


def _pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise _refuse(f"is not a regular expression: {error}, got {quoted(value)}") from None
    if not groups:
        raise _refuse(f"must have a group around the number, got {quoted(value)}", "for example `loss=([0-9.]+)`")
    return value


JobName = Annotated[str, AfterValidator(_job_name)]
Script = Annotated[str, AfterValidator(_script)]
Location = Annotated[str, AfterValidator(_location)]
BucketUri = Annotated[str, AfterValidator(_bucket_uri)]
ContainerPath = Annotated[str, AfterValidator(_absolute)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Word = Annotated[str, AfterValidator(_word)]
