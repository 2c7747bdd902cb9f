"""The clock that waits use. Tests and demonstrations replace it, so that hours pass in milliseconds."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> datetime:
        """The present, in UTC."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """The present, in UTC."""
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
