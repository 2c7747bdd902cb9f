"""Check a request against every limit of the service before anything is sent; boto3 itself checks almost none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from smpkit.config.section import KeyPath
from smpkit.config.words import quoted, suggestion
from smpkit.errors import Problem
from smpkit_estimator.fields import hint_for, place_of


def preflight(body: Mapping[str, Any], shape: Any) -> list[Problem]:
    """Return all that the service would refuse in a request, each under its name in the job file, with a hint.

    Args:
        shape: botocore's shape of the request (`aws.request_shape`).
    """
    problems = (replace(problem, path=place_of(problem.path, body)) for problem in _violations((), body, shape))
    return [problem if problem.hint else replace(problem, hint=hint_for(problem.path)) for problem in problems]


def _violations(path: KeyPath, value: Any, shape: Any) -> Iterator[Problem]:
    if shape.type_name == "structure":
        yield from _structure(path, value, shape)
    elif shape.type_name == "map":
        yield from _size(path, len(value), "entries", shape)
        for name, item in value.items():
            yield from _violations((*path, name), name, shape.key)
            yield from _violations((*path, name), item, shape.value)
    elif shape.type_name == "list":
        yield from _size(path, len(value), "entries", shape)
        for index, item in enumerate(value):
            yield from _violations((*path, index), item, shape.member)
    elif shape.type_name == "string":
        yield from _text(path, value, shape)
    elif shape.type_name in ("integer", "long"):
        yield from _number(path, value, shape)


def _structure(path: KeyPath, value: Mapping[str, Any], shape: Any) -> Iterator[Problem]:
    for name in shape.required_members:
        if value.get(name) is None:
            yield Problem((*path, name), "is required")
    for name, item in value.items():
        if name not in shape.members:
            yield Problem((*path, name), "is not known to this version of botocore", "update boto3")
        elif item is not None:
            yield from _violations((*path, name), item, shape.members[name])


def _size(path: KeyPath, size: int, what: str, shape: Any) -> Iterator[Problem]:
    low, high = shape.metadata.get("min", 0), shape.metadata.get("max")
    if size < low or (high is not None and size > high):
        allowed = f"at most {high:,}" if size >= low else f"at least {low:,}"
        yield Problem(path, f"has {size:,} {what}, SageMaker takes {allowed}")


def _text(path: KeyPath, value: str, shape: Any) -> Iterator[Problem]:
    if shape.enum:
        if value not in shape.enum:
            message = f"{quoted(value)} is not one of SageMaker's {len(shape.enum)} values"
            yield Problem(path, message, suggestion(value, shape.enum) or _all_of(shape.enum))
        return
    too_long = list(_size(path, len(value), "characters", shape))
    yield from too_long
    pattern = shape.metadata.get("pattern")
    if pattern is not None and not too_long and re.fullmatch(_python_pattern(pattern), value) is None:
        yield Problem(path, f"{quoted(value)} does not fit SageMaker's pattern `{pattern}`")


def _all_of(values: list[str]) -> str:
    if len(values) <= 8:
        return f"one of {', '.join(f'`{value}`' for value in values)}"
    return "update boto3 if SageMaker has it: the values are those that boto3 knows"


def _number(path: KeyPath, value: int, shape: Any) -> Iterator[Problem]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    largest = 2**31 - 1 if shape.type_name == "integer" else 2**63 - 1
    if (low is not None and value < low) or value > (high if high is not None else largest):
        least = low if low is not None else -largest - 1
        yield Problem(path, f"is {value}, SageMaker takes {least} to {high if high is not None else largest}")


def _python_pattern(pattern: str) -> str:
    """Rewrite Java's classes, which the service model has in a few patterns, for Python's `re`."""
    classes = {r"\p{L}": r"\w", r"\p{N}": r"\w", r"\p{Z}": r" \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"}
    classes[r"\p{Alnum}"] = "a-zA-Z0-9"
    for java, python in classes.items():
        pattern = pattern.replace(java, python)
    return pattern
