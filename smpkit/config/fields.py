"""The kinds of texts and free-form mappings in a job file, each with its own plain refusal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, JsonValue

from smpkit.config.explain import validation_error
from smpkit.config.section import KeyPath, free_form
from smpkit.config.words import quoted, typed
from smpkit.errors import Problem

__all__ = [
    "JOB_NAME",
    "BucketUri",
    "ContainerPath",
    "Hyperparameters",
    "JobName",
    "Location",
    "Pattern",
    "Script",
    "Variables",
    "Word",
    "channel_problems",
    "name_from",
    "tag_problems",
    "variable_problems",
]

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
    if path.suffix not in (".py", ".sh") or not value.isprintable():
        raise _refuse(f"must be a Python script (`.py`) or a shell script (`.sh`), got {quoted(value)}")
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


_MAX_DEPTH = 64
_NUL = "holds a NUL character, which cannot be passed to a process"


def _hyperparameter_problems(name: object, value: object) -> Iterable[Problem]:
    if not isinstance(name, str):
        yield Problem((quoted(name),), f"a name must be text, got {typed(name)}", "put it in quotes")
    elif not 1 <= len(name) <= 256:
        yield Problem((name,), f"a name must have 1 to 256 characters, got {len(name)}")
    elif name.startswith("sagemaker_") or name == "mp_parameters":
        hint = "use `distribution`" if name == "mp_parameters" else "choose another name"
        yield Problem((name,), "is a name that SageMaker keeps for itself", hint)
    elif "\0" in name or (isinstance(value, str) and "\0" in value):
        yield Problem((name,), _NUL, "remove it")
    else:
        yield from _json_problems((name,), value, 0)


def _json_problems(path: KeyPath, value: object, depth: int) -> Iterable[Problem]:
    """Say what in a value JSON cannot hold. Depth is bounded, which also ends values that contain themselves."""
    if depth > _MAX_DEPTH:
        yield Problem(path[:1], f"is nested more than {_MAX_DEPTH} levels deep")
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _json_problems((*path, key), item, depth + 1)
            else:
                yield Problem(path, f"a name must be text, got {typed(key)}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _json_problems((*path, index), item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"must be a finite number, got {quoted(value)}")
    elif not (value is None or isinstance(value, (str, bool, int, float))):
        yield Problem(path, f"must be something that JSON can hold, got {quoted(value)}")


def variable_problems(name: object, value: object) -> Iterable[Problem]:
    """Say what is wrong with a variable: with its name, or with a value that no process can be given."""
    if not isinstance(name, str) or re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}", name) is None:
        message = "a variable's name must have at most 512 letters, digits and underscores, and not start with a digit"
        yield Problem((_shown(name),), f"{message}, got {quoted(name)}")
    elif isinstance(value, str) and "\0" in value:
        yield Problem((name,), _NUL, "remove it")


def channel_problems(name: object, _: object) -> Iterable[Problem]:
    """Say what is wrong with the name of a channel."""
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9.\-_]{1,64}", name) is None:
        message = "a channel's name must have 1 to 64 letters, digits, `.`, `-` and `_`"
        yield Problem((_shown(name),), f"{message}, got {quoted(name)}")


def tag_problems(name: object, _: object) -> Iterable[Problem]:
    """Say what is wrong with the key of a tag."""
    if not isinstance(name, str) or not 1 <= len(name) <= 128:
        yield Problem((quoted(name),), f"the key of a tag must have 1 to 128 characters, got {quoted(name)}")
    elif name.lower().startswith("aws:"):
        yield Problem((name,), "is a key that AWS keeps for itself", "choose one that does not begin with `aws:`")


def _shown(name: object) -> str:
    return name if isinstance(name, str) else quoted(name)


Hyperparameters = Annotated[dict[str, JsonValue], free_form(_hyperparameter_problems)]
Variables = Annotated[dict[str, str], free_form(variable_problems)]
