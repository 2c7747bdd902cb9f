"""Clocks for a cloud that is not there: one that stands still until told, one that runs fast."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

__all__ = ["FakeClock", "FastClock"]

_START = datetime(2026, 1, 1, tzinfo=timezone.utc)


class FakeClock:
    """Stands still; `sleep` moves it on at once, so hours pass in no time."""

    def __init__(self, start: datetime = _START) -> None:
        self._now = start
        self.slept = 0.0
        """Seconds that were slept in all."""

    def now(self) -> datetime:
        """The present of this clock."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.slept += seconds
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move on (or back: clocks do jump) from outside."""
        self._now += timedelta(seconds=seconds)


class FastClock:
    """The machine's clock, `speed` times as fast from `origin` on; two processes with one origin agree."""

    def __init__(self, speed: float, origin: datetime) -> None:
        self._speed = speed
        self._origin = origin

    def now(self) -> datetime:
        """The present of this clock."""
        passed = (datetime.now(timezone.utc) - self._origin).total_seconds()
        return self._origin + timedelta(seconds=passed * self._speed)

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds of this clock."""
        time.sleep(seconds / self._speed)
