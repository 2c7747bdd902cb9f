"""Names of jobs, unique as SDK v2 makes them."""

from __future__ import annotations

from datetime import datetime

__all__ = ["unique_name"]

_MAX_CHARACTERS = 63


def unique_name(base: str, now: datetime) -> str:
    """Return a job name as SDK v2 makes it: the base, cut to fit, and the time to the millisecond."""
    stamp = now.strftime("%Y-%m-%d-%H-%M-%S-") + f"{now.microsecond // 1000:03d}"
    return f"{base[: _MAX_CHARACTERS - len(stamp) - 1].rstrip('-')}-{stamp}"
