"""Read the job's secrets from AWS Secrets Manager, so that they are in no request, no job file and no log."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from smpkit.config.wire import REGION, SECRETS
from smpkit.errors import ConfigError, LaunchError, Problem
from smpkit_container.environment import Environment

__all__ = ["secret_variables"]


def secret_variables(environment: Environment) -> dict[str, str]:
    """Return the variables whose values are entries of Secrets Manager; none if the job has none.

    Raises:
        ConfigError: the hyperparameter is not of this form.
        LaunchError: an entry cannot be read, or is no text; the message names the entry and never its value.
    """
    wanted = environment.framework.get(SECRETS) or {}
    if not isinstance(wanted, dict) or not all(isinstance(place, dict) for place in wanted.values()):
        problem = Problem(("hyperparameters", SECRETS), "must be a JSON object of objects")
        raise ConfigError([problem], subject="hyperparameters")
    if not wanted:
        return {}
    region = str(environment.framework.get(REGION) or os.environ.get("AWS_REGION") or "") or None
    texts: dict[str, str] = {}
    return {name: _value(name, place, texts, region) for name, place in wanted.items()}


def _value(name: str, place: Mapping[str, Any], texts: dict[str, str], region: str | None) -> str:
    entry, key = str(place.get("entry") or ""), place.get("key")
    if entry not in texts:
        texts[entry] = _entry(name, entry, region)
    value = texts[entry] if key is None else _member(name, entry, str(key), texts[entry])
    if "\0" in value:
        raise LaunchError(f"the secret {name} (entry `{entry}`) holds a NUL character, which no variable can")
    return value


def _member(name: str, entry: str, key: str, text: str) -> str:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if not isinstance(whole, dict) or not isinstance(whole.get(key), str):
        raise LaunchError(f"the secret {name}: the entry `{entry}` is no JSON object with a text at `{key}`")
    return str(whole[key])


def _entry(name: str, entry: str, region: str | None) -> str:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    if entry.startswith("arn:"):
        region = entry.split(":")[3]
    # All hosts of a job ask at once.
    patient = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 8})
    try:
        client = boto3.client("secretsmanager", region_name=region, config=patient)
        answer = client.get_secret_value(SecretId=entry)
    except (BotoCoreError, ClientError) as error:
        raise LaunchError(
            f"the secret {name} (entry `{entry}`) cannot be read: {error}",
            hint="the job's role needs `secretsmanager:GetSecretValue` for it, and `kms:Decrypt` for a key of its own",
        ) from None
    if not isinstance(answer.get("SecretString"), str):
        raise LaunchError(f"the secret {name} (entry `{entry}`) is not a text")
    return str(answer["SecretString"])
