"""One line of a job's log, with its time, its host and its rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

__all__ = ["LogLine", "rank_of"]

_RANK_PREFIX = re.compile(r"^\[rank (?P<ours>\d+)\]|^\[\d+,(?:mpirank:)?(?P<mpi>\d+)")


@dataclass(frozen=True, order=True)
class LogLine:
    """One line of a job's log; sorts by time."""

    time: datetime
    stream: str
    number: int
    """Its position among the lines of its stream that this reader read."""
    text: str = field(compare=False)
    host: str = field(compare=False)
    rank: int | None = field(compare=False)
    """The rank that wrote it, where the launcher put it before the line."""


def rank_of(text: str) -> int | None:
    """Return the rank that the launcher put before a line."""
    found = _RANK_PREFIX.match(text)
    return int(found["ours"] or found["mpi"]) if found else None
