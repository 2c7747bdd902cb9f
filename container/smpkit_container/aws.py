"""What a job reads from AWS and leaves there, as its role: objects in S3, entries of Secrets Manager, its token."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smpkit.config.wire import REGION, SECRETS, TOKEN_FILE
from smpkit.errors import ConfigError, LaunchError, Problem
from smpkit_container.environment import Environment
from smpkit_container.variables import compact

_MIN_TOKEN_BYTES = 16


def fetch(uri: str, target: Path, what: str, region: str | None = None) -> None:
    """Download an object of S3 to a file; `what` names it in errors, such as `the source archive`."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(uri)
    try:
        boto3.client("s3", region_name=region).download_file(parts.netloc, parts.path.lstrip("/"), str(target))
    except (BotoCoreError, ClientError, OSError) as error:
        hint = "the job's role needs s3:GetObject for it"
        raise LaunchError(f"{what} {uri} cannot be downloaded: {error}", hint=hint) from error


def put(path: Path, uri: str, region: str | None = None) -> None:
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    parts = urlsplit(uri)
    config = Config(connect_timeout=10, read_timeout=30, retries={"total_max_attempts": 3})
    try:
        client = boto3.client("s3", region_name=region, config=config)
        client.upload_file(str(path), parts.netloc, parts.path.lstrip("/"))
    except (Boto3Error, BotoCoreError, ClientError, OSError, ValueError) as error:
        hint = "the job's role needs s3:PutObject for it"
        raise LaunchError(f"{path} cannot be uploaded to {uri}: {error}", hint=hint) from error


# ---- the job's token -------------------------------------------------------------------------------------------------


def job_token(environment: Environment) -> bytes:
    """Return what the job's processes know and others do not, so that nobody else takes part in it.

    `smpkit submit` puts a random one into a file in S3 that the job's role may read, and names the file in the request:
    whoever may describe the job reads its hyperparameters and variables. One host needs no agreement: its token is
    random. Jobs of AWS's own SDKs bring none: theirs is a digest of the job's configuration, which keeps out whoever
    reaches a port and cannot describe the job.
    """
    hosts = sorted(environment.resources.hosts)
    if len(hosts) == 1:
        return secrets.token_bytes(32)
    place = str(environment.framework.get(TOKEN_FILE) or "")
    if not place:
        facts = [environment.hyperparameters, environment.framework, hosts, environment.job_name]
        return hashlib.sha256(compact(facts).encode()).digest()
    with tempfile.TemporaryDirectory(prefix="smpkit-token-") as folder:
        path = Path(place)
        if place.startswith("s3://"):
            path = Path(folder) / "token"
            fetch(place, path, "the job's token", environment.region)
        try:
            token = path.read_bytes()
        except OSError as error:
            raise LaunchError(f"the job's token {place} cannot be read: {error}") from error
    if len(token) < _MIN_TOKEN_BYTES:
        text = f"the job's token {place} has {len(token)} bytes, fewer than {_MIN_TOKEN_BYTES}"
        raise LaunchError(text, hint="submit the job again")
    return token


def digest(token: bytes, *words: object) -> str:
    """Return what only those can make who know the token, and what does not tell the token: 64 hexadecimal digits."""
    return hmac.new(token, compact(words).encode(), hashlib.sha256).hexdigest()


# ---- the job's secrets -----------------------------------------------------------------------------------------------


def secret_variables(environment: Environment) -> dict[str, str]:
    """Return the variables whose values are entries of Secrets Manager, so that they are in no request and no log.

    Errors name the entry and never its value.
    """
    wanted = environment.framework.get(SECRETS) or {}
    if not isinstance(wanted, dict) or not all(isinstance(place, dict) for place in wanted.values()):
        problem = Problem(("hyperparameters", SECRETS), "must be a JSON object of objects")
        raise ConfigError([problem], subject="hyperparameters")
    if not wanted:
        return {}
    region = str(environment.framework.get(REGION) or os.environ.get("AWS_REGION") or "") or None
    texts: dict[str, str] = {}
    return {name: _secret(name, place, texts, region) for name, place in wanted.items()}


def _secret(name: str, place: Mapping[str, Any], texts: dict[str, str], region: str | None) -> str:
    entry, key = str(place.get("entry") or ""), place.get("key")
    if entry not in texts:
        texts[entry] = _entry(name, entry, region)
    value = texts[entry]
    if key is not None:
        try:
            value = json.loads(value)[str(key)]
        except (ValueError, KeyError, TypeError):
            value = None  # type: ignore[assignment]
        if not isinstance(value, str):
            raise LaunchError(f"the secret {name}: the entry `{entry}` is no JSON object with a text at `{key}`")
    if "\0" in value:
        raise LaunchError(f"the secret {name} (entry `{entry}`) holds a NUL character, which no variable can")
    return value


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
