"""The token of a job: what its processes know and others do not, so that nobody else takes part in it."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from smpkit_container.arguments import compact
from smpkit_container.environment import Environment

__all__ = ["TOKEN", "digest", "job_token"]

TOKEN = "sagemaker_smpkit_token"  # noqa: S105 - its name
"""Hyperparameter: a random text that `smpkit submit` makes for each job with several hosts."""


def job_token(environment: Environment) -> bytes:
    """Return the job's token, the same on all of its hosts.

    One host needs no agreement: its token is random. Jobs of AWS's own SDKs bring none: theirs is a digest of the job's
    configuration, which keeps out whoever reaches a port and cannot describe the job.
    """
    sent = environment.framework.get(TOKEN)
    if sent:
        return str(sent).encode()
    hosts = sorted(environment.resources.hosts)
    if len(hosts) == 1:
        return secrets.token_bytes(32)
    facts = [environment.hyperparameters, environment.framework, hosts, environment.job_name]
    return hashlib.sha256(compact(facts).encode()).digest()


def digest(token: bytes, *words: object) -> str:
    """Return what only those can make who know the token, and what does not tell the token: 64 hexadecimal digits."""
    return hmac.new(token, compact(words).encode(), hashlib.sha256).hexdigest()
