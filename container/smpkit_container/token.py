"""The token of a job: what its processes know and others do not, so that nobody else takes part in it.

`smpkit submit` puts a random one into a file in S3 that the job's role may read, and names the file in the request. It
is in no hyperparameter and no variable: whoever may describe the job reads those.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tempfile
from pathlib import Path

from smpkit.config.wire import TOKEN_FILE
from smpkit.errors import LaunchError
from smpkit_container.arguments import compact
from smpkit_container.environment import Environment
from smpkit_container.s3 import fetch

__all__ = ["digest", "job_token"]

_MIN_BYTES = 16


def job_token(environment: Environment) -> bytes:
    """Return the job's token, the same on all of its hosts.

    One host needs no agreement: its token is random. Jobs of AWS's own SDKs bring none: theirs is a digest of the job's
    configuration, which keeps out whoever reaches a port and cannot describe the job.

    Raises:
        LaunchError: the file cannot be read, or is too short to be a secret.
    """
    hosts = sorted(environment.resources.hosts)
    if len(hosts) == 1:
        return secrets.token_bytes(32)
    place = environment.framework.get(TOKEN_FILE)
    if place:
        return _read(environment, str(place))
    facts = [environment.hyperparameters, environment.framework, hosts, environment.job_name]
    return hashlib.sha256(compact(facts).encode()).digest()


def digest(token: bytes, *words: object) -> str:
    """Return what only those can make who know the token, and what does not tell the token: 64 hexadecimal digits."""
    return hmac.new(token, compact(words).encode(), hashlib.sha256).hexdigest()


def _read(environment: Environment, place: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="smpkit-token-") as folder:
        path = Path(place)
        if place.startswith("s3://"):
            path = Path(folder) / "token"
            fetch(place, path, "the job's token", environment.region)
        try:
            found = path.read_bytes()
        except OSError as error:
            raise LaunchError(f"the job's token {place} cannot be read: {error}") from error
    if len(found) < _MIN_BYTES:
        text = f"the job's token {place} has {len(found)} bytes, fewer than {_MIN_BYTES}"
        raise LaunchError(text, hint="submit the job again")
    return found
