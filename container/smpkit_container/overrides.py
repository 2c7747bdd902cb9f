"""Hyperparameters that smpkit sends encoded, because the service or an SDK could not carry them: decode them.

- `sagemaker_smpkit_parameters_file`: `mp_parameters` that are too long for a hyperparameter, as a file in the sources.
- `sagemaker_smpkit_packed`: hyperparameters that SDK v3's scripts cannot carry (an apostrophe in a value, a dot in a
  name), as JSON in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from smpkit.errors import ConfigError, Problem
from smpkit_container.environment import Environment

__all__ = ["PACKED", "PARAMETERS_FILE", "decode_overrides"]

PARAMETERS_FILE = "sagemaker_smpkit_parameters_file"
PACKED = "sagemaker_smpkit_packed"


def decode_overrides(environment: Environment) -> Environment:
    """Return the environment with these hyperparameters decoded; the sources must be unpacked by now.

    Raises:
        ConfigError: one of them cannot be understood.
    """
    framework = dict(environment.framework)
    hyperparameters = {**environment.hyperparameters, **_unpacked(framework.pop(PACKED, "{}"))}
    name = framework.pop(PARAMETERS_FILE, None)
    if name is not None:
        hyperparameters["mp_parameters"] = _parameters(environment, str(name))
    return replace(environment, hyperparameters=hyperparameters, framework=framework)


def _unpacked(text: Any) -> Mapping[str, Any]:
    try:
        values = text if isinstance(text, dict) else json.loads(str(text))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError([Problem(("hyperparameters", PACKED), "must be a JSON object")], subject="hyperparameters")
    return values


def _parameters(environment: Environment, name: str) -> Mapping[str, Any]:
    path = environment.code / name
    where = ("hyperparameters", PARAMETERS_FILE)
    if PurePosixPath(name).name != name:
        raise ConfigError([Problem(where, f"must be the name of a file, got `{name}`")], subject="hyperparameters")
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(where, f"{path} cannot be read: {error}")], subject="hyperparameters") from None
    if not isinstance(value, dict):
        raise ConfigError([Problem(where, f"{path} must hold a JSON object")], subject="hyperparameters")
    return value
