"""The kinds of texts and free-form mappings in a job file, each with its own plain refusal."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import JsonValue

from smpkit.config.section import checked, instead, matching
from smpkit.config.words import quoted

JOB_NAME = r"(?=.{1,63}$)[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
"""What a whole name of a job matches; the service's own pattern allows hyphens beyond its 63 characters."""

_Refusal = str | tuple[str, str | None] | None
_EXAMPLE = "for example `s3://bucket/folder`"
_MAX_VARIABLE_BYTES = 120_000
"""A little less than the 128 KiB of one variable on Linux: other facts of the job share it with hyperparameters."""


def name_from(text: str) -> str:
    """Make a job name of any text."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", text)[:63].strip("-") or "job"


def wrong_job_name(value: str) -> tuple[str, str] | None:
    """Return what is wrong with a name and a hint; None if it can be a job's."""
    if re.fullmatch(JOB_NAME, value):
        return None
    message = "must have 1 to 63 letters, digits and hyphens, the first and last no hyphen"
    hint = f"for example `{name_from(value)}`" if len(value) <= 63 else "shorten it"
    return f"{message}, got {quoted(value)}", hint


def _script(value: str) -> _Refusal:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        hint = f"write `{path.name}` here, and its folder in `source_dir`, which is relative to the job file"
        return f"must be a path inside source_dir, got {quoted(value)}", hint
    if path.suffix not in (".py", ".sh") or not value.isprintable():
        return f"must be a Python script (`.py`) or a shell script (`.sh`), got {quoted(value)}"
    return None


def _location(value: str) -> _Refusal:
    got = f"got {quoted(value)}"
    if not value.strip() or not value.isprintable():
        return f"must be a folder or an S3 URI, {got}"
    if re.match(r"[sS]3:/?[^/]", value):
        return f"must be a folder or an S3 URI, which begins with `s3://`, {got}", _EXAMPLE
    if value.startswith("~"):
        return f"must be a folder or an S3 URI, and only a shell replaces `~`, {got}", "write the path from `/`"
    if "://" not in value:
        return None
    if not value.startswith("s3://"):
        return f"must be a folder or an S3 URI, {got}", _EXAMPLE
    bucket = value.removeprefix("s3://").partition("/")[0]
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket) is None:
        letters = "3 to 63 lower-case letters, digits, dots and hyphens"
        return f"must name a bucket, which has {letters}, {got}", _EXAMPLE
    return None


def _pattern(value: str) -> _Refusal:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        return f"is not a regular expression: {error}, got {quoted(value)}"
    hint = "for example `loss=([0-9.]+)`"
    return None if groups else (f"must have a group around the number, got {quoted(value)}", hint)


JobName = Annotated[str, checked(wrong_job_name)]
Script = Annotated[str, checked(_script)]
Location = Annotated[str, checked(_location)]
BucketUri = Annotated[Location, matching("s3://.*", "must be an S3 URI", _EXAMPLE)]
ContainerPath = Annotated[str, matching("/.*", "must be an absolute path inside the container")]
Pattern = Annotated[str, checked(_pattern)]
_TYPE = r"(?!ml\.)\S{1,255}|ml\.[a-z0-9-]+\.(\d*x?large|small|medium|metal)"
_MACHINES = "must be `local` or a SageMaker instance type"
InstanceType = Annotated[str, matching(_TYPE, _MACHINES, "such as `ml.p4d.24xlarge`")]
_ROLE = r"(?!arn:)\S{1,255}|arn:aws[a-z-]*:iam::\d{12}:role/\S+"
Role = Annotated[str, matching(_ROLE, "must be an IAM role, by name or ARN", "`arn:aws:iam::<account>:role/<name>`")]
Word = Annotated[str, matching(r"\S{1,255}", "must have 1 to 255 characters and no blanks")]


def _too_long(value: object) -> _Refusal:
    # Linux starts no program with a longer text among its variables; SM_TRAINING_ENV has hyperparameters twice.
    size = len(json.dumps(value))
    longest = _MAX_VARIABLE_BYTES // (1 if isinstance(value, str) else 2)
    if size > longest:
        hint = "put what is long in a file in source_dir and read that in the script"
        return f"has {size:,} bytes as JSON, and a process takes at most {longest:,} in a variable", hint
    return None


def _hyperparameter(name: str) -> _Refusal:
    if not 1 <= len(name) <= 256:
        return f"a name must have 1 to 256 characters, got {len(name)}"
    if name.startswith("sagemaker_") or name == "mp_parameters":
        hint = "use `distribution`" if name == "mp_parameters" else "choose another name"
        return "is a name that SageMaker keeps for itself", hint
    return None


_VARIABLE = "a variable's name must have at most 512 letters, digits and underscores, and not start with a digit"
VariableName = Annotated[str, matching("[a-zA-Z_][a-zA-Z0-9_]{0,511}", _VARIABLE)]
Variables = dict[VariableName, Annotated[str, checked(_too_long)]]

_Json = Annotated[JsonValue, instead("must be something that JSON can hold, with finite numbers")]
Hyperparameters = Annotated[dict[Annotated[str, checked(_hyperparameter)], _Json], checked(_too_long)]
