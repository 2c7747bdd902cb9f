"""What a job reads from AWS and leaves there, as its role: objects in S3, entries of Secrets Manager, its token."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smpkit.config.wire import SECRETS, TOKEN_FILE
from smpkit.errors import ConfigError, LaunchError, Problem
from smpkit_container.environment import Environment
from smpkit_container.variables import compact

_MIN_TOKEN_BYTES = 16


def fetch(uri: str, target: Path, what: str, region: str | None = None) -> None:
    """Download an object of S3 to a file; `what` names it in errors, such as `the source archive`."""
    failed, hint = f"{what} {uri} cannot be downloaded", "the job's role needs s3:GetObject for it"
    with _client("s3", region, failed, hint) as s3:
        s3.download_file(*_place(uri), str(target))


def put(path: Path, uri: str, region: str | None = None) -> None:
    failed, hint = f"{path} cannot be uploaded to {uri}", "the job's role needs s3:PutObject for it"
    with _client("s3", region, failed, hint, attempts=3) as s3:  # the container is about to end
        s3.upload_file(str(path), *_place(uri))


def _place(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    return parts.netloc, parts.path.lstrip("/")


@contextlib.contextmanager
def _client(service: str, region: str | None, failed: str, hint: str, *, attempts: int = 8) -> Iterator[Any]:
    """Yield a client of a service of AWS; what fails with it is a LaunchError that says what `failed`."""
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    retries = {"mode": "standard", "total_max_attempts": attempts}  # all hosts of a job ask at once
    config = Config(connect_timeout=10, read_timeout=30, retries=retries)
    try:
        yield boto3.client(service, region_name=region, config=config)
    except (Boto3Error, BotoCoreError, ClientError, OSError, ValueError) as error:
        raise LaunchError(f"{failed}: {error}", hint=hint) from None


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
    region = environment.region or os.environ.get("AWS_REGION") or None
    texts: dict[str, str] = {}
    variables = {}
    for name, place in wanted.items():
        entry, key = str(place.get("entry") or ""), place.get("key")
        if entry not in texts:
            texts[entry] = _entry(name, entry, region)
        value: Any = texts[entry]
        if key is not None:
            try:
                value = json.loads(value)[str(key)]
            except (ValueError, KeyError, TypeError):
                value = None
            if not isinstance(value, str):
                raise LaunchError(f"the secret {name}: the entry `{entry}` is no JSON object with a text at `{key}`")
        if "\0" in value:
            raise LaunchError(f"the secret {name} (entry `{entry}`) holds a NUL character, which no variable can")
        variables[name] = value
    return variables


def _entry(name: str, entry: str, region: str | None) -> str:
    if entry.startswith("arn:"):
        region = entry.split(":")[3]
    failed = f"the secret {name} (entry `{entry}`) cannot be read"
    hint = "the job's role needs `secretsmanager:GetSecretValue` for it, and `kms:Decrypt` for a key of its own"
    with _client("secretsmanager", region, failed, hint) as manager:
        text = manager.get_secret_value(SecretId=entry).get("SecretString")
    if not isinstance(text, str):
        raise LaunchError(f"the secret {name} (entry `{entry}`) is not a text")
    return text
