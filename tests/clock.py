"""A clock that stands still until somebody sleeps."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from smpkit_estimator.backend import Clock


class FakeClock(Clock):
    def __init__(self, now: datetime | None = None) -> None:
        self._now, self.slept = now or datetime.now(timezone.utc), 0.0

    def now(self) -> datetime:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
