"""What the names and values of a job file's free-form mappings may be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import JsonValue

from smpkit.config.section import KeyPath, free_form
from smpkit.config.words import quoted, typed
from smpkit.errors import Problem

__all__ = ["Hyperparameters", "Variables", "channel_problems", "tag_problems", "variable_problems"]

_MAX_DEPTH = 64


def _hyperparameter_problems(name: object, value: object) -> Iterable[Problem]:
    if not isinstance(name, str):
        yield Problem((quoted(name),), f"a name must be text, got {typed(name)}", "put it in quotes")
    elif not 1 <= len(name) <= 256:
        yield Problem((name,), f"a name must have 1 to 256 characters, got {len(name)}")
    elif name.startswith("sagemaker_") or name == "mp_parameters":
        hint = "use `distribution`" if name == "mp_parameters" else "choose another name"
        yield Problem((name,), "is a name that SageMaker keeps for itself", hint)
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


def variable_problems(name: object, _: object) -> Iterable[Problem]:
    """Say what is wrong with the name of a variable."""
    if not isinstance(name, str) or re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}", name) is None:
        message = "a variable's name must have at most 512 letters, digits and underscores, and not start with a digit"
        yield Problem((_shown(name),), f"{message}, got {quoted(name)}")


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
