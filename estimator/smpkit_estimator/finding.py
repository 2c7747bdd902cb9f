"""What `smpkit doctor` found about one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from smpkit.errors import SmpkitError

__all__ = ["Finding", "tried"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: Literal["ok", "problem", "info"]
    text: str
    hint: str | None = None


def tried(what: str, check: Callable[[], Finding], *, needed: bool = True) -> Finding:
    """Return what `check` finds, or its error: a problem if it is `needed`."""
    try:
        return check()
    except SmpkitError as error:
        return Finding(what, "problem" if needed else "info", error.message, error.hint)
