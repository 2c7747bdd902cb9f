"""Names of jobs, unique as SDK v2 makes them."""

from __future__ import annotations

import re
from datetime import datetime

__all__ = ["base_name", "unique_name"]

_MAX_CHARACTERS = 63
_STAMP = re.compile(r"-\d{4}(-\d{2}){5}-\d{3}$")


def unique_name(base: str, now: datetime, longest: int = _MAX_CHARACTERS) -> str:
    """Return a job name as SDK v2 makes it: the base, cut to fit, and the time to the millisecond."""
    stamp = now.strftime("%Y-%m-%d-%H-%M-%S-") + f"{now.microsecond // 1000:03d}"
    return f"{base[: longest - len(stamp) - 1].rstrip('-')}-{stamp}"


def base_name(name: str) -> str:
    """Return a job's name without the time that `unique_name` has put behind it."""
    return _STAMP.sub("", name)
